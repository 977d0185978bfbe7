// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory/witness"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// witnessed checks that sriovnet, which reads the same kernel by other code, says the same about
// the Functions of a PF, or of all cards if pf is "". unknown are the properties that sriovnet
// cannot say of some of them, sorted.
func witnessed(t *testing.T, pf pci.Address, unknown ...string) {
	t.Helper()
	v := compared(t, func() []function.Function {
		// the NIC to the host is not one of the cards
		return slices.DeleteFunc(inventoried(t), func(f function.Function) bool {
			return f.Netdev == plan.HostNetdev || pf != "" && f.PF != pf
		})
	})

	var got []string
	for _, u := range v.Unknowns {
		got = append(got, u.Property)
	}
	if v.Different > 0 || v.Same == 0 || v.Skipped != "" || !slices.Equal(got, unknown) {
		t.Errorf("sriovnet cannot say %q, want %q, and it says: %+v", got, unknown, v)
	}
	t.Logf("sriovnet says the same of %d properties, and cannot say %d", v.Same, v.Unknown)
}

// disputed checks that the comparison finds an inventory that is wrong.
func disputed(t *testing.T, functions []function.Function) {
	t.Helper()
	functions = slices.Clone(functions)
	i := slices.IndexFunc(functions, func(f function.Function) bool {
		return f.Kind == function.VF
	})
	functions[i].Index, functions[i].Netdev = functions[i].Index+40, "no-such-netdev"

	v := compared(t, func() []function.Function { return functions })
	var got []string
	for _, d := range v.Differences {
		if d.Function == functions[i].ID {
			got = append(got, d.Property)
		}
	}
	if strings.Join(got, " ") != "netdev vf-index" || v.Different != len(got) {
		t.Errorf("different are %q, want netdev and vf-index: %+v", got, v)
	}
}

// compared compares Functions with what sriovnet says.
func compared(t *testing.T, functions func() []function.Function) nodestate.Verification {
	t.Helper()
	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	defer conn.Close()

	return witness.Verify(t.Context(), witness.Source{
		SysRoot: "/sys", Ports: conn.Ports,
		Functions: func(context.Context) ([]function.Function, error) { return functions(), nil },
	})
}
