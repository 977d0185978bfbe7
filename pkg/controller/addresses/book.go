// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"container/heap"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// book holds the addresses and MAC addresses of the Ports of one network. Changes of Ports
// update it, so that the cost of choosing an address does not grow with the number of Ports. It is
// not safe for concurrent use.
type book struct {
	network   string
	addresses map[netip.Addr]types.NamespacedName
	macs      map[string]types.NamespacedName
	// assigned holds addresses that Ports may not have in their status yet.
	assigned map[types.NamespacedName]assignment

	// bonds are the Ports of each bond by its [bondOf], with their addresses. They share the
	// addresses, and one of them is in addresses.
	bonds map[string]map[types.NamespacedName][]string
	bond  map[types.NamespacedName]string // the bondOf of each Port in bonds

	// successors are the standby Ports by MAC address. When the Port that owns the MAC address is
	// gone, the latest of them gets the MAC address and the addresses of that Port.
	successors map[string][]successor

	generation int64 // of the network's spec from which subnets were made
	subnets    map[netip.Prefix]*freeList
}

// assignment is the addresses that a Port got, until its status has them. A later Port of
// the same name has another UID.
type assignment struct {
	to        types.UID
	addresses []string
}

func newBook(network string) *book {
	return &book{
		network:   network,
		addresses: map[netip.Addr]types.NamespacedName{}, macs: map[string]types.NamespacedName{},
		assigned: map[types.NamespacedName]assignment{}, successors: map[string][]successor{},
		bonds: map[string]map[types.NamespacedName][]string{}, bond: map[types.NamespacedName]string{},
		subnets: map[netip.Prefix]*freeList{},
	}
}

// isEmpty reports whether no Port owns anything in the book's network, or waits to.
func (b *book) isEmpty() bool {
	return len(b.addresses)+len(b.macs)+len(b.assigned)+len(b.bonds)+len(b.successors) == 0
}

