package controller

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// assumedFor is how long a Port that is not in the cache is counted as there. It only has to be longer than the
// cache lags behind, and is for Ports that were gone before the cache saw them, or never made.
const assumedFor = time.Minute

// allocator decides which claim gets a Function and which addresses a Port gets. Its decisions count at once, before
// the cache knows of them, so two claims are never promised the same. Safe for concurrent use.
type allocator struct {
	ports client.Reader

	mu      sync.Mutex
	assumed map[types.NamespacedName]assumedPort
}

type assumedPort struct {
	port  *v1alpha1.XPUPort
	since time.Time
}

func newAllocator(ports client.Reader) *allocator {
	return &allocator{ports: ports, assumed: map[types.NamespacedName]assumedPort{}}
}

// assume reserves the Function of a Port that is about to be created, gives the Port its addresses, and reserves
// them: those wanted, or the lowest free one of each subnet. A problem says why it cannot be; then nothing is
// reserved. The reservation ends by seen, by drop, or after assumedFor.
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
	holder, err := l.holder(ctx, functionKey(port.Spec.NodeName, port.Spec.Function))
	if err != nil {
		return err
	}
	if holder != nil {
		return busy(holder)
	}
	taken, err := l.taken(ctx, network.Name)
	if err != nil {
		return err
	}
	addresses, err := chooseAddresses(network, taken, wanted)
	if err != nil {
		return err
	}
	port.Spec.Addresses = nil
	for _, address := range addresses {
		port.Spec.Addresses = append(port.Spec.Addresses, address.String())
	}
	l.assumed[key] = assumedPort{port: port.DeepCopy(), since: time.Now()}
	return nil
}

func sameAllocation(a, b *v1alpha1.XPUPort) bool {
	return a.Spec.Claim.UID == b.Spec.Claim.UID && a.Annotations[annotationAllocation] == b.Annotations[annotationAllocation]
}

// drop ends the reservation of a Port that was certainly not created.
func (l *allocator) drop(port *v1alpha1.XPUPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.assumed, client.ObjectKeyFromObject(port))
}

// seen ends the reservation of a Port that the cache has, or had.
func (l *allocator) seen(port *v1alpha1.XPUPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := client.ObjectKeyFromObject(port)
	if a, ok := l.assumed[key]; ok && sameAllocation(a.port, port) {
		delete(l.assumed, key)
	}
}

// holder is the Port that has the Function, nil if none.
func (l *allocator) holder(ctx context.Context, function string) (*v1alpha1.XPUPort, error) {
	ports, err := listPorts(ctx, l.ports, client.MatchingFields{portsByFunction: function})
	if err != nil {
		return nil, err
	}
	if len(ports) > 0 {
		return ports[0].DeepCopy(), nil
	}
	for _, a := range l.assumed {
		if functionKey(a.port.Spec.NodeName, a.port.Spec.Function) == function {
			return a.port, nil
		}
	}
	return nil, nil
}

// taken maps the addresses of the network that are in use to the Ports that have them. A Port keeps its addresses
// until it is gone: as long as it is being deleted, the xPU may still serve them.
func (l *allocator) taken(ctx context.Context, network string) (map[netip.Addr]types.NamespacedName, error) {
	ports, err := listPorts(ctx, l.ports, client.MatchingFields{portsByNetwork: network})
	if err != nil {
		return nil, err
	}
	taken := map[netip.Addr]types.NamespacedName{}
	add := func(port *v1alpha1.XPUPort) {
		for _, text := range port.Spec.Addresses {
			if address, err := netip.ParsePrefix(text); err == nil {
				taken[address.Addr()] = client.ObjectKeyFromObject(port)
			}
		}
	}
	for i := range ports {
		add(&ports[i])
	}
	for _, a := range l.assumed {
		if a.port.Spec.Network == network {
			add(a.port)
		}
	}
	return taken, nil
}

// listPorts lists Ports of the cache without copying them: they must not be changed.
func listPorts(ctx context.Context, r client.Reader, options ...client.ListOption) ([]v1alpha1.XPUPort, error) {
	var ports v1alpha1.XPUPortList
	if err := r.List(ctx, &ports, append(options, client.UnsafeDisableDeepCopy)...); err != nil {
		return nil, fmt.Errorf("list XPUPorts: %w", err)
	}
	return ports.Items, nil
}

