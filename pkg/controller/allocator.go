// SPDX-License-Identifier: Apache-2.0

package controller

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
)

// assumedFor ends the reservation of a Port that the cache never has. It must be longer than the
// cache lags behind.
const assumedFor = time.Minute

// allocator decides which claim gets a Function and which addresses a Port gets. Its decisions
// count at once, before the cache knows of them, so two claims never get the same. What it keeps is
// derived from the store's Ports, and changes in its transactions only. Safe for concurrent use.
type allocator struct {
	store   *model.Ports
	assumed map[types.NamespacedName]assumedPort
	books   map[string]*addressBook // by network
}

type assumedPort struct {
	port  *v1alpha1.XPUPort
	since time.Time
}

func newAllocator(store *model.Ports) *allocator {
	l := &allocator{
		store: store, assumed: map[types.NamespacedName]assumedPort{},
		books: map[string]*addressBook{},
	}
	store.Derive(l.portChanged)
	return l
}

// portChanged brings the books to a change of the store. What a Port of a node's agent asks for
// counts once it has been adopted, because it may be refused.
func (l *allocator) portChanged(change model.Change) {
	port := change.Port()
	switch {
	case change.Gone():
		l.gone(port)
	case change.Made() || change.Old.Status.BridgePort != port.Status.BridgePort:
		l.made(port)
	}

	if !change.Gone() && !port.DeletionTimestamp.IsZero() {
		l.book(port.Spec.Network).resign(port)
	}
}

// book is called in a transaction.
func (l *allocator) book(network string) *addressBook {
	book := l.books[network]
	if book == nil {
		book = newAddressBook()
		l.books[network] = book
	}
	return book
}

// assume reserves the Function of a Port that is about to be created, its MAC address and its
// addresses, which it sets: those wanted, or the lowest free one of each subnet. With an error
// nothing is reserved. made, failed or assumedFor ends the reservation.
func (l *allocator) assume(
	ctx context.Context, port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork,
	wanted []netip.Prefix,
) error {
	rules, err := rulesOf(network)
	if err != nil {
		return err
	}

	return l.store.Transact(ctx, func(ports model.View) error {
		return l.reserve(ports, port, rules, wanted)
	})
}

// reserve is assume in a transaction.
func (l *allocator) reserve(
	ports model.View, port *v1alpha1.XPUPort, rules *addressRules, wanted []netip.Prefix,
) error {
	l.expire()
	key := client.ObjectKeyFromObject(port)
	// A Port that was promised to the same allocation may be there already: it can only be that
	// one.
	if earlier, ok := l.assumed[key]; ok && sameAllocation(earlier.port, port) {
		earlier.port.DeepCopyInto(port)
		return nil
	}
	if err := l.checkFunction(ports, port); err != nil {
		return err
	}

	book := l.book(rules.network)
	if err := book.checkMAC(port); err != nil {
		return err
	}

	addresses, err := book.choose(rules, wanted)
	if err != nil {
		return err
	}

	port.Spec.Addresses = texts(addresses)
	l.assumed[key] = assumedPort{port: port.DeepCopy(), since: time.Now()}
	book.add(port)

	return nil
}

// adopt notes the MAC address and the addresses of a Port that an agent made, and chooses addresses
// if it is to have some and has none. A *problem says that another Port has one of them, or that
// none is free.
func (l *allocator) adopt(
	ctx context.Context, port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork,
) (addresses []string, err error) {
	rules, err := rulesOf(network)
	if err != nil {
		return nil, err
	}

	err = l.store.Transact(ctx, func(ports model.View) error {
		if !exists(ports, port) {
			return &problem{} // an event comes
		}
		addresses, err = l.adoptInto(l.book(network.Name), port, rules)
		return err
	})

	return addresses, err
}

func (l *allocator) adoptInto(
	book *addressBook, port *v1alpha1.XPUPort, rules *addressRules,
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
		return nil, problemf(v1alpha1.ReasonInvalidConfig,
			"XPUNetwork %s has no subnets to give addresses from; "+
				"set spec.subnets, or use another IPAM plugin than xpu", rules.network)
	}

	return book.assign(key, port, rules)
}

// checkOwn returns a *problem if another Port of the network has the MAC address or an address that
// the Port was made with, which two controllers may have given away that both took themselves for
// the leader.
func (l *allocator) checkOwn(ctx context.Context, port *v1alpha1.XPUPort) error {
	return l.store.Transact(ctx, func(model.View) error {
		holder, what := l.book(port.Spec.Network).other(port)
		if what == "" {
			return nil
		}

		p := problemf(v1alpha1.ReasonConflict,
			"%s is that of XPUPort %s in XPUNetwork %s too; delete the pod of one of them",
			what, holder, port.Spec.Network)
		p.retry = lastRetry
		return p
	})
}

// holder returns the name of the other Port of the network that has the Port's MAC address, "" if
// there is none, and that Port, nil if it is only about to be created.
func (l *allocator) holder(
	ctx context.Context, port *v1alpha1.XPUPort,
) (name types.NamespacedName, holder *v1alpha1.XPUPort, err error) {
	err = l.store.Transact(ctx, func(ports model.View) error {
		l.expire()
		name = l.book(port.Spec.Network).macs[port.Spec.MAC]
		if name == client.ObjectKeyFromObject(port) {
			name = types.NamespacedName{}
		}
		holder = ports.Get(name)
		return nil
	})
	return name, holder, err
}

