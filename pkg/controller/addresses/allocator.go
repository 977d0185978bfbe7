// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// AssumedFor is how long a reservation lasts for a Port that never appears in the cache. It must be
// longer than the cache's delay.
const AssumedFor = time.Minute

// AnnotationAllocation distinguishes the allocations of one claim. It is the allocation's time
// stamp (RFC 3339), empty if the allocation has none.
const AnnotationAllocation = v1alpha1.GroupName + "/allocation"

// Allocator decides which claim gets a Function and which addresses a Port gets. A decision takes
// effect at once, before the cache shows it, so that two claims never get the same Function or
// address. The allocator's data is derived from the model's Ports and changes only in the model's
// transactions. Safe for concurrent use.
type Allocator struct {
	ports   *model.Ports
	assumed map[types.NamespacedName]assumedPort
	books   map[string]*book // by network
}

type assumedPort struct {
	port  *v1alpha1.XPUPort
	since time.Time
}

// NewAllocator returns an allocator whose data follows the model.
func NewAllocator(ports *model.Ports) *Allocator {
	l := &Allocator{
		ports: ports, assumed: map[types.NamespacedName]assumedPort{},
		books: map[string]*book{},
	}
	ports.Derive(l.portChanged)
	return l
}

// portChanged updates the address books. The addresses that a node agent's Port asks for are
// recorded when the Port is adopted, because it may be refused.
func (l *Allocator) portChanged(change model.Change) {
	port := change.Port()
	switch {
	case change.Gone():
		l.gone(port)
	case change.Made() || change.Old.Status.BridgePort != port.Status.BridgePort:
		l.made(port)
	}

	if !change.Gone() && !port.DeletionTimestamp.IsZero() {
		for _, book := range l.booksOf(port) {
			book.removeStandby(port)
		}
	}
}

// book returns the address book of a network. It is called in a transaction.
func (l *Allocator) book(network string) *book {
	book := l.books[network]
	if book == nil {
		book = newBook(network)
		l.books[network] = book
	}
	return book
}

// booksOf returns the address books of a Port's networks. It is called in a transaction.
func (l *Allocator) booksOf(port *v1alpha1.XPUPort) (books []*book) {
	for _, network := range port.Spec.AllNetworks() {
		books = append(books, l.book(network))
	}
	return books
}

// Join is a network that a Port joins.
type Join struct {
	Network *v1alpha1.XPUNetwork
	Wanted  []netip.Prefix // the addresses; none: the lowest free one of each subnet
}

// Assume reserves what a Port needs that is about to be created: its Function, and in each of its
// networks, in the order of the spec, its MAC address and its addresses. It sets the Port's
// addresses. It refuses a Port that does not fit into the limits of its namespace. If it returns an
// error, nothing is reserved. The reservation ends when the model has the Port, when Failed is
// called, or after AssumedFor.
func (l *Allocator) Assume(
	ctx context.Context, port *v1alpha1.XPUPort, limits []Limit, joins ...Join,
) error {
	var all []*networkRules
	for _, join := range joins {
		rules, err := rulesOf(join.Network)
		if err != nil {
			return err
		}
		all = append(all, rules)
	}

	return l.ports.Transact(ctx, func(ports model.View) error {
		return l.reserve(ports, port, limits, all, joins)
	})
}

// reserve is [Allocator.Assume] in a transaction.
func (l *Allocator) reserve(
	ports model.View, port *v1alpha1.XPUPort, limits []Limit, rules []*networkRules, joins []Join,
) error {
	l.expire()
	key := client.ObjectKeyFromObject(port)
	// The API server may have the Port of an earlier reservation for the same allocation already,
	// so that this Port must be equal to it.
	if earlier, ok := l.assumed[key]; ok && sameAllocation(earlier.port, port) {
		earlier.port.DeepCopyInto(port)
		return nil
	}
	if err := l.checkFunction(ports, port); err != nil {
		return err
	}
	if err := l.checkLimits(ports, port, limits); err != nil {
		return err
	}

	given := make([][]string, len(joins))
	for i, join := range joins {
		book := l.book(join.Network.Name)
		if err := book.checkMAC(port); err != nil {
			return err
		}
		addresses, err := book.choose(port, rules[i], join.Wanted)
		if err != nil {
			return err
		}
		given[i] = texts(addresses)
	}

	if port.Spec.IsTrunk() {
		for i := range port.Spec.Networks {
			port.Spec.Networks[i].Addresses = given[i]
		}
	} else {
		port.Spec.Addresses = given[0]
	}

	l.assumed[key] = assumedPort{port: port.DeepCopy(), since: time.Now()}
	for _, book := range l.booksOf(port) {
		book.add(port)
	}

	return nil
}

