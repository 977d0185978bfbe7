package netdev_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestRebindDriver(t *testing.T) {
	const vf = "0000:3b:00.2"
	for name, test := range map[string]struct {
		driver, vfs string
		err         string
	}{
		"VF":          {driver: "iavf"},
		"PF with VFs": {driver: "ice", vfs: "8", err: "has 8 VFs, which would end"},
		"PF without":  {driver: "ice", vfs: "0"},
		"no driver":   {err: "has no driver"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			device, driver := filepath.Join(root, "bus/pci/devices", vf), filepath.Join(root, "bus/pci/drivers", test.driver)
			for _, dir := range []string{device, driver} {
				must.Succeed(t, os.MkdirAll(dir, 0o700))
			}
			for _, order := range []string{"unbind", "bind"} {
				must.Succeed(t, os.WriteFile(filepath.Join(driver, order), nil, 0o600))
			}
			if test.driver != "" {
				must.Succeed(t, os.Symlink(driver, filepath.Join(device, "driver")))
			}
			if test.vfs != "" {
				must.Succeed(t, os.WriteFile(filepath.Join(device, "sriov_numvfs"), []byte(test.vfs), 0o600))
			}

			err := netdev.RebindDriver(root)(t.Context(), "pci", vf)
			want := vf
			if test.err != "" {
				want = ""
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want one with %q", err, test.err)
				}
			} else if err != nil {
				t.Error(err)
			}
			for _, order := range []string{"unbind", "bind"} {
				if got, _ := os.ReadFile(filepath.Join(driver, order)); string(got) != want {
					t.Errorf("%s %q, want %q", order, got, want)
				}
			}
		})
	}
	if err := netdev.RebindDriver(t.TempDir())(context.Background(), "pci", vf); err == nil {
		t.Error("a device that is gone is bound again")
	}
}
