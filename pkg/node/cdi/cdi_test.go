// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const kind = "xpu.opiproject.org/function"

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must.Succeed(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cdi")
	d, err := cdi.Open(path)
	must.Succeed(t, err)

	devices := []specs.Device{{Name: "a", ContainerEdits: specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{HostPath: "/dev/vfio/noiommu-1", Path: "/dev/vfio/1", Permissions: "rw"},
		},
	}}}

	must.Succeed(t, d.Write("xpu.opiproject.org-1.yaml", kind, devices))
	must.Succeed(t, d.Write("xpu.opiproject.org-2.yaml", "xpu.opiproject.org/other", devices))
	if !d.Has("xpu.opiproject.org-1.yaml") || d.Has("xpu.opiproject.org-3.yaml") {
		t.Errorf("the directory has %q", names(t, path))
	}

	again, err := cdi.Open(path)
	must.Succeed(t, err)
	files := again.Files(kind)
	if got := files["xpu.opiproject.org-1.yaml"]; len(files) != 1 || len(got) != 1 ||
		got[0].Name != "a" ||
		*got[0].ContainerEdits.DeviceNodes[0] != *devices[0].ContainerEdits.DeviceNodes[0] {
		t.Errorf("files of the kind are %+v", files)
	}

	must.Succeed(t, d.Write("xpu.opiproject.org-1.yaml", kind, nil)) // no devices, so no file
	must.Succeed(t, d.Remove("xpu.opiproject.org-2.yaml"))
	must.Succeed(t, d.Remove("xpu.opiproject.org-2.yaml"))
	if left := names(t, path); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

// TestUnreadable: a directory that cannot be read is not taken for an empty one.
func TestUnreadable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cdi")
	must.Succeed(t, os.Symlink("cdi", path)) // a loop
	if _, err := cdi.Open(path); !errors.Is(err, unix.ELOOP) {
		t.Errorf("error %v, want ELOOP", err)
	}

	must.Succeed(t, os.Remove(path))
	if _, err := cdi.Open(path); err != nil {
		t.Errorf("without a directory: %v", err)
	}
}

// TestUnfinished checks that unfinished files of a killed agent are removed, and that files of
// other programs stay.
func TestUnfinished(t *testing.T) {
	path := t.TempDir()
	for _, name := range []string{
		".xpu.opiproject.org-1.yaml.tmp/spec.1.tmp",
		".xpu.opiproject.org-2.json.tmp/xpu.opiproject.org-2.json",
		"spec.3.tmp", "gpu.yaml", ".xpu.opiproject.org_metadata_1_2.json.3.tmp",
	} {
		must.Succeed(t, os.MkdirAll(filepath.Dir(filepath.Join(path, name)), 0o700))
		must.Succeed(t, os.WriteFile(filepath.Join(path, name), nil, 0o600))
	}

	_, err := cdi.Open(path)
	must.Succeed(t, err)
	if left := names(t, path); !slices.Equal(left,
		[]string{".xpu.opiproject.org_metadata_1_2.json.3.tmp", "gpu.yaml", "spec.3.tmp"}) {
		t.Errorf("left %q", left)
	}
}

func TestNotWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	d, err := cdi.Open(path)
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(path, nil, 0o600))
	if err := d.Write("a.yaml", kind, []specs.Device{{Name: "a"}}); err == nil ||
		!strings.Contains(err.Error(), "CDI file a.yaml") {
		t.Errorf("error %v, want one that names the file", err)
	}
}