// promise has the Port get all that the holder of its MAC address has, at the moment when the
// holder is gone. A *problem says that the MAC address has another holder by now, or that the Port
// itself is going, of both of which an event comes.
func (l *allocator) promise(
	ctx context.Context, port *v1alpha1.XPUPort, holder types.NamespacedName,
) error {
	return l.store.Transact(ctx, func(ports model.View) error {
		book := l.book(port.Spec.Network)
		if !exists(ports, port) || book.macs[port.Spec.MAC] != holder {
			return &problem{}
		}
		book.succeed(port)
		return nil
	})
}

// exists reports whether the store has the Port, and not as one that is being deleted.
func exists(ports model.View, port *v1alpha1.XPUPort) bool {
	now := ports.Get(client.ObjectKeyFromObject(port))
	return now != nil && now.UID == port.UID && now.DeletionTimestamp.IsZero()
}

// checkFunction returns a *problem if the Port's Function has another Port.
func (l *allocator) checkFunction(ports model.View, port *v1alpha1.XPUPort) error {
	holders := ports.By(model.ByFunction, model.FunctionKeyOf(port))
	for _, a := range l.assumed {
		if model.FunctionKeyOf(a.port) == model.FunctionKeyOf(port) {
			holders = append(holders, a.port)
		}
	}

	// One that was made ahead gives way; one at another XPU, which served the PF before, must be
	// gone first.
	holders = slices.DeleteFunc(holders, func(p *v1alpha1.XPUPort) bool {
		return p.Spec.Ahead && p.Spec.XPU == port.Spec.XPU
	})
	if len(holders) > 0 {
		return busy(holders[0])
	}

	return nil
}

// expire is called in a transaction.
func (l *allocator) expire() {
	for _, a := range l.assumed {
		if time.Since(a.since) > assumedFor {
			l.drop(a.port)
		}
	}
}

func sameAllocation(a, b *v1alpha1.XPUPort) bool {
	return a.Spec.Claim.UID == b.Spec.Claim.UID &&
		a.Annotations[annotationAllocation] == b.Annotations[annotationAllocation]
}

// drop ends a reservation and frees what it had. It is called in a transaction.
func (l *allocator) drop(port *v1alpha1.XPUPort) {
	key := client.ObjectKeyFromObject(port)
	if a, ok := l.assumed[key]; ok && sameAllocation(a.port, port) {
		delete(l.assumed, key)
		l.book(port.Spec.Network).remove(a.port)
	}
}

// failed ends the reservation of a Port that was certainly not created.
func (l *allocator) failed(ctx context.Context, port *v1alpha1.XPUPort) error {
	return l.store.Transact(ctx, func(model.View) error {
		l.drop(port)
		return nil
	})
}

// made notes what a Port of the store has.
func (l *allocator) made(port *v1alpha1.XPUPort) {
	if !holds(port) {
		return
	}

	key := client.ObjectKeyFromObject(port)
	if a, ok := l.assumed[key]; ok && sameAllocation(a.port, port) {
		delete(l.assumed, key)
	}
	l.book(port.Spec.Network).add(port)
}

// holds says whether a Port has what it asks for: a claim's has, since it was made with it, and an
// agent's if it was ever up or, in a tenant cluster, admitted, or if another Port has it and is to
// leave it to this one, unless this one is being deleted. One that was made ahead holds nothing: no
// pod has it, and its MAC address is the next claim's, if that can have it.
func holds(port *v1alpha1.XPUPort) bool {
	return !port.Spec.Ahead &&
		(v1alpha1.IsAdmitted(port) || port.Status.BridgePort != "" || standsBy(port))
}

// gone frees what a Port had that the store has no more. It still has its addresses while it is
// being deleted.
func (l *allocator) gone(port *v1alpha1.XPUPort) {
	l.drop(port)
	l.book(port.Spec.Network).remove(port)
	// The next Port of the Function has the same name, and may have been promised some of the same.
	if next, ok := l.assumed[client.ObjectKeyFromObject(port)]; ok {
		l.book(next.port.Spec.Network).add(next.port)
	}
}

// busy is the problem of a claim or Port that needs the Function of the holder.
func busy(holder *v1alpha1.XPUPort) *problem {
	user := "a pod that has it as an extended resource"
	switch {
	case holder.Spec.Ahead:
		user = "no pod, made ahead at XPU " + holder.Spec.XPU
	case holder.Spec.Claim.Name != "":
		user = "ResourceClaim " + holder.Spec.Claim.Name
	case holder.Spec.Pod != nil:
		user = "pod " + holder.Spec.Pod.Namespace + "/" + holder.Spec.Pod.Name
	}

	return problemf(v1alpha1.ReasonFunctionBusy,
		"Function %s of node %s still has XPUPort %s/%s of %s; it is taken over as soon as that "+
			"is gone",
		claim.FunctionOf(holder.Spec.Function), holder.Spec.NodeName, holder.Namespace,
		holder.Name, user)
}
