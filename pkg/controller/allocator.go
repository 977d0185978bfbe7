package controller

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// assumedFor ends the reservation of a Port that the cache never has. It must be longer than the cache lags behind.
const assumedFor = time.Minute

// allocator decides which claim gets a Function and which addresses a Port gets. Its decisions count at once, before
// the cache knows of them, so two claims are never promised the same. Safe for concurrent use.
type allocator struct {
	reader client.Reader // of the cache

	mu      sync.Mutex
	assumed map[types.NamespacedName]assumedPort
}

type assumedPort struct {
	port  *v1alpha1.XPUPort
	since time.Time
}

// assume reserves the Function of a Port that is about to be created, and its addresses, which it sets: those wanted, or the
// lowest free one of each subnet. With an error nothing is reserved. settle or assumedFor ends the reservation.
func (l *allocator) assume(ctx context.Context, port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork, wanted []netip.Prefix) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.assumed, func(_ types.NamespacedName, a assumedPort) bool { return time.Since(a.since) > assumedFor })
	key := client.ObjectKeyFromObject(port)
	// A Port that was promised to the same allocation may be there already: it can only be that one.
	if earlier, ok := l.assumed[key]; ok && sameAllocation(earlier.port, port) {
		earlier.port.DeepCopyInto(port)
		return nil
	}
	holders, err := l.portsBy(ctx, portsByFunction, functionOf(port))
	if err != nil {
		return err
	}
	if len(holders) > 0 {
		return busy(&holders[0])
	}
	neighbours, err := l.portsBy(ctx, portsByNetwork, network.Name)
	if err != nil {
		return err
	}
	addresses, err := chooseAddresses(network, addressesOf(neighbours), wanted)
	if err != nil {
		return err
	}
	port.Spec.Addresses = texts(addresses)
	l.assumed[key] = assumedPort{port: port.DeepCopy(), since: time.Now()}
	return nil
}

func sameAllocation(a, b *v1alpha1.XPUPort) bool {
	return a.Spec.Claim.UID == b.Spec.Claim.UID && a.Annotations[annotationAllocation] == b.Annotations[annotationAllocation]
}

// settle ends the reservation of a Port that the cache has, or had, or that was certainly not created.
func (l *allocator) settle(port *v1alpha1.XPUPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := client.ObjectKeyFromObject(port)
	if a, ok := l.assumed[key]; ok && sameAllocation(a.port, port) {
		delete(l.assumed, key)
	}
}

// portsBy are the Ports that the index has by the key, those assumed included.
func (l *allocator) portsBy(ctx context.Context, index, key string) ([]v1alpha1.XPUPort, error) {
	ports, err := listPorts(ctx, l.reader, client.MatchingFields{index: key})
	if err != nil {
		return nil, err
	}
	for _, a := range l.assumed {
		if portKeys[index](a.port) == key {
			ports = append(ports, *a.port)
		}
	}
	return ports, nil
}

// addressesOf maps addresses to the Ports that have them. A Port that is being deleted still has its addresses.
func addressesOf(ports []v1alpha1.XPUPort) map[netip.Addr]types.NamespacedName {
	taken := map[netip.Addr]types.NamespacedName{}
	for i := range ports {
		for _, text := range ports[i].Spec.Addresses {
			if address, err := netip.ParsePrefix(text); err == nil {
				taken[address.Addr()] = client.ObjectKeyFromObject(&ports[i])
			}
		}
	}
	return taken
}

// busy is the problem of a claim or Port that needs the Function of the holder.
func busy(holder *v1alpha1.XPUPort) *problem {
	user := "a pod that has it as an extended resource"
	switch {
	case holder.Spec.Claim.Name != "":
		user = "ResourceClaim " + holder.Spec.Claim.Name
	case holder.Spec.Pod != nil:
		user = "pod " + holder.Spec.Pod.Namespace + "/" + holder.Spec.Pod.Name
	}
	return problemf(v1alpha1.ReasonFunctionBusy,
		"Function %s of node %s still has XPUPort %s/%s of %s; it is taken over as soon as that is gone",
		claim.FunctionOf(holder.Spec.Function), holder.Spec.NodeName, holder.Namespace, holder.Name, user)
}

