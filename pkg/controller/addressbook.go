// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"container/heap"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// addressBook holds the addresses and MAC addresses of the Ports of one network. Changes of Ports
// update it, so that the cost of choosing an address does not grow with the number of Ports. It is
// not safe for concurrent use.
type addressBook struct {
	addresses map[netip.Addr]types.NamespacedName
	macs      map[string]types.NamespacedName
	// assigned holds addresses that Ports may not have in their status yet.
	assigned map[types.NamespacedName]assignment

	// successors are the standby Ports by MAC address. When the Port that owns the MAC address is
	// gone, the latest of them gets the MAC address and the addresses of that Port.
	successors map[string][]successor

	generation int64 // of the network's spec from which subnets were made
	subnets    map[netip.Prefix]*freeList
}

// assignment is the addresses that a Port got, until its status has them. The UID tells the Port
// from a later one of the same name.
type assignment struct {
	to        types.UID
	addresses []string
}

func newAddressBook() *addressBook {
	return &addressBook{
		addresses: map[netip.Addr]types.NamespacedName{}, macs: map[string]types.NamespacedName{},
		assigned: map[types.NamespacedName]assignment{}, successors: map[string][]successor{},
		subnets: map[netip.Prefix]*freeList{},
	}
}

// add records what a Port owns. Addresses that another Port owns stay with the other Port, unless
// the other one is a standby for this Port.
func (b *addressBook) add(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	if isStandby(port) {
		b.addStandby(port)
	} else {
		b.removeStandby(port)
		for _, s := range b.successors[port.Spec.MAC] {
			b.transfer(port, s.key, successor{key: key, uid: port.UID})
		}
	}

	if _, taken := b.macs[port.Spec.MAC]; !taken {
		b.macs[port.Spec.MAC] = key
	}

	b.take(key, addressesOf(port))
}

// checkMAC returns a refusal if another Port of the network has the Port's MAC address.
func (b *addressBook) checkMAC(port *v1alpha1.XPUPort) error {
	holder, taken := b.macs[port.Spec.MAC]
	if !taken || holder == client.ObjectKeyFromObject(port) {
		return nil
	}
	return macConflict(port, holder)
}

// other returns another Port that owns an address or the MAC address of this Port, and which one it
// is. what is "" if there is no such Port.
func (b *addressBook) other(port *v1alpha1.XPUPort) (holder types.NamespacedName, what string) {
	key := client.ObjectKeyFromObject(port)
	for _, text := range addressesOf(port) {
		address, err := netip.ParsePrefix(text)
		if holder, taken := b.addresses[address.Addr()]; err == nil && taken && holder != key {
			return holder, "address " + text
		}
	}

	if holder, taken := b.macs[port.Spec.MAC]; taken && holder != key {
		return holder, "MAC address " + port.Spec.MAC
	}

	return holder, ""
}

// macConflict is the refusal of a Port whose MAC address belongs to another Port.
func macConflict(port *v1alpha1.XPUPort, holder types.NamespacedName) error {
	return reconciling.Refuse(v1alpha1.ReasonConflict,
		"MAC address %s is that of XPUPort %s in XPUNetwork %s; ask for another one, or for none",
		port.Spec.MAC, holder, port.Spec.Network)
}

// take records the addresses that are free.
func (b *addressBook) take(key types.NamespacedName, addresses []string) {
	for _, text := range addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		if _, taken := b.addresses[address.Addr()]; !taken {
			b.addresses[address.Addr()] = key
		}
	}
}

// successor is a standby Port. The UID tells it from a later Port of the same name.
type successor struct {
	key  types.NamespacedName
	uid  types.UID
	made time.Time
}

// isStandby reports whether the Port waits to take the place of another Port, by its status.
func isStandby(port *v1alpha1.XPUPort) bool {
	return port.Status.Predecessor != "" && port.Status.BridgePort == "" &&
		!v1alpha1.IsAdmitted(port) && port.DeletionTimestamp.IsZero()
}

