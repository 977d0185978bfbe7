// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// Remains is what an attachment adds to a pod's namespace and what the kernel does not remove with
// the netdev. The kernel removes addresses, routes and neighbours with it, and resets the sysctls.
type Remains struct {
	Interface string          `json:"interface"` // name in the pod, which the rules match
	Rules     []function.Rule `json:"rules,omitempty"`
	VRF       *function.VRF   `json:"vrf,omitempty"`
}

// remainsOf returns what an attachment leaves in the namespace, or nil if that is nothing.
func remainsOf(want function.Interface) *Remains {
	if len(want.Rules) == 0 && want.VRF == nil {
		return nil
	}
	return &Remains{Interface: want.Name, Rules: want.Rules, VRF: want.VRF}
}

// offloadOf returns the attributes of RTM_NEWLINK that set the sizes of offloads. The sizes for IPv4
// come after the general ones, because the kernel sets both with a general one.
func offloadOf(want *function.Offload) (list []*nl.RtAttr) {
	if want == nil {
		return nil
	}

	for _, s := range []struct{ attribute, size int }{
		{unix.IFLA_GSO_MAX_SIZE, want.GSOMaxSize}, {unix.IFLA_GRO_MAX_SIZE, want.GROMaxSize},
		{unix.IFLA_GSO_IPV4_MAX_SIZE, want.GSOIPv4MaxSize},
		{unix.IFLA_GRO_IPV4_MAX_SIZE, want.GROIPv4MaxSize},
	} {
		if s.size != 0 {
			list = append(list, number(s.attribute, s.size))
		}
	}

	return list
}

// ethtoolGroup returns the name of a group of ethtool among the [Settings].
func ethtoolGroup(name string) string { return "ethtool " + name }

// checkDriver returns an error for each driver setting that the pod wants and that the snapshot
// does not have, because such a setting could not be restored.
func checkDriver(before Snapshot, want function.Interface) error {
	var errs []error
	for _, group := range function.EthtoolGroups() {
		has := before.Settings[ethtoolGroup(group)]
		for _, name := range slices.Sorted(maps.Keys(want.Ethtool[group])) {
			if _, known := has[name]; known {
				continue
			}

			choice := "none of this group"
			if len(has) > 0 {
				choice = strings.Join(slices.Sorted(maps.Keys(has)), ", ")
			}
			errs = append(errs, fmt.Errorf("netdev %s: ethtool %s %q: the driver cannot change it; "+
				"it can change %s", before.Name, group, name, choice))
		}
	}

	return errors.Join(errs...)
}

// tuneDriver changes the driver settings that the pod wants. It does so on the host before the move,
// because a netdev keeps these settings when it moves. The pod's snapshot has the old values.
func (e *Engine) tuneDriver(
	ctx context.Context, p patience, before Snapshot, want function.Interface,
) error {
	index := before.Identity.Index
	for _, group := range function.EthtoolGroups() {
		to := maps.Clone(want.Ethtool[group])
		maps.DeleteFunc(to, func(name, value string) bool {
			return before.Settings[ethtoolGroup(group)][name] == value
		})
		if len(to) == 0 {
			continue
		}

		err := e.step(ethtoolGroup(group), func() error {
			return p.retry(ctx, busy, func() error { return e.ethtool.Change(index, group, to) })
		})
		if err == nil {
			err = e.checkTuned(index, group, to)
		}
		if err != nil {
			return fmt.Errorf("netdev %s: %w", before.Name, err)
		}
	}

	return nil
}

// checkTuned returns an error if the driver does not have the settings that it accepted.
func (e *Engine) checkTuned(index int, group string, to map[string]string) error {
	now, err := e.ethtool.Read(index, group)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(to)) {
		if now[name] != to[name] {
			return fmt.Errorf("ethtool %s %q: the driver accepted %s, and has %q", group, name,
				to[name], now[name])
		}
	}
	return nil
}

// setSysctl writes a sysctl of [function.SysctlNames] for an interface of the pod.
func (e *Engine) setSysctl(pod *conn, name, netdev, value string) error {
	directory, file := function.SysctlFile(name, netdev)
	dir := sysfs.Root(e.procRoot).Dir("sys", directory)
	return namespace.Do(pod.ns, func() error { return dir.Write(file, value) })
}

// addNeighbor adds a permanent entry to the neighbour table, or changes the entry of the address.
func addNeighbor(pod *conn, index int, n function.Neighbor) error {
	return pod.library(func(h *netlink.Handle) error { return h.NeighSet(entryOf(index, n)) })
}

func entryOf(index int, n function.Neighbor) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: index, IP: net.IP(n.Address.AsSlice()), HardwareAddr: n.MAC.HardwareAddr(),
		State: unix.NUD_PERMANENT,
	}
}

// ruleProtocol says in lists of rules that this program added them (FRA_PROTOCOL). No routing daemon
// of include/uapi/linux/rtnetlink.h has this number.
const ruleProtocol = 88

// kernelRules returns the rules of the kernel for the rules of an interface. A rule without
// prefixes is one rule for each family.
func kernelRules(netdev string, rules []function.Rule) (list []*netlink.Rule) {
	for _, r := range rules {
		ipv4, ipv6 := r.Families()
		if ipv4 {
			list = append(list, kernelRule(netdev, r, netlink.FAMILY_V4))
		}
		if ipv6 {
			list = append(list, kernelRule(netdev, r, netlink.FAMILY_V6))
		}
	}
	return list
}