// Adopt records the MAC address and the addresses of a Port that an agent made. It assigns
// addresses if the Port needs some and has none. A refusal says that another Port has one of them,
// that no address is free, or that the Port does not fit into the limits of its namespace. known is
// false if the model does not have the Port now; an event follows then.
func (l *Allocator) Adopt(
	ctx context.Context, port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork, limits []Limit,
) (addresses []string, known bool, err error) {
	rules, err := rulesOf(network)
	if err != nil {
		return nil, false, err
	}

	err = l.ports.Transact(ctx, func(ports model.View) error {
		if known = exists(ports, port); !known {
			return nil
		}
		if err := l.checkLimits(ports, port, limits); err != nil {
			return err
		}
		addresses, err = l.adoptInto(l.book(network.Name), port, rules)
		return err
	})

	return addresses, known, err
}

func (l *Allocator) adoptInto(
	book *book, port *v1alpha1.XPUPort, rules *networkRules,
) ([]string, error) {
	l.expire()
	key := client.ObjectKeyFromObject(port)
	if err := book.checkMAC(port); err != nil {
		return nil, err
	}

	book.macs[port.Spec.MAC] = key
	if !port.Spec.AssignAddresses && len(port.Spec.Addresses) == 0 {
		return nil, nil
	}

	if len(rules.subnets) == 0 {
		return nil, reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"XPUNetwork %s has no subnets to give addresses from; "+
				"set spec.subnets, or use another IPAM plugin than xpu", rules.network)
	}

	return book.assign(key, port, rules)
}

// CheckOwn returns a refusal if another Port of the network has the MAC address or an address that
// this Port was created with. This happens if two controllers acted as the leader at the same time.
func (l *Allocator) CheckOwn(ctx context.Context, port *v1alpha1.XPUPort) error {
	return l.ports.Transact(ctx, func(model.View) error {
		for _, book := range l.booksOf(port) {
			if holder, what := book.other(port); what != "" {
				return reconciling.Refuse(v1alpha1.ReasonConflict,
					"%s belongs to XPUPort %s in XPUNetwork %s too; delete the pod of one of them",
					what, holder, book.network)
			}
		}
		return nil
	})
}

// Holder returns the other Port of the network that has the Port's MAC address. name is empty if
// there is none. holder is nil if that Port is only about to be created.
func (l *Allocator) Holder(
	ctx context.Context, port *v1alpha1.XPUPort,
) (name types.NamespacedName, holder *v1alpha1.XPUPort, err error) {
	err = l.ports.Transact(ctx, func(ports model.View) error {
		l.expire()
		name = l.book(port.Spec.Network).macs[port.Spec.MAC]
		if name == client.ObjectKeyFromObject(port) {
			name = types.NamespacedName{}
		}
		if holder = ports.Get(name); holder != nil && holder.Spec.MAC != port.Spec.MAC {
			holder = nil // an earlier Port of the name
		}
		return nil
	})
	return name, holder, err
}

// MakeStandby makes the Port the successor of the Port that has its MAC address. When the holder is
// gone, the successor gets the MAC address and all addresses in the same moment. made is false if
// the holder changed meanwhile, or if the Port is being deleted. An event follows in both cases.
func (l *Allocator) MakeStandby(
	ctx context.Context, port *v1alpha1.XPUPort, holder types.NamespacedName,
) (made bool, err error) {
	err = l.ports.Transact(ctx, func(ports model.View) error {
		book := l.book(port.Spec.Network)
		if made = exists(ports, port) && book.macs[port.Spec.MAC] == holder; made {
			book.addStandby(port)
		}
		return nil
	})
	return made, err
}

// exists reports whether the model has the Port and the Port is not being deleted.
func exists(ports model.View, port *v1alpha1.XPUPort) bool {
	now := ports.Get(client.ObjectKeyFromObject(port))
	return now != nil && now.UID == port.UID && now.DeletionTimestamp.IsZero()
}