// addStandby records a standby Port.
func (b *addressBook) addStandby(port *v1alpha1.XPUPort) {
	waiting := b.successors[port.Spec.MAC]
	if slices.ContainsFunc(waiting, func(s successor) bool { return s.uid == port.UID }) {
		return
	}
	waiting = append(waiting,
		successor{client.ObjectKeyFromObject(port), port.UID, port.CreationTimestamp.Time})
	slices.SortStableFunc(waiting, func(a, b successor) int { return a.made.Compare(b.made) })
	b.successors[port.Spec.MAC] = waiting
}

// removeStandby forgets that a Port was a standby.
func (b *addressBook) removeStandby(port *v1alpha1.XPUPort) {
	left := slices.DeleteFunc(b.successors[port.Spec.MAC], func(s successor) bool {
		return s.uid == port.UID
	})
	if b.successors[port.Spec.MAC] = left; len(left) == 0 {
		delete(b.successors, port.Spec.MAC)
	}
}

// transfer gives what a Port owns to its successor.
func (b *addressBook) transfer(port *v1alpha1.XPUPort, from types.NamespacedName, to successor) {
	if b.macs[port.Spec.MAC] == from {
		b.macs[port.Spec.MAC] = to.key
	}

	var moved []string
	for _, text := range slices.Concat(addressesOf(port), b.assigned[from].addresses) {
		if address, err := netip.ParsePrefix(text); err == nil &&
			b.addresses[address.Addr()] == from {
			b.addresses[address.Addr()] = to.key
			moved = append(moved, text)
		}
	}

	if len(moved) > 0 { // the successor's status may not have it
		delete(b.assigned, from)
		b.assigned[to.key] = assignment{to.uid, moved}
	}
}

// remove frees what a Port owned, or transfers it to the Port's successor.
func (b *addressBook) remove(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	b.removeStandby(port)

	if waiting := b.successors[port.Spec.MAC]; len(waiting) > 0 && b.macs[port.Spec.MAC] == key {
		b.transfer(port, key, waiting[len(waiting)-1])
	}

	if b.macs[port.Spec.MAC] == key {
		delete(b.macs, port.Spec.MAC)
	}

	free := addressesOf(port)
	if a, ok := b.assigned[key]; ok && a.to == port.UID {
		free = slices.Concat(free, a.addresses)
		delete(b.assigned, key)
	}

	for _, text := range free {
		address, err := netip.ParsePrefix(text)
		if err != nil || b.addresses[address.Addr()] != key {
			continue
		}

		delete(b.addresses, address.Addr())
		for subnet, list := range b.subnets {
			if subnet.Contains(address.Addr()) {
				list.add(address.Addr())
			}
		}
	}
}

// addressesOf returns the addresses that a Port has, or else those that it asks for.
func addressesOf(port *v1alpha1.XPUPort) []string {
	if len(port.Status.Addresses) > 0 {
		return port.Status.Addresses
	}
	return port.Spec.Addresses
}

// assign chooses and records the addresses of a Port that an agent made: those that it has already,
// those that it asks for, or the lowest free address of each subnet. A refusal says why the Port
// cannot have them.
func (b *addressBook) assign(
	key types.NamespacedName, port *v1alpha1.XPUPort, rules *addressRules,
) ([]string, error) {
	if has, ok := b.assigned[key]; ok {
		return has.addresses, nil
	}

	if has := port.Status.Addresses; len(has) > 0 { // an earlier controller assigned them
		return has, b.keep(key, port)
	}

	var wanted []netip.Prefix
	for i, text := range port.Spec.Addresses {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
				"addresses[%d] %q must be an address with prefix length such as 10.1.0.5/24",
				i, text)
		}
		wanted = append(wanted, prefix)
	}

	addresses, err := b.choose(rules, wanted)
	if err != nil {
		return nil, err
	}

	given := texts(addresses)
	b.assigned[key] = assignment{port.UID, given}
	b.take(key, given)

	return given, nil
}

