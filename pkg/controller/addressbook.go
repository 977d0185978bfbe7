// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"container/heap"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// addressBook has the addresses and MAC addresses that the Ports of one network have. It is kept by
// the Ports' events, so that to choose an address costs the same however many there are. The caller
// keeps it from concurrent use.
type addressBook struct {
	addresses map[netip.Addr]types.NamespacedName
	macs      map[string]types.NamespacedName
	// assigned are the addresses of Ports that may not have them in their status yet.
	assigned map[types.NamespacedName]assignment

	// successors are the Ports that stand by, by their MAC address. The latest of them gets what
	// the Port has that has this MAC address, once that is gone.
	successors map[string][]successor

	// complete says that the book has been seen to have every Port of the network. Events keep it
	// so.
	complete   bool
	generation int64 // of the network's spec that subnets are for
	subnets    map[netip.Prefix]*freeList
}

// assignment is what a Port was given. The Port that has its name later is another one.
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

// add notes what a Port has. What another Port has stays that one's, unless that one stands by for
// this one.
func (b *addressBook) add(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	if standsBy(port) {
		b.succeed(port)
	} else {
		b.resign(port)
		for _, s := range b.successors[port.Spec.MAC] {
			b.give(port, s.key, successor{key: key, uid: port.UID})
		}
	}

	if _, taken := b.macs[port.Spec.MAC]; !taken {
		b.macs[port.Spec.MAC] = key
	}

	b.take(key, addressesOf(port))
}

// checkMAC returns a *problem if another Port of the network has the Port's MAC address.
func (b *addressBook) checkMAC(port *v1alpha1.XPUPort) error {
	holder, taken := b.macs[port.Spec.MAC]
	if !taken || holder == client.ObjectKeyFromObject(port) {
		return nil
	}
	return macConflict(port, holder)
}

// other is another Port that has something of what this one has, and what that is; "" for nothing.
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

// macConflict is the problem of a Port whose MAC address another one has.
func macConflict(port *v1alpha1.XPUPort, holder types.NamespacedName) *problem {
	return problemf(v1alpha1.ReasonConflict,
		"MAC address %s is that of XPUPort %s in XPUNetwork %s; ask for another one, or for none",
		port.Spec.MAC, holder, port.Spec.Network)
}

// take notes addresses that nobody has.
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

// successor is a Port that stands by. The Port that has its name later is another one.
type successor struct {
	key  types.NamespacedName
	uid  types.UID
	made time.Time
}

// standsBy says whether the Port waited for another one to go when its status was written.
func standsBy(port *v1alpha1.XPUPort) bool {
	return port.Status.Predecessor != "" && port.Status.BridgePort == "" &&
		!v1alpha1.IsAdmitted(port) && port.DeletionTimestamp.IsZero()
}

// succeed notes that the Port stands by.
func (b *addressBook) succeed(port *v1alpha1.XPUPort) {
	waiting := b.successors[port.Spec.MAC]
	if slices.ContainsFunc(waiting, func(s successor) bool { return s.uid == port.UID }) {
		return
	}
	waiting = append(waiting,
		successor{client.ObjectKeyFromObject(port), port.UID, port.CreationTimestamp.Time})
	slices.SortStableFunc(waiting, func(a, b successor) int { return a.made.Compare(b.made) })
	b.successors[port.Spec.MAC] = waiting
}

// resign notes that the Port does not stand by any more.
func (b *addressBook) resign(port *v1alpha1.XPUPort) {
	left := slices.DeleteFunc(b.successors[port.Spec.MAC], func(s successor) bool {
		return s.uid == port.UID
	})
	if b.successors[port.Spec.MAC] = left; len(left) == 0 {
		delete(b.successors, port.Spec.MAC)
	}
}

// notes says whether the book has the MAC address of a Port as that of the Port, or as that of
// another one for good.
func (b *addressBook) notes(port *v1alpha1.XPUPort) bool {
	holder, noted := b.macs[port.Spec.MAC]
	if !noted || standsBy(port) || holder == client.ObjectKeyFromObject(port) {
		return noted
	}
	return !slices.ContainsFunc(b.successors[port.Spec.MAC], func(s successor) bool {
		return s.key == holder
	})
}

// give moves what a Port has from one key to that of another Port.
func (b *addressBook) give(port *v1alpha1.XPUPort, from types.NamespacedName, to successor) {
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

	if len(moved) > 0 { // it may not be in the status of the one that has it now
		delete(b.assigned, from)
		b.assigned[to.key] = assignment{to.uid, moved}
	}
}