func busy(holder *v1alpha1.XPUPort) *problem {
	return problemf(v1alpha1.ReasonFunctionBusy, "Function %s of node %s still has XPUPort %s/%s of %s; it is taken over as soon as that is gone",
		claim.FunctionOf(holder.Spec.Function), holder.Spec.NodeName, holder.Namespace, holder.Name, userOf(holder))
}

// userOf names who the Port is for.
func userOf(port *v1alpha1.XPUPort) string {
	switch {
	case port.Spec.Claim.Name != "":
		return "ResourceClaim " + port.Spec.Claim.Name
	case port.Spec.Pod != nil:
		return "pod " + port.Spec.Pod.Namespace + "/" + port.Spec.Pod.Name
	}
	return "a pod that has it as an extended resource"
}

// chooseAddresses checks the addresses that are wanted, or picks the lowest free one of each subnet if none are.
func chooseAddresses(network *v1alpha1.XPUNetwork, taken map[netip.Addr]types.NamespacedName, wanted []netip.Prefix) ([]netip.Prefix, error) {
	subnets, err := parseSubnets(network)
	if err != nil {
		return nil, err
	}
	if len(wanted) > 0 {
		return wanted, checkAddresses(network, subnets, taken, wanted)
	}
	var addresses []netip.Prefix
	for _, subnet := range subnets {
		address := lowestFree(subnet, taken)
		if !address.IsValid() {
			return nil, problemf(v1alpha1.ReasonNoFreeAddress, "subnet %s of XPUNetwork %s has no free address left; delete pods that use it, or use a network with a larger subnet", subnet, network.Name)
		}
		addresses = append(addresses, netip.PrefixFrom(address, subnet.Bits()))
	}
	return addresses, nil
}

func parseSubnets(network *v1alpha1.XPUNetwork) ([]netip.Prefix, error) {
	var subnets []netip.Prefix
	for i, text := range network.Spec.Subnets {
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, problemf(v1alpha1.ReasonNetworkNotReady, "XPUNetwork %s: spec.subnets[%d] %q must be a prefix such as 10.1.0.0/24", network.Name, i, text)
		}
		subnets = append(subnets, subnet)
	}
	return subnets, nil
}

func checkAddresses(network *v1alpha1.XPUNetwork, subnets []netip.Prefix, taken map[netip.Addr]types.NamespacedName, wanted []netip.Prefix) error {
	for i, address := range wanted {
		ip := address.Addr()
		inside := slices.IndexFunc(subnets, func(s netip.Prefix) bool { return s.Contains(ip) })
		switch holder, held := taken[ip]; {
		case len(subnets) > 0 && inside < 0:
			return problemf(v1alpha1.ReasonInvalidConfig, "addresses[%d] %s of the InterfaceConfig is in none of the subnets of XPUNetwork %s (%s); choose one inside, or leave addresses away to be given one",
				i, address, network.Name, list(subnets))
		case inside >= 0 && unusable(subnets[inside], ip):
			return problemf(v1alpha1.ReasonInvalidConfig, "addresses[%d] %s of the InterfaceConfig is the network's own or its broadcast address in subnet %s; choose another one", i, address, subnets[inside])
		case slices.ContainsFunc(wanted[:i], func(p netip.Prefix) bool { return p.Addr() == ip }):
			return problemf(v1alpha1.ReasonInvalidConfig, "addresses[%d] %s of the InterfaceConfig is in the list twice", i, address)
		case held:
			return problemf(v1alpha1.ReasonConflict, "addresses[%d] %s of the InterfaceConfig is in use by XPUPort %s; choose another one, or delete the pod that has it", i, address, holder)
		}
	}
	return nil
}

// unusable tells whether the address is the subnet's own (RFC 4291 2.6.1 for IPv6) or its IPv4 broadcast address.
func unusable(subnet netip.Prefix, ip netip.Addr) bool {
	if subnet.IsSingleIP() {
		return false
	}
	return ip == subnet.Addr() || ip.Is4() && ip == netipx.PrefixLastIP(subnet)
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