// keep records the addresses in a Port's status. A refusal says that another Port has one of them.
func (b *addressBook) keep(key types.NamespacedName, port *v1alpha1.XPUPort) error {
	for _, text := range port.Status.Addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		if holder, taken := b.addresses[address.Addr()]; taken && holder != key {
			return reconciling.Refuse(v1alpha1.ReasonConflict,
				"address %s, which the XPUPort had, is in "+
					"use by XPUPort %s; delete the pod of one of them", text, holder)
		}
	}

	b.assigned[key] = assignment{port.UID, port.Status.Addresses}
	b.take(key, port.Status.Addresses)

	return nil
}

// lowest returns the lowest address of the subnet that is neither taken nor reserved, or the zero
// value if there is none.
func (b *addressBook) lowest(subnet netip.Prefix, reserved netaddr.Set) netip.Addr {
	free := b.subnets[subnet]
	if free == nil {
		free = &freeList{next: subnet.Addr().Next()}
		b.subnets[subnet] = free
	}

	usable := func(ip netip.Addr) bool {
		_, taken := b.addresses[ip]
		return !taken && !reserved.Contains(ip)
	}

	for len(free.below) > 0 {
		if ip := free.below[0]; usable(ip) {
			return ip
		}
		heap.Pop(free)
	}

	for ; subnet.Contains(free.next) && !unusable(subnet, free.next); free.next = free.next.Next() {
		if r, is := reserved.Find(free.next); is {
			free.next = r.Last
			continue
		}
		if usable(free.next) {
			return free.next
		}
	}

	return netip.Addr{}
}

// freeList finds the lowest free address of a subnet. All addresses below next are taken, except
// for those in below.
type freeList struct {
	next  netip.Addr
	below []netip.Addr // a heap; an address may have been taken since it was added
}

func (f *freeList) add(ip netip.Addr) {
	if ip.Less(f.next) {
		heap.Push(f, ip)
	}
}

func (f *freeList) Len() int           { return len(f.below) }
func (f *freeList) Less(i, j int) bool { return f.below[i].Less(f.below[j]) }
func (f *freeList) Swap(i, j int)      { f.below[i], f.below[j] = f.below[j], f.below[i] }
func (f *freeList) Push(ip any)        { f.below = append(f.below, ip.(netip.Addr)) }

func (f *freeList) Pop() any {
	last := f.below[len(f.below)-1]
	f.below = f.below[:len(f.below)-1]
	return last
}

// addressRules are a network's rules for addresses.
type addressRules struct {
	network    string
	generation int64 // of the network's spec
	subnets    []netip.Prefix
	reserved   netaddr.Set // the gateways, and what is reserved
}

// rulesOf parses the network's spec, and returns a refusal if a field is invalid. The first
// address of a subnet belongs to its gateway, unless spec.gateways has an address of the same
// family.
func rulesOf(network *v1alpha1.XPUNetwork) (*addressRules, error) {
	rules := &addressRules{network: network.Name, generation: network.Generation}
	var reserved []netaddr.Range
	var wrong []string
	gateways := map[bool]bool{} // by whether it is IPv4
	for i, text := range network.Spec.Gateways {
		ip, err := netip.ParseAddr(text)
		if err != nil || ip.Zone() != "" {
			wrong = append(wrong,
				fmt.Sprintf("spec.gateways[%d] %q must be an address such as 10.1.0.1", i, text))
			continue
		}
		gateways[ip.Is4()] = true
		reserved = append(reserved, netaddr.Single(ip))
	}

	for i, text := range network.Spec.Subnets {
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			wrong = append(wrong,
				fmt.Sprintf("spec.subnets[%d] %q must be a prefix such as 10.1.0.0/24", i, text))
			continue
		}

		rules.subnets = append(rules.subnets, subnet)
		if gateways[subnet.Addr().Is4()] {
			continue
		}
		if gateway := subnet.Addr().Next(); gateway.IsValid() {
			reserved = append(reserved, netaddr.Single(gateway))
		} else {
			wrong = append(wrong, fmt.Sprintf("spec.subnets[%d] %q has no address for a gateway; "+
				"set spec.gateways, or choose another prefix", i, text))
		}
	}

	for i, text := range network.Spec.Reserved {
		if r, err := netaddr.ParseRange(text); err == nil {
			reserved = append(reserved, r)
		} else {
			wrong = append(wrong,
				fmt.Sprintf("spec.reserved[%d] %q must be a prefix or a range such as "+
					"10.1.0.10-10.1.0.19", i, text))
		}
	}

	if len(wrong) > 0 {
		return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotReady,
			"XPUNetwork %s: %s", network.Name,
			strings.Join(wrong, "; "))
	}

	rules.reserved = netaddr.NewSet(reserved)
	return rules, nil
}