// remove frees what a Port had, or leaves it to its successor.
func (b *addressBook) remove(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	b.resign(port)

	if waiting := b.successors[port.Spec.MAC]; len(waiting) > 0 && b.macs[port.Spec.MAC] == key {
		b.give(port, key, waiting[len(waiting)-1])
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

// addressesOf are those that a Port has or asks for.
func addressesOf(port *v1alpha1.XPUPort) []string {
	if len(port.Status.Addresses) > 0 {
		return port.Status.Addresses
	}
	return port.Spec.Addresses
}

// assign returns the addresses of a Port that an agent made, which are noted: those that it has,
// those that it asks for, or the lowest free ones. A *problem says why it cannot have them.
func (b *addressBook) assign(
	key types.NamespacedName, port *v1alpha1.XPUPort, rules *addressRules,
) ([]string, error) {
	if has, ok := b.assigned[key]; ok {
		return has.addresses, nil
	}

	if has := port.Status.Addresses; len(has) > 0 { // of a time before this controller
		return has, b.keep(key, port)
	}

	var wanted []netip.Prefix
	for i, text := range port.Spec.Addresses {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, problemf(v1alpha1.ReasonInvalidConfig,
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

// keep takes what a Port has by its status. A *problem says that another Port has it by now.
func (b *addressBook) keep(key types.NamespacedName, port *v1alpha1.XPUPort) error {
	for _, text := range port.Status.Addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		if holder, taken := b.addresses[address.Addr()]; taken && holder != key {
			return problemf(v1alpha1.ReasonConflict, "address %s, which the XPUPort had, is in "+
				"use by XPUPort %s; delete the pod of one of them", text, holder)
		}
	}

	b.assigned[key] = assignment{port.UID, port.Status.Addresses}
	b.take(key, port.Status.Addresses)

	return nil
}

// lowest is the lowest address of the subnet that is free and not reserved; the zero value if there
// is none.
func (b *addressBook) lowest(subnet netip.Prefix, reserved *netipx.IPSet) netip.Addr {
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
		if r, is := rangeOf(reserved, free.next); is {
			free.next = r.To()
			continue
		}
		if usable(free.next) {
			return free.next
		}
	}

	return netip.Addr{}
}

// rangeOf is the range of the set that has the address.
func rangeOf(set *netipx.IPSet, ip netip.Addr) (netipx.IPRange, bool) {
	if !set.Contains(ip) {
		return netipx.IPRange{}, false
	}

	for _, r := range set.Ranges() {
		if r.Contains(ip) {
			return r, true
		}
	}

	return netipx.IPRange{}, false
}

// freeList finds the lowest free address of a subnet. All addresses below next are taken, but for
// those in below.
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

// addressRules are what a network says of its addresses.
type addressRules struct {
	network    string
	generation int64 // of the network's spec
	subnets    []netip.Prefix
	reserved   *netipx.IPSet // the gateways, and what is reserved
}

// rulesOf returns a *problem if the network's spec cannot be understood. The first address of a
// subnet is its gateway's unless spec.gateways has another one of the family.
func rulesOf(network *v1alpha1.XPUNetwork) (*addressRules, error) {
	rules := &addressRules{network: network.Name, generation: network.Generation}
	var reserved netipx.IPSetBuilder
	var wrong []string
	gateways := map[bool]bool{} // by whether it is IPv4
	for i, text := range network.Spec.Gateways {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			wrong = append(wrong,
				fmt.Sprintf("spec.gateways[%d] %q must be an address such as 10.1.0.1", i, text))
			continue
		}
		gateways[ip.Is4()] = true
		reserved.Add(ip)
	}

	for i, text := range network.Spec.Subnets {
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			wrong = append(wrong,
				fmt.Sprintf("spec.subnets[%d] %q must be a prefix such as 10.1.0.0/24", i, text))
			continue
		}

		rules.subnets = append(rules.subnets, subnet)
		if !gateways[subnet.Addr().Is4()] {
			reserved.Add(subnet.Addr().Next())
		}
	}

	for i, text := range network.Spec.Reserved {
		if r, err := parseRange(text); err == nil {
			reserved.AddRange(r)
		} else {
			wrong = append(wrong,
				fmt.Sprintf("spec.reserved[%d] %q must be a prefix or a range such as "+
					"10.1.0.10-10.1.0.19", i, text))
		}
	}

	if len(wrong) > 0 {
		return nil, problemf(v1alpha1.ReasonNetworkNotReady, "XPUNetwork %s: %s", network.Name,
			strings.Join(wrong, "; "))
	}

	var err error
	if rules.reserved, err = reserved.IPSet(); err != nil {
		return nil, problemf(v1alpha1.ReasonNetworkNotReady, "XPUNetwork %s: %s", network.Name,
			oneLine(err))
	}

	return rules, nil
}

// parseRange reads a prefix or "first-last".
func parseRange(text string) (netipx.IPRange, error) {
	if prefix, err := netip.ParsePrefix(text); err == nil {
		return netipx.RangeOfPrefix(prefix), nil
	}
	return netipx.ParseIPRange(text)
}

// choose returns the addresses that are wanted, or the lowest free one of each subnet if none are,
// or a *problem.
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
			return nil, problemf(v1alpha1.ReasonNoFreeAddress,
				"subnet %s of XPUNetwork %s has no free address left; "+
					"delete pods that use it, or use a network with a larger subnet",
				subnet, rules.network)
		}
		free = append(free, netip.PrefixFrom(address, subnet.Bits()))
	}

	return free, nil
}

// check returns a *problem if one of the addresses cannot be had.
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

		return problemf(reason, "addresses[%d] %s of the InterfaceConfig %s", i, address, wrong)
	}

	return nil
}

// wrong says why nobody can have the address; "" if somebody can.
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

// unusable tells whether the address is the subnet's own (RFC 4291 2.6.1 for IPv6) or its IPv4
// broadcast address.
func unusable(subnet netip.Prefix, ip netip.Addr) bool {
	return !subnet.IsSingleIP() &&
		(ip == subnet.Addr() || ip.Is4() && ip == netipx.PrefixLastIP(subnet))
}

func texts(prefixes []netip.Prefix) (list []string) {
	for _, prefix := range prefixes {
		list = append(list, prefix.String())
	}
	return list
}
