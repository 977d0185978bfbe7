// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"fmt"
	"slices"
	"testing"

	"github.com/k8snetworkplumbingwg/sriovnet"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// witnessed compares VFs with the results of sriovnet, which reads the same kernel by other code.
func witnessed(t *testing.T, functions []function.Function) {
	t.Helper()
	for _, f := range functions {
		netdevs, err := sriovnet.GetNetDevicesFromPci(string(f.ID.Address))
		if err != nil || !slices.Contains(netdevs, f.Netdev) {
			t.Errorf("%s: sriovnet says that its netdevs are %q, %v, want %s among them", f.ID,
				netdevs, err, f.Netdev)
		}
		if f.Kind != function.VF {
			continue
		}

		index, err := sriovnet.GetVfIndexByPciAddress(string(f.ID.Address))
		if err != nil || index != f.Index {
			t.Errorf("%s: sriovnet says that it is VF %d, %v, want %d", f.ID, index, err, f.Index)
		}

		pf, err := sriovnet.GetPfPciFromVfPci(string(f.ID.Address))
		if err != nil || pf != string(f.PF) {
			t.Errorf("%s: sriovnet says that its PF is %s, %v, want %s", f.ID, pf, err, f.PF)
		}
	}
}

// witnessedRepresentors compares the representors of a PF in mode switchdev with sriovnet's
// results.
func witnessedRepresentors(t *testing.T, pf pci.Address, uplink string) {
	t.Helper()
	for i := range card.Number(t, pf, "sriov_numvfs") {
		vf := card.VF(t, pf, i)
		if got, err := sriovnet.GetUplinkRepresentor(string(vf)); err != nil || got != uplink {
			t.Errorf("%s: sriovnet says that its uplink is %s, %v, want %s", vf, got, err, uplink)
		}

		want := representorName(t, pf, fmt.Sprintf("pf0vf%d", i))
		if got, err := sriovnet.GetVfRepresentor(uplink, i); err != nil || got != want {
			t.Errorf("VF %d: sriovnet says that its representor is %s, %v, want %s",
				i, got, err, want)
		}
	}
}