// checkFunction returns a refusal if the Port's Function has another Port.
func (l *Allocator) checkFunction(ports model.View, port *v1alpha1.XPUPort) error {
	holders := ports.By(model.ByFunction, model.FunctionKeyOf(port))
	for _, a := range l.assumed {
		if model.FunctionKeyOf(a.port) == model.FunctionKeyOf(port) {
			holders = append(holders, a.port)
		}
	}

	// A Port that was made ahead gives way. If it is at another XPU, which served the PF before, it
	// must be gone first.
	holders = slices.DeleteFunc(holders, func(p *v1alpha1.XPUPort) bool {
		return p.Spec.Ahead && p.Spec.XPU == port.Spec.XPU
	})
	if len(holders) > 0 {
		return Busy(holders[0])
	}

	return nil
}

// expire ends reservations that are too old. It is called in a transaction.
func (l *Allocator) expire() {
	for _, a := range l.assumed {
		if time.Since(a.since) > AssumedFor {
			l.drop(a.port)
		}
	}
}

func sameAllocation(a, b *v1alpha1.XPUPort) bool {
	return a.Spec.Claim.UID == b.Spec.Claim.UID &&
		a.Annotations[AnnotationAllocation] == b.Annotations[AnnotationAllocation]
}

// drop ends a reservation and frees what was reserved. It is called in a transaction.
func (l *Allocator) drop(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	if a, ok := l.assumed[key]; ok && sameAllocation(a.port, port) {
		delete(l.assumed, key)
		for _, book := range l.booksOf(a.port) {
			book.remove(a.port)
		}
	}
}

// Failed ends the reservation of a Port that certainly was not created.
func (l *Allocator) Failed(ctx context.Context, port *v1alpha1.XPUPort) error {
	return l.ports.Transact(ctx, func(model.View) error {
		l.drop(port)
		return nil
	})
}

// made records what a Port of the model owns.
func (l *Allocator) made(port *v1alpha1.XPUPort) {
	if !ownsAddresses(port) {
		return
	}

	key := client.ObjectKeyFromObject(port)
	if a, ok := l.assumed[key]; ok && sameAllocation(a.port, port) {
		delete(l.assumed, key)
	}
	for _, book := range l.booksOf(port) {
		book.add(port)
	}
}

// ownsAddresses reports whether the MAC address and the addresses in the Port's spec are reserved
// for it.
//
// A Port of a claim owns them from the start. A Port that an agent made owns them once it was
// admitted or was up. A standby Port owns them together with the Port that it will replace. A Port
// that was made ahead owns nothing, because no pod uses it and the next claim may get its MAC
// address.
func ownsAddresses(port *v1alpha1.XPUPort) bool {
	return !port.Spec.Ahead &&
		(v1alpha1.IsAdmitted(port) || port.Status.BridgePort != "" || IsStandby(port))
}

// gone frees what a Port owned. A Port that is being deleted still owns its addresses.
func (l *Allocator) gone(port *v1alpha1.XPUPort) {
	l.drop(port)
	for _, book := range l.booksOf(port) {
		book.remove(port)
	}
	// The next Port of the Function has the same name, and its reservation may contain some of the
	// same addresses.
	if next, ok := l.assumed[client.ObjectKeyFromObject(port)]; ok {
		for _, book := range l.booksOf(next.port) {
			book.add(next.port)
		}
	}
	// Ports may name any networks, which need not exist.
	for _, network := range port.Spec.AllNetworks() {
		if l.book(network).isEmpty() {
			delete(l.books, network)
		}
	}
}

// Busy is the refusal of a claim or Port whose Function belongs to the holder.
func Busy(holder *v1alpha1.XPUPort) error {
	user := "a pod that has it as an extended resource"
	switch {
	case holder.Spec.Ahead:
		user = "no pod, made ahead at XPU " + holder.Spec.XPU
	case holder.Spec.Claim.Name != "":
		user = "ResourceClaim " + holder.Spec.Claim.Name
	case holder.Spec.Pod != nil:
		user = "pod " + holder.Spec.Pod.Namespace + "/" + holder.Spec.Pod.Name
	}

	return reconciling.Refuse(v1alpha1.ReasonFunctionBusy,
		"Function %s of node %s still has XPUPort %s/%s of %s; it is taken over as soon as that "+
			"is gone",
		claim.FunctionOf(holder.Spec.Function), holder.Spec.NodeName, holder.Namespace,
		holder.Name, user)
}
