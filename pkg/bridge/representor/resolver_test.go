// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor/representortest"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

func TestResolve(t *testing.T) {
	root := t.TempDir()
	// The links override arithmetic, which would give these two VFs the other way round.
	representortest.MakePF(t, root, "0000:01:00.0", "4 128 2", "0000:01:10.2", "0000:01:10.0")
	representortest.MakePF(t, root, "0000:02:00.0", "4 16 1")

	here := Config{
		Sysfs:   sysfs.Root(root),
		HostPFs: []HostPF{{Address: "0000:01:00.0"}, {Address: "0000:02:00.0"}},
	}

	numbered := Config{
		Sysfs: sysfs.Root(root), HostPFs: []HostPF{{Name: "pf1"}, {Name: "c1pf0"}},
	}
	none := Config{Sysfs: sysfs.Root(root)}

	host := Config{Sysfs: sysfs.Root(root), HostPFs: []HostPF{
		{Address: "0000:3b:00.0", Name: "c1pf0", Offset: 2, Stride: 1, Eswitch: "0000:03:00.0"},
		{Address: "0000:3b:00.1", Name: "c1pf1", Offset: 17, Stride: 1},
		{Address: "0000:5e:00.0", Name: "pf7"},
	}}

	own := func(pf pci.Address, function string) eswitchPort {
		return eswitchPort{eswitch: pf, name: portName{function: function}}
	}
	atHost := func(pf, function string) eswitchPort {
		return eswitchPort{name: portName{pf, function}}
	}
	onOne := func(p eswitchPort) eswitchPort { p.eswitch = "0000:03:00.0"; return p }
	tests := []struct {
		name     string
		resolver Config
		port     string
		want     eswitchPort
		says     string
	}{
		{"VF by its links", here, "vf-0000-01-10-0", own("0000:01:00.0", "vf1"), ""},
		{"VF that is not there yet", here, "vf-0000-01-10-4", own("0000:01:00.0", "vf2"), ""},
		{"VF of another PF that is not there yet", here, "vf-0000-02-02-3",
			own("0000:02:00.0", "vf3"), ""},
		{"VF that there cannot be", here, "vf-0000-02-02-4", eswitchPort{},
			"0000:02:02.4 is no --host-pf and no VF of one"},
		{"VF between two", here, "vf-0000-01-10-3", eswitchPort{}, "--host-pf"},
		{"SF", here, "sf-01-00-0-88", own("0000:01:00.0", "sf88"), ""},
		{"SF of no PF", here, "sf-3b-00-0-88", eswitchPort{},
			"PF 0000:3b:00.0, whose SF it is, is no --host-pf"},
		{"PF", here, "vf-0000-01-00-0", eswitchPort{}, "0000:01:00.0 is a PF of this machine"},
		{"no address", here, "net-blue", eswitchPort{}, "tells no PCI address"},
		{"name of an eswitch port", here, "c1pf0vf3", eswitchPort{name: portName{"c1pf0", "vf3"}},
			""},
		{"name of an own one", here, "pf1sf88", eswitchPort{}, "no --host-pf is pf1"},
		{"name where the kernel names no controllers", numbered, "pf1sf88",
			eswitchPort{name: portName{"pf1", "sf88"}}, ""},
		{"name of another PF", numbered, "pf0sf88", eswitchPort{}, "such as c1pf0sf88"},
		{"own SF where PFs have no addresses", numbered, "sf-01-00-0-88", eswitchPort{},
			"such as pf1sf88"},
		{"own VF where PFs have no addresses", numbered, "vf-0000-01-10-0", eswitchPort{},
			"such as pf1vf0"},
		{"own SF where no PF is told", none, "sf-01-00-0-88", eswitchPort{}, "such as c1pf0sf88"},
		{"own VF where no PF is told", none, "vf-0000-01-10-0", eswitchPort{}, "such as c1pf0vf0"},

		{"host's VF", host, "vf-0000-3b-00-2", onOne(atHost("c1pf0", "vf0")), ""},
		{"host's VF below those of the next PF", host, "vf-0000-3b-02-1",
			onOne(atHost("c1pf0", "vf15")), ""},
		{"host's VF of the next PF", host, "vf-0000-3b-02-3", atHost("c1pf1", "vf1"), ""},
		{"host's SF", host, "sf-3b-00-1-4", atHost("c1pf1", "sf4"), ""},
		{"host's PF", host, "vf-0000-3b-00-1", atHost("c1pf1", ""), ""},
		{"host's PF without controller", host, "vf-0000-5e-00-0", atHost("pf7", ""), ""},
		{"host's VF of none", host, "vf-0001-5e-00-2", eswitchPort{},
			"0001:5e:00.2 is no --host-pf and no VF of one"},
		{"own VF, but addresses are the host's", host, "vf-0000-01-10-0", eswitchPort{},
			"0000:01:10.0 is no --host-pf"},
		{"own SF, but addresses are the host's", host, "sf-01-00-0-88", eswitchPort{},
			"whose SF it is, is no --host-pf"},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := test.resolver.resolve(test.port)
			if diff := cmp.Diff(test.want,
				got, cmp.AllowUnexported(eswitchPort{}, portName{})); diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
			if (err != nil) != (test.says != "") ||
				err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %q", err, test.says)
			}
		})
	}
}