// choose returns the wanted addresses, or the lowest free address of each subnet if none are
// wanted. A refusal says which address is not free.
func (b *addressBook) choose(rules *addressRules, wanted []netip.Prefix) ([]netip.Prefix, error) {
	if len(wanted) > 0 {
		return wanted, b.check(rules, wanted)
	}

	if b.generation != rules.generation { // what was reserved may be free now
		b.generation, b.subnets = rules.generation, map[netip.Prefix]*freeList{}
	}

	var free []netip.Prefix
	for _, subnet := range rules.subnets {
		address := b.lowest(subnet, rules.reserved)
		if !address.IsValid() {
			return nil, reconciling.Refuse(v1alpha1.ReasonNoFreeAddress,
				"subnet %s of XPUNetwork %s has no free address left; "+
					"delete pods that use it, or use a network with a larger subnet",
				subnet, rules.network)
		}
		free = append(free, netip.PrefixFrom(address, subnet.Bits()))
	}

	return free, nil
}

// check returns a refusal if one of the addresses is invalid or taken.
func (b *addressBook) check(rules *addressRules, wanted []netip.Prefix) error {
	seen := map[netip.Addr]bool{}
	for i, address := range wanted {
		ip := address.Addr()
		holder, held := b.addresses[ip]
		reason, wrong := v1alpha1.ReasonInvalidConfig, rules.wrong(address)
		switch {
		case wrong != "":
		case seen[ip]:
			wrong = "is in the list twice"
		case held:
			reason = v1alpha1.ReasonConflict
			wrong = fmt.Sprintf("is in use by XPUPort %s; choose another one, or delete the pod "+
				"that has it", holder)
		default:
			seen[ip] = true
			continue
		}

		return reconciling.Refuse(reason,
			"addresses[%d] %s of the InterfaceConfig %s", i, address, wrong)
	}

	return nil
}

// wrong says why no Port may have the address, "" if one may.
func (r *addressRules) wrong(address netip.Prefix) string {
	ip := address.Addr()
	if len(r.subnets) == 0 {
		return ""
	}

	for _, subnet := range r.subnets {
		switch {
		case !subnet.Contains(ip):
			continue
		case unusable(subnet, ip):
			return fmt.Sprintf("is the network's own or its broadcast address in subnet %s; "+
				"choose another one", subnet)
		case address.Bits() != subnet.Bits():
			return fmt.Sprintf("must have the prefix length of subnet %s", subnet)
		case r.reserved.Contains(ip):
			return fmt.Sprintf("is a gateway's or reserved in XPUNetwork %s; choose another one",
				r.network)
		}
		return ""
	}

	return fmt.Sprintf("is in none of the subnets of XPUNetwork %s (%s); choose one inside, or "+
		"leave addresses away to be given one",
		r.network, strings.Join(texts(r.subnets), ", "))
}

// unusable reports whether the address is the subnet's own (RFC 4291 2.6.1 for IPv6) or its IPv4
// broadcast address.
func unusable(subnet netip.Prefix, ip netip.Addr) bool {
	return !subnet.IsSingleIP() &&
		(ip == subnet.Addr() || ip.Is4() && ip == netaddr.Last(subnet))
}

func texts(prefixes []netip.Prefix) (list []string) {
	for _, prefix := range prefixes {
		list = append(list, prefix.String())
	}
	return list
}
