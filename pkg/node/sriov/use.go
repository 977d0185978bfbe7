package sriov

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// NetdevUse says what the host does with a netdev of the process's network namespace, "" for nothing. A netdev is in use
// if it is in a bridge or bond, has an address, or is up with a carrier. IPv6 link-local addresses do not count, because
// the kernel gives one to every netdev that is set up.
func NetdevUse(netdev string) (string, error) {
	handle, err := links.Open(netns.None())
	if err != nil {
		return "", err
	}
	defer handle.Close()
	link, err := handle.LinkByName(netdev)
	if errors.Is(err, links.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if link.Attrs().MasterIndex != 0 {
		return "is in a bridge or bond", nil
	}
	addresses, err := handle.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return "", fmt.Errorf("addresses: %w", err)
	}
	for _, a := range addresses {
		if a.IP.To4() != nil || !a.IP.IsLinkLocalUnicast() {
			return "has address " + a.IPNet.String(), nil
		}
	}
	if flags := link.Attrs().RawFlags; flags&unix.IFF_UP != 0 && flags&unix.IFF_LOWER_UP != 0 {
		return "is up and has a carrier", nil
	}
	return "", nil
}

// shownUses is how many uses a message names.
const shownUses = 3

// inUse says who has the PF or one of its VFs; nil if nobody has. vfs are all VFs of the PF.
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
	return problemf(v1alpha1.ReasonInUse, "is in use: %s; its VFs are changed when that has ended", shown)
}

// uses asks the journal, the host and the kubelet in turn who has the PF or one of its VFs, until one of them knows.
func (v *VFs) uses(ctx context.Context, pf pci.Address, vfs []pci.Address) (uses []string, err error) {
	// A change of the number of VFs affects the PF, its VFs and, if it has VFs, its SFs: mlx5_device_enable_sriov in
	// drivers/net/ethernet/mellanox/mlx5/core makes the first VFs without touching SFs. Other VFs in the journal existed
	// before a reboot, and their pods wait for them to be made again.
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
	assigned, err := v.Assignments.Assigned(ctx) // by whatever device plugin or DRA driver
	for text, assignment := range assigned {
		if id, err := function.ParseID(text); err == nil && affected(id) {
			uses = append(uses, fmt.Sprintf("%s belongs to %s", id, assignment))
		}
	}
	slices.Sort(uses)
	// Of a PF without VFs, a pod can have only the PF itself, whose netdev is not on the host then.
	if err != nil && len(vfs) > 0 {
		return nil, fmt.Errorf("whether pods have its VFs is not known: %w", err)
	}
	return uses, nil
}

// owner names whom the journal has for a Function.
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

// usedOnHost lists uses of the PF and its VFs that sysfs and netlink show: by the host, by a program, or by a container.
func (v *VFs) usedOnHost(pf pci.Address, vfs []pci.Address) ([]string, error) {
	dir, names, err := v.device(pf).Netdevs()
	if err != nil {
		return nil, err
	}
	if dir != "" && len(names) == 0 {
		return []string{"its netdev is in another network namespace"}, nil
	}
	var uses []string
	for _, vf := range vfs {
		use, err := v.useOf(vf)
		if err != nil {
			return nil, fmt.Errorf("VF %s: %w", vf, err)
		}
		if use != "" {
			uses = append(uses, fmt.Sprintf("VF %s %s", vf, use))
		}
	}
	return uses, nil
}

// useOf says how a VF is used, "" for not at all. A VF without a driver is not used. A VF whose driver makes no netdev,
// such as vfio-pci, counts as used, because the kernel does not tell whether a program has it open.
func (v *VFs) useOf(vf pci.Address) (string, error) {
	driver, err := v.device(vf).Link("driver")
	if err != nil || driver == "" {
		return "", err
	}
	dir, netdevs, err := v.device(vf).Netdevs()
	switch {
	case err != nil:
		return "", err
	case dir == "":
		return fmt.Sprintf("has driver %s and no netdev, as a program may use it", driver), nil
	case len(netdevs) == 0:
		return "has its netdev in another network namespace", nil
	}
	for _, netdev := range netdevs {
		use, err := v.NetdevUse(netdev)
		if err != nil {
			return "", fmt.Errorf("netdev %s: %w", netdev, err)
		}
		if use != "" {
			return fmt.Sprintf("has netdev %s, which %s", netdev, use), nil
		}
	}
	return "", nil
}
