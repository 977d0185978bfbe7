// SPDX-License-Identifier: Apache-2.0

package deviceinfo_test

import (
	"encoding/json"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceinfo"
)

func TestOf(t *testing.T) {
	pf := function.Function{
		ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF, PF: "0000:3b:00.0",
	}
	vf := function.Function{
		ID: function.ID{Address: "0000:3b:02.1"}, Kind: function.VF, PF: "0000:3b:00.0",
	}
	sf := function.Function{
		ID: function.SubfunctionID("0000:3b:00.0", 88), Kind: function.SF, PF: "0000:3b:00.0",
	}

	with := func(f function.Function, driver, device string) function.Function {
		f.VDPA = function.VDPA{Name: "vdpa0", Driver: driver, CharDevice: device}
		return f
	}

	for _, test := range []struct {
		name     string
		function function.Function
		asVDPA   bool
		want     string
	}{
		{"PF", pf, true, `{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.0"}}`},
		{"VF", vf, true,
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:02.1","pf-pci-address":"0000:3b:00.0"}}`},
		{"SF", sf, true, `null`},
		{"VF with vhost-vdpa", with(vf, "vhost_vdpa", "vhost-vdpa-0"), true,
			`{"type":"vdpa","version":"1.1.0","vdpa":{"parent-device":"vdpa0","driver":"vhost","path":"/dev/vhost-vdpa-0","pci-address":"0000:3b:02.1","pf-pci-address":"0000:3b:00.0"}}`},
		{"SF with virtio-vdpa", with(sf, "virtio_vdpa", ""), true,
			`{"type":"vdpa","version":"1.1.0","vdpa":{"parent-device":"vdpa0","driver":"virtio","pf-pci-address":"0000:3b:00.0"}}`},
		{"vDPA device that the pod does not get", with(vf, "vhost_vdpa", "vhost-vdpa-0"), false,
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:02.1","pf-pci-address":"0000:3b:00.0"}}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := json.Marshal(deviceinfo.Of(test.function, test.asVDPA))
			if err != nil || string(got) != test.want {
				t.Errorf("%s, %v, want %s", got, err, test.want)
			}
		})
	}
}
