// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestRunEmptied: the directories below /run are emptied under a pod that has a Function by a
// claim and one by an extended resource. All that the agent had there is there again.
// docs/reference/files.md says of each file why it is needed or not.
func TestRunEmptied(t *testing.T) {
	s := newCRDSite(t)
	vf, claimed := s.vfs[0], s.vfs[1]
	p := newPod(t, "pod1")
	_, c := s.giveBoth(p, vf, claimed)

	directories := []string{
		s.config.CDIDir, filepath.Join(s.config.DeviceInfoDir, "dp"), filepath.Dir(s.config.CNISocket),
	}
	before := filesIn(t, directories...)
	if len(before) < 4 {
		t.Errorf("there are %v, want two CDI files, a device-info file and a socket", before)
	}
	wantAgain := func(what string) {
		t.Helper()
		must.EventuallySucceed(t, what, func() error {
			if diff := cmp.Diff(before, filesIn(t, directories...)); diff != "" {
				return errors.New(diff)
			}
			return nil
		})
	}

	empty(t, directories...)
	wantAgain("all is there again")
	s.wantPorts(vf, claimed)

	s.end()
	empty(t, directories...) // a reboot does the same
	s.start()
	wantAgain("all is there again after the agent's start")

	s.stopSandbox(p)
	s.del(p, vf)
	s.unprepare(s.register(), c)
	s.delete(c)
	s.pods.Set()
	s.eventually("the xPU serves nothing", func() bool { return len(s.opi.Ports()) == 0 })
	s.endClean()
}

// filesIn returns the content of the files in the directories, by path. Sockets have none.
func filesIn(t *testing.T, directories ...string) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, dir := range directories {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		for _, entry := range entries {
			path, content := filepath.Join(dir, entry.Name()), []byte{}
			if entry.Type().IsRegular() {
				content, err = os.ReadFile(path)
			}
			if err == nil {
				files[path] = string(content)
			}
		}
	}
	return files
}

// empty removes what is in the directories, and not the directories themselves, which are mounted.
func empty(t *testing.T, directories ...string) {
	t.Helper()
	for _, dir := range directories {
		entries, err := os.ReadDir(dir)
		must.Succeed(t, err)
		for _, entry := range entries {
			must.Succeed(t, os.RemoveAll(filepath.Join(dir, entry.Name())))
		}
	}
}