// chooseAddresses checks the addresses that are wanted, or picks the lowest free one of each subnet if none are.
func chooseAddresses(
	network *v1alpha1.XPUNetwork, taken map[netip.Addr]types.NamespacedName, wanted []netip.Prefix,
) ([]netip.Prefix, error) {
	var subnets, free []netip.Prefix
	for i, text := range network.Spec.Subnets {
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, problemf(v1alpha1.ReasonNetworkNotReady,
				"XPUNetwork %s: spec.subnets[%d] %q must be a prefix such as 10.1.0.0/24", network.Name, i, text)
		}
		subnets = append(subnets, subnet)
	}
	if len(wanted) > 0 {
		return wanted, checkAddresses(network, subnets, taken, wanted)
	}
	for _, subnet := range subnets {
		address := lowestFree(subnet, taken)
		if !address.IsValid() {
			return nil, problemf(v1alpha1.ReasonNoFreeAddress, "subnet %s of XPUNetwork %s has no free address left; "+
				"delete pods that use it, or use a network with a larger subnet", subnet, network.Name)
		}
		free = append(free, netip.PrefixFrom(address, subnet.Bits()))
	}
	return free, nil
}

func checkAddresses(
	network *v1alpha1.XPUNetwork, subnets []netip.Prefix, taken map[netip.Addr]types.NamespacedName, wanted []netip.Prefix,
) error {
	for i, address := range wanted {
		ip := address.Addr()
		inside := slices.IndexFunc(subnets, func(s netip.Prefix) bool { return s.Contains(ip) })
		holder, held := taken[ip]
		reason, wrong := v1alpha1.ReasonInvalidConfig, ""
		switch {
		case len(subnets) > 0 && inside < 0:
			wrong = fmt.Sprintf("is in none of the subnets of XPUNetwork %s (%s); "+
				"choose one inside, or leave addresses away to be given one", network.Name, strings.Join(texts(subnets), ", "))
		case inside >= 0 && unusable(subnets[inside], ip):
			wrong = fmt.Sprintf("is the network's own or its broadcast address in subnet %s; choose another one", subnets[inside])
		case slices.ContainsFunc(wanted[:i], func(p netip.Prefix) bool { return p.Addr() == ip }):
			wrong = "is in the list twice"
		case held:
			reason = v1alpha1.ReasonConflict
			wrong = fmt.Sprintf("is in use by XPUPort %s; choose another one, or delete the pod that has it", holder)
		default:
			continue
		}
		return problemf(reason, "addresses[%d] %s of the InterfaceConfig %s", i, address, wrong)
	}
	return nil
}

// unusable tells whether the address is the subnet's own (RFC 4291 2.6.1 for IPv6) or its IPv4 broadcast address.
func unusable(subnet netip.Prefix, ip netip.Addr) bool {
	return !subnet.IsSingleIP() && (ip == subnet.Addr() || ip.Is4() && ip == netipx.PrefixLastIP(subnet))
}

// lowestFree is the lowest address of the subnet that may be given and is not taken; the zero value if there is none.
// The first one is not given: by custom it is the gateway's.
func lowestFree(subnet netip.Prefix, taken map[netip.Addr]types.NamespacedName) netip.Addr {
	for ip := subnet.Addr().Next().Next(); subnet.Contains(ip) && !unusable(subnet, ip); ip = ip.Next() {
		if _, held := taken[ip]; !held {
			return ip
		}
	}
	return netip.Addr{}
}

func texts(prefixes []netip.Prefix) (list []string) {
	for _, prefix := range prefixes {
		list = append(list, prefix.String())
	}
	return list
}