// add records what a Port owns. Addresses that another Port owns stay with the other Port, unless
// the other one is a standby for this Port.
func (b *book) add(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	if IsStandby(port) {
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

	b.joinBond(key, port)
	b.take(key, b.of(port))
}

// checkMAC returns a refusal if another Port of the network has the Port's MAC address.
func (b *book) checkMAC(port *v1alpha1.XPUPort) error {
	holder, taken := b.macs[port.Spec.MAC]
	if !taken || holder == client.ObjectKeyFromObject(port) {
		return nil
	}
	return Conflict(port, holder, b.network)
}

// other returns another Port that owns an address or the MAC address of this Port, and which one it
// is. what is "" if there is no such Port.
func (b *book) other(port *v1alpha1.XPUPort) (holder types.NamespacedName, what string) {
	key := client.ObjectKeyFromObject(port)
	for _, text := range b.of(port) {
		address, err := netip.ParsePrefix(text)
		if holder, taken := b.addresses[address.Addr()]; err == nil && taken && holder != key &&
			!b.shares(holder, port) {
			return holder, "address " + text
		}
	}

	if holder, taken := b.macs[port.Spec.MAC]; taken && holder != key {
		return holder, "MAC address " + port.Spec.MAC
	}

	return holder, ""
}

// Conflict is the refusal of a Port whose MAC address belongs to another Port of a network.
func Conflict(port *v1alpha1.XPUPort, holder types.NamespacedName, network string) error {
	return reconciling.Refuse(v1alpha1.ReasonConflict,
		"MAC address %s belongs to XPUPort %s in XPUNetwork %s; ask for another one, or for none",
		port.Spec.MAC, holder, network)
}

// take records the addresses that are free.
func (b *book) take(key types.NamespacedName, addresses []string) {
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

// successor is a standby Port. A later Port of the same name has another UID.
type successor struct {
	key  types.NamespacedName
	uid  types.UID
	made time.Time
}

// IsStandby reports whether the Port waits to take the place of another Port, by its status.
func IsStandby(port *v1alpha1.XPUPort) bool {
	return port.Status.Predecessor != "" && port.Status.BridgePort == "" &&
		!v1alpha1.IsAdmitted(port) && port.DeletionTimestamp.IsZero()
}

// addStandby records a standby Port.
func (b *book) addStandby(port *v1alpha1.XPUPort) {
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
func (b *book) removeStandby(port *v1alpha1.XPUPort) {
	left := slices.DeleteFunc(b.successors[port.Spec.MAC], func(s successor) bool {
		return s.uid == port.UID
	})
	if b.successors[port.Spec.MAC] = left; len(left) == 0 {
		delete(b.successors, port.Spec.MAC)
	}
}

// transfer gives what a Port owns to its successor.
func (b *book) transfer(port *v1alpha1.XPUPort, from types.NamespacedName, to successor) {
	if b.macs[port.Spec.MAC] == from {
		b.macs[port.Spec.MAC] = to.key
	}

	var moved []string
	for _, text := range slices.Concat(b.of(port), b.assigned[from].addresses) {
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
func (b *book) remove(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	b.removeStandby(port)
	fellow, shared := b.leaveBond(key)

	if waiting := b.successors[port.Spec.MAC]; len(waiting) > 0 && b.macs[port.Spec.MAC] == key {
		b.transfer(port, key, waiting[len(waiting)-1])
	}

	if b.macs[port.Spec.MAC] == key {
		delete(b.macs, port.Spec.MAC)
	}

	free := b.of(port)
	if a, ok := b.assigned[key]; ok && a.to == port.UID {
		free = slices.Concat(free, a.addresses)
		delete(b.assigned, key)
	}

	for _, text := range free {
		address, err := netip.ParsePrefix(text)
		if err != nil || b.addresses[address.Addr()] != key {
			continue
		}

		if shared && slices.Contains(b.bonds[b.bond[fellow]][fellow], text) {
			b.addresses[address.Addr()] = fellow
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

// Of returns the addresses that a Port with one network has, or else those that it asks for.
func Of(port *v1alpha1.XPUPort) []string {
	if len(port.Status.Addresses) > 0 {
		return port.Status.Addresses
	}
	return port.Spec.Addresses
}

// of returns the addresses of a Port in the book's network.
func (b *book) of(port *v1alpha1.XPUPort) []string { return In(port, b.network) }

// In returns the addresses of a Port in one of its networks.
func In(port *v1alpha1.XPUPort, network string) []string {
	for _, tagged := range port.Spec.Networks {
		if tagged.Name == network {
			return tagged.Addresses
		}
	}
	return Of(port)
}

// assign chooses and records the addresses of a Port that an agent made: those that it has already,
// those that it asks for, or the lowest free address of each subnet. A refusal says why the Port
// cannot have them.
func (b *book) assign(
	key types.NamespacedName, port *v1alpha1.XPUPort, rules *networkRules,
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

	addresses, err := b.choose(port, rules, wanted)
	if err != nil {
		return nil, err
	}

	given := texts(addresses)
	b.assigned[key] = assignment{port.UID, given}
	b.take(key, given)

	return given, nil
}

// keep records the addresses in a Port's status. A refusal says that another Port has one of them.
func (b *book) keep(key types.NamespacedName, port *v1alpha1.XPUPort) error {
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
func (b *book) lowest(subnet netip.Prefix, reserved netaddr.Set) netip.Addr {
	free := b.subnets[subnet]
	if free == nil {
		free = &freeList{next: subnet.Addr().Next(), has: map[netip.Addr]bool{}}
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
	below []netip.Addr        // a heap; an address may have been taken since it was added
	has   map[netip.Addr]bool // what is in below, so that nothing is twice
}

func (f *freeList) add(ip netip.Addr) {
	if ip.Less(f.next) && !f.has[ip] {
		heap.Push(f, ip)
	}
}

func (f *freeList) Len() int           { return len(f.below) }
func (f *freeList) Less(i, j int) bool { return f.below[i].Less(f.below[j]) }
func (f *freeList) Swap(i, j int)      { f.below[i], f.below[j] = f.below[j], f.below[i] }

func (f *freeList) Push(x any) {
	ip := x.(netip.Addr)
	f.below, f.has[ip] = append(f.below, ip), true
}

func (f *freeList) Pop() any {
	last := f.below[len(f.below)-1]
	f.below = f.below[:len(f.below)-1]
	delete(f.has, last)
	return last
}

// choose returns the wanted addresses, or the lowest free address of each subnet if none are
// wanted. A port of a bond gets the addresses of another port of the bond. A refusal says which
// address is not free.
func (b *book) choose(
	port *v1alpha1.XPUPort, rules *networkRules, wanted []netip.Prefix,
) ([]netip.Prefix, error) {
	if len(wanted) > 0 {
		return wanted, b.check(port, rules, wanted)
	}
	if shared := b.ofBond(port); len(shared) > 0 {
		return shared, nil
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
func (b *book) check(
	port *v1alpha1.XPUPort, rules *networkRules, wanted []netip.Prefix,
) error {
	seen := map[netip.Addr]bool{}
	for i, address := range wanted {
		ip := address.Addr()
		holder, held := b.addresses[ip]
		reason, wrong := v1alpha1.ReasonInvalidConfig, rules.wrong(address)
		switch {
		case wrong != "":
		case seen[ip]:
			wrong = "is in the list twice"
		case held && !b.shares(holder, port):
			reason = v1alpha1.ReasonConflict
			wrong = fmt.Sprintf("is in use by XPUPort %s; choose another one, or delete the pod "+
				"that has it: kubectl get xport -n %s %s names it", holder, holder.Namespace, holder.Name)
		default:
			seen[ip] = true
			continue
		}

		return reconciling.Refuse(reason,
			"addresses[%d] %s of the InterfaceConfig %s", i, address, wrong)
	}

	return nil
}
