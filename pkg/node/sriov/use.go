// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// shownUses is how many uses a message names at most.
const shownUses = 3

// inUse returns who uses the PF or one of its VFs, or nil if they are free. vfs are all VFs of the
// PF.
func (v *VFs) inUse(ctx context.Context, pf pci.Address, vfs []pci.Address) *problem {
	uses, err := v.uses(ctx, pf, vfs)
	if err != nil {
		return problemf(v1alpha1.ReasonInUse, "may be in use: %v", err)
	}
	if len(uses) == 0 {
		return nil
	}

	shown := strings.Join(uses[:min(len(uses), shownUses)], ", ")
	if len(uses) > shownUses {
		shown += fmt.Sprintf(" and %d more", len(uses)-shownUses)
	}

	return problemf(v1alpha1.ReasonInUse, "is in use: %s; its VFs are changed when that has ended",
		shown)
}

// uses asks the journal, the host and the kubelet in turn for uses of the PF or its VFs, and
// returns the first answer that has some.
func (v *VFs) uses(
	ctx context.Context, pf pci.Address, vfs []pci.Address,
) (uses []string, err error) {
	// A change of the number of VFs affects the PF, its VFs and, if it has VFs, its SFs:
	// mlx5_device_enable_sriov in drivers/net/ethernet/mellanox/mlx5/core makes the first VFs
	// without touching SFs. Other VFs in the journal existed before a reboot, and their pods wait
	// for them to be made again.
	affected := func(id function.ID) bool {
		_, isSF := id.SFNum()
		return id.Address == pf && (!isSF || len(vfs) > 0) || slices.Contains(vfs, id.Address)
	}

	for _, a := range v.Journal.All() {
		if affected(a.Function) {
			uses = append(uses, a.Function.String()+" belongs to "+owner(a))
		}
	}

	if len(uses) == 0 {
		uses, err = v.usedOnHost(pf, vfs)
	}
	if len(uses) > 0 || err != nil {
		return uses, err
	}

	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()

	assigned, err := v.Assignments.Assigned(ctx) // of every device plugin and DRA driver
	for text, assignment := range assigned {
		if id, err := function.ParseID(text); err == nil && affected(id) {
			uses = append(uses, fmt.Sprintf("%s belongs to %s", id, assignment))
		}
	}

	slices.Sort(uses)
	// Of a PF without VFs, a pod can only have the PF itself, and then the host lacks its netdev.
	if err != nil && len(vfs) > 0 {
		return nil, fmt.Errorf("whether pods have its VFs is not known: %w", err)
	}

	return uses, nil
}

// owner describes the owner of a Function in the journal.
func owner(a journal.Attachment) string {
	switch {
	case a.Pod.Name != "":
		return "pod " + a.Pod.Namespace + "/" + a.Pod.Name
	case a.Claim.Name != "":
		return "claim " + a.Claim.Namespace + "/" + a.Claim.Name
	case a.Resource != "":
		return "a pod by resource " + a.Resource
	}
	return "a pod"
}

// usedOnHost lists the uses of the PF and its VFs by the host, a program or a container that sysfs
// and netlink show.
func (v *VFs) usedOnHost(pf pci.Address, vfs []pci.Address) ([]string, error) {
	dir, names, err := v.device(pf).Netdevs()
	if err != nil {
		return nil, err
	}
	if dir != "" && len(names) == 0 {
		return []string{"its netdev is in another network namespace"}, nil
	}

	var netdevs hostuse.Netdevs
	if len(vfs) > 0 {
		if netdevs, err = v.HostNetdevs(); err != nil {
			return nil, fmt.Errorf("what the host does with its netdevs cannot be read: %w", err)
		}
	}

	// from the inventory, which also has the netdevs of vDPA devices
	shown := map[pci.Address]function.Function{}
	for _, f := range v.Functions.Snapshot() {
		if f.Kind == function.VF {
			shown[f.ID.Address] = f
		}
	}

	var uses []string
	for _, vf := range vfs {
		use, err := v.useOf(vf, netdevs)
		if err != nil {
			return nil, fmt.Errorf("VF %s: %w", vf, err)
		}

		if f := shown[vf]; use == "" && f.HostUse != "" {
			use = fmt.Sprintf("has netdev %s, which %s", f.Netdev, f.HostUse)
		}
		if use != "" {
			uses = append(uses, fmt.Sprintf("VF %s %s", vf, use))
		}
	}

	return uses, nil
}

// useOf returns how a VF is used, or "" if it is not. A VF without a driver is not used. A VF whose
// driver makes no netdev, such as vfio-pci, counts as used, because the kernel does not report
// whether a program has it open. A VF that is up with a carrier counts as used, because a program
// may use its netdev, which is removed with the VF.
func (v *VFs) useOf(vf pci.Address, netdevs hostuse.Netdevs) (string, error) {
	driver, err := v.device(vf).Link("driver")
	if err != nil || driver == "" {
		return "", err
	}

	dir, names, err := v.device(vf).Netdevs()
	switch {
	case err != nil:
		return "", err
	case dir == "":
		return fmt.Sprintf("has driver %s and no netdev, as a program may use it", driver), nil
	case len(names) == 0:
		return "has its netdev in another network namespace", nil
	}

	for _, name := range names {
		netdev := netdevs[name]
		switch {
		case netdev.Use != "":
			return fmt.Sprintf("has netdev %s, which %s", name, netdev.Use), nil
		case netdev.Carrier:
			return fmt.Sprintf("has netdev %s, which is up and has a carrier", name), nil
		}
	}

	return "", nil
}
