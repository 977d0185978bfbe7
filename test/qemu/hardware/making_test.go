// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/stage"
)

// TestMakingVFs plays drivers that make VFs. It checks that a successful write of the number proves
// nothing, and that missing VFs are reported.
func TestMakingVFs(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	first := card.Number(t, pf, "sriov_numvfs")
	s, supply := stage.New(t, pf), newSupplier(t, pf)
	t.Cleanup(func() {
		s.Write(t, "")
		supply.want(int32(first))
		end := supply.run(t)
		supply.made(t, first)
		end()
	})

	for _, c := range []struct {
		name, lines string
		made        int
	}{
		{"success, and no VF (bnxt without resources, hns3)", "numvfs=ignore", 0},
		{"fewer VFs than asked for (bnxt, bnx2x)", "numvfs.most=1", 1},
		{"refused by the firmware (ionic)", "numvfs=EBUSY", 0},
		{"refused while an operation is pending (i40e)", "numvfs=EAGAIN", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			card.SetAttribute(t, pf, "sriov_numvfs", "0")
			s.Write(t, c.lines)
			end := supply.run(t)
			defer end()

			supply.want(2)
			supply.until(t, "what is missing is said", func() (bool, any) {
				lacks, known := supply.vfs.Supply(declared)
				said := known && len(lacks.Shortages) == 1
				return said && lacks.Shortages[0].Reason != v1alpha1.ReasonMaking, lacks
			})

			lacks, _ := supply.vfs.Supply(declared)
			t.Logf("%+v", lacks.Shortages)
			if got := card.Number(t, pf, "sriov_numvfs"); got != c.made {
				t.Errorf("the PF has %d VFs, want %d", got, c.made)
			}
		})
	}

	t.Run("netdevs come later (iavf)", func(t *testing.T) {
		card.SetAttribute(t, pf, "sriov_numvfs", "0")
		s.Write(t, "numvfs.late=500")
		end := supply.run(t)
		defer end()

		supply.want(2)
		supply.made(t, 2)

		supply.until(t, "the VFs have their netdevs", func() (bool, any) {
			vf, _ := supply.inventory.Get(function.ID{Address: card.VF(t, pf, 1)})
			return vf.Netdev != "", vf
		})
	})
}