func kernelRule(netdev string, r function.Rule, family int) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = family, r.Priority, r.Table
	rule.Protocol = ruleProtocol

	if r.From.IsValid() {
		rule.Src = netaddr.ToIPNet(r.From)
	}
	if r.To.IsValid() {
		rule.Dst = netaddr.ToIPNet(r.To)
	}
	if r.Incoming {
		rule.IifName = netdev
	}
	if r.Outgoing {
		rule.OifName = netdev
	}

	return rule
}

// addRule adds a rule, unless the pod has it already.
func addRule(pod *conn, rule *netlink.Rule) error {
	err := pod.library(func(h *netlink.Handle) error { return h.RuleAdd(rule) })
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if errors.Is(err, unix.EAFNOSUPPORT) && rule.Src == nil && rule.Dst == nil {
		return nil // the kernel has no IPv6, and the rule is for both families
	}
	return err
}

// addVLAN makes a VLAN interface on top of the netdev, with its addresses. Restore deletes it as it
// deletes whatever is stacked on the netdev.
func (e *Engine) addVLAN(pod *conn, index int, vlan function.VLAN) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.MTU = vlan.Name, index, vlan.MTU
	err := pod.library(func(h *netlink.Handle) error {
		return h.LinkAdd(&netlink.Vlan{LinkAttrs: attrs, VlanId: vlan.Tag})
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("the node's kernel has no VLANs (CONFIG_VLAN_8021Q, module 8021q): %w", err)
	}
	if err != nil {
		return err
	}

	made, err := pod.LinkByName(vlan.Name)
	if err != nil {
		return err
	}
	above := made.Attrs().Index
	for _, address := range vlan.Addresses {
		if err := e.address(pod, above, vlan.Name, address); err != nil {
			return fmt.Errorf("address %s: %w", address, err)
		}
	}
	e.announceItself(pod, above, vlan.Name, vlan.Addresses)

	return pod.set(above, unix.IFF_UP, unix.IFF_UP)
}

// vrfGroup marks the VRFs that this program makes in pods (IFLA_GROUP). The bytes are "xpu".
const vrfGroup = 0x787075

// joinVRF makes the netdev a port of the VRF, and makes the VRF if the pod does not have it. The
// netdev must not have addresses yet, because IPv6 addresses are lost when it joins.
func joinVRF(pod *conn, index int, vrf *function.VRF) error {
	there, err := pod.LinkByName(vrf.Name)
	if errors.Is(err, links.ErrNotFound) {
		there, err = makeVRF(pod, vrf)
	}
	if err != nil {
		return err
	}

	if v, isVRF := there.(*netlink.Vrf); !isVRF || v.Table != uint32(vrf.Table) {
		return fmt.Errorf("the pod has another %s of this name: %w", there.Type(), unix.EEXIST)
	}

	return errors.Join(
		pod.set(there.Attrs().Index, unix.IFF_UP, unix.IFF_UP),
		pod.set(index, 0, 0, number(unix.IFLA_MASTER, there.Attrs().Index)),
	)
}

// makeVRF makes a VRF. Another interface of the pod may make it at the same time.
func makeVRF(pod *conn, vrf *function.VRF) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group = vrf.Name, vrfGroup
	err := pod.library(func(h *netlink.Handle) error {
		return h.LinkAdd(&netlink.Vrf{LinkAttrs: attrs, Table: uint32(vrf.Table)})
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("the node's kernel has no VRFs (CONFIG_NET_VRF, module vrf): %w", err)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	}

	return pod.LinkByName(vrf.Name)
}

// dropVRF removes a VRF of this program that has no ports any more. The netdev must have left it.
func dropVRF(pod *conn, vrf *function.VRF) error {
	there, err := pod.LinkByName(vrf.Name)
	if errors.Is(err, links.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}

	v, isVRF := there.(*netlink.Vrf)
	if !isVRF || v.Table != uint32(vrf.Table) || v.Group != vrfGroup {
		return nil // it is the pod's own
	}

	all, err := request.Consistent(pod.LinkList)
	if err != nil {
		return err
	}
	isPort := func(l netlink.Link) bool { return l.Attrs().MasterIndex == v.Index }
	if slices.ContainsFunc(all, isPort) {
		return nil
	}

	return unlessGone(pod.library(func(h *netlink.Handle) error { return h.LinkDel(v) }))
}

// dropEmptyVRF removes the VRF of the attachment when its last port has left. A VRF that stays is a
// note, because it affects nobody but this pod.
func (e *Engine) dropEmptyVRF(pod *conn, remains *Remains) (notes []string) {
	if pod == nil || remains == nil || remains.VRF == nil {
		return nil
	}

	err := e.step("remove VRF "+remains.VRF.Name, func() error { return dropVRF(pod, remains.VRF) })
	if err != nil {
		notes = append(notes, fmt.Sprintf("VRF stays in the pod: %v", err))
	}
	return notes
}

// dropRules removes the rules that the attachment added to the namespace. The namespace may not
// exist any more.
//
// It does not look for the rules first, because a pod may have any number of rules. The kernel
// deletes the first rule that has all given properties (rule_find of net/core/fib_rules.c), which
// can only be another rule of the same priority and table in the pod that is being left. A rule that
// stays is a note, because it affects nobody but this pod.
func (e *Engine) dropRules(pod *conn, remains *Remains) (notes []string) {
	if pod == nil || remains == nil {
		return nil
	}

	for _, rule := range kernelRules(remains.Interface, remains.Rules) {
		err := e.step("remove "+rule.String(), func() error {
			return pod.library(func(h *netlink.Handle) error { return h.RuleDel(rule) })
		})
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EAFNOSUPPORT) {
			notes = append(notes, fmt.Sprintf("%s stays in the pod: %v", rule, err))
		}
	}

	return notes
}
