// SPDX-License-Identifier: Apache-2.0

package cardid

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// TestRead covers a card whose driver reports no identity.
func TestRead(t *testing.T) {
	const pf pci.Address = "ffff:ff:1f.7" // no machine has this address
	const data = "\x90\x0f\x00SN\x0cMT2334XZ0LTK\x78"
	for what, test := range map[string]struct {
		write         func(path string) error
		want, problem string
	}{
		"a serial number": {func(path string) error {
			return os.WriteFile(path, []byte(data),
				0o600)
		}, "MT2334XZ0LTK", ""},
		"no VPD": {func(string) error { return nil }, "", ""},
		"garbage": {func(path string) error {
			return os.WriteFile(path, []byte("garbage"),
				0o600)
		}, "", "vpd: byte 0 is 0x67"},
		"a directory": {func(path string) error {
			return os.Mkdir(path,
				0o700)
		}, "", "is a directory"},
	} {
		root := t.TempDir()
		dir := filepath.Join(root, "bus/pci/devices", string(pf))
		if err := errors.Join(os.MkdirAll(dir, 0o700),
			test.write(filepath.Join(dir, "vpd"))); err != nil {
			t.Fatal(err)
		}

		got, err := Read(root, pf)
		if got != (function.Card{Serial: test.want}) || (err == nil) != (test.problem == "") ||
			err != nil && !strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s: %+v, %v; want %q, %q", what, got, err, test.want, test.problem)
		}
	}
}
