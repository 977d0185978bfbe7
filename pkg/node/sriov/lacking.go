// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// lacking returns the PFs of a DevicePool whose VFs exist but cannot serve pods. Such VFs have no
// driver, for example because sriov_drivers_autoprobe is 0, or their driver has made no netdev.
// Some drivers, such as iavf, make the netdev after the VFs exist. VFs that a pod has do not count,
// nor VFs of a DevicePool that binds a driver itself.
func (v *VFs) lacking(p pool.Pool, functions []function.Function) map[pci.Address]*problem {
	if p.Spec.Driver != "" {
		return nil
	}

	held := map[function.ID]bool{}
	for _, a := range v.Journal.All() {
		held[a.Function] = true
	}

	undriven, bare := map[pci.Address]int{}, map[pci.Address][]function.Function{}
	for _, f := range functions {
		switch {
		case f.Kind != function.VF || f.Class != function.Network || held[f.ID]:
		case f.Driver == "":
			undriven[f.PF]++
		case f.NoNetdev && !f.Userspace() && f.VDPA.Name == "" && !f.RDMA:
			bare[f.PF] = append(bare[f.PF], f)
		}
	}

	problems := map[pci.Address]*problem{}
	for pf, vfs := range bare {
		problems[pf] = problemf(v1alpha1.ReasonNoNetdev,
			"has %d VFs without a netdev, which driver %s may still make; "+
				"if that stays so, see the kernel's log, and bind the driver anew", len(vfs),
			vfs[0].Driver)
	}

	for pf, n := range undriven {
		problems[pf] = problemf(v1alpha1.ReasonNoDriver,
			"has %d VFs without a driver: %s", n, v.whyUndriven(pf))
	}

	return problems
}

// whyUndriven returns why no driver binds to a PF's VFs, and what to do (pci_device_can_probe in
// drivers/pci/pci-driver.c).
func (v *VFs) whyUndriven(pf pci.Address) string {
	const autoprobe = "sriov_drivers_autoprobe"
	if on, err := v.device(pf).Attribute(autoprobe); err == nil && on == "0" {
		return autoprobe + " of the PF is 0: write 1 there, and bind the driver to the VFs or " +
			"make them again"
	}
	return "load the module of the VFs' driver"
}
