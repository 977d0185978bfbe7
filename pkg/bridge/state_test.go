// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// open starts an agent without a server, and ends it.
func (x *xpu) open() error {
	x.t.Helper()
	return x.Do(func() error {
		agent, err := service.New(x.cfg, testr.New(x.t))
		if err != nil {
			return err
		}
		return agent.Close()
	})
}

// testStateIsMissing checks that an agent whose state file is missing, empty or another one does
// not end the traffic of pods, unless --new-state is set.
func testStateIsMissing(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	one, two := newPod(t, x, rep1, 1), newPod(t, x, rep2, 2)
	x.port(rep1, "net-blue", one.mac)
	x.port(rep2, "net-blue", two.mac)
	x.stop()
	path := x.cfg.State
	kept, err := os.ReadFile(path)
	must.Succeed(t, err)

	for name, lose := range map[string]func(){
		"missing":      func() { must.Succeed(t, os.Remove(path)) },
		"empty":        func() { must.Succeed(t, os.Truncate(path, 0)) },
		"another path": func() { x.cfg.State = filepath.Join(t.TempDir(), "state.db") },
	} {
		lose()
		for range 2 { // a second start is refused too
			err := x.open()
			if err == nil || !strings.Contains(err.Error(), x.cfg.State) ||
				!strings.Contains(err.Error(), "--new-state") ||
				!strings.Contains(err.Error(), rep1) {
				t.Errorf("%s: error %v, want one that names the file, a port and --new-state",
					name, err)
			}
		}

		reach(t, one, two)
		x.cfg.State = path
		must.Succeed(t, os.WriteFile(path, kept, 0o600))
	}

	must.Succeed(t, x.open())
	reach(t, one, two)

	must.Succeed(t, os.Remove(path))
	x.cfg.NewState = true
	must.Succeed(t, x.open())
	noReach(t, one, two)
	x.cfg.NewState = false
	must.Succeed(t, x.open())
}

// TestStateIsDamaged checks that the agent refuses a damaged state file with an error that names
// the file and says what to do, and that it leaves the data plane alone.
func TestStateIsDamaged(t *testing.T) {
	x := newXPU(t, plane.ModeAuto, "")
	x.start()
	x.network("net-blue", 10, 0)
	x.stop()
	path := x.cfg.State
	content, err := os.ReadFile(path)
	must.Succeed(t, err)

	for name, damaged := range map[string][]byte{
		"a name":    bytes.ReplaceAll(content, []byte("net-blue"), []byte("net-clue")),
		"truncated": content[:8192],
		"short":     content[:100],
		"garbage":   []byte(strings.Repeat("not a state ", 1000)),
		"data garbled": append(append([]byte{}, content[:8192]...),
			[]byte(strings.Repeat("\x55", len(content)-8192))...),
	} {
		must.Succeed(t, os.WriteFile(path, damaged, 0o600))
		err := x.open()
		if !errors.Is(err, boltfile.ErrCorrupt) || !strings.Contains(err.Error(), path) ||
			!strings.Contains(err.Error(), "--new-state") {
			t.Errorf("%s: error %v, want %v with the path and what to do", name, err,
				boltfile.ErrCorrupt)
		}

		if !x.hasLink("br-net-blue") && !x.hasLink("br-opi") {
			t.Fatalf("%s: the data plane is gone", name)
		}
	}

	must.Succeed(t, os.WriteFile(path, content, 0o600))
	must.Succeed(t, x.open())
}
