// SPDX-License-Identifier: Apache-2.0

// Package representortest makes what tests of representors look at.
package representortest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// MakePF adds a PF to a directory that looks like sysfs. The capability is "total offset stride" of
// its VFs, of which those with the given addresses exist.
func MakePF(t *testing.T, root string, pf pci.Address, capability string, vfs ...pci.Address) {
	t.Helper()
	dir := func(a pci.Address) string { return filepath.Join(root, "bus/pci/devices", string(a)) }
	write := func(device pci.Address, name, content string) {
		t.Helper()
		must.Succeed(t, os.MkdirAll(dir(device), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(dir(device), name), []byte(content+"\n"), 0o644))
	}

	for _, a := range append(vfs, pf) {
		write(a, "vendor", "0x15b3")
	}

	numbers := strings.Fields(capability)
	for i, name := range []string{"sriov_totalvfs", "sriov_offset", "sriov_stride"} {
		write(pf, name, numbers[i])
	}

	for i, vf := range vfs {
		must.Succeed(t, os.Symlink("../"+string(pf), filepath.Join(dir(vf), "physfn")))
		link := filepath.Join(dir(pf), fmt.Sprintf("virtfn%d", i))
		must.Succeed(t, os.Symlink("../"+string(vf), link))
	}
}
