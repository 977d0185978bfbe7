package controller

import (
	"context"
	"fmt"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// Indexes of the cache.
const (
	claimsByDependency = "dependency" // see dependencies
	portsByClaim       = "claim"      // name of the ResourceClaim, in the Port's namespace; none for Ports without one
	portsByFunction    = "function"   // see functionKey
	portsByNetwork     = "network"    // name of the XPUNetwork
	portsByXPU         = "xpu"        // name of the XPU
	poolsByNetwork     = "network"    // name of the XPUNetwork
	xpusByNode         = "node"       // name of the node
	xpusBySecret       = "secret"     // name of the TLS Secret
	xpusByEndpoint     = "endpoint"   // host:port
	networksByID       = "id"         // see segmentKeys
)

// functionKey identifies a Function in the cluster.
func functionKey(node string, f v1alpha1.FunctionRef) string {
	key := node + "/" + f.PCIAddress
	if f.Subfunction != nil {
		key += "/sf" + strconv.FormatInt(*f.Subfunction, 10)
	}
	return key
}

// segmentKeys are what no two networks may have in common.
func segmentKeys(n *v1alpha1.XPUNetwork) []string {
	keys := []string{fmt.Sprintf("VLAN %d", n.Spec.VLAN)}
	if n.Spec.VNI != nil {
		keys = append(keys, fmt.Sprintf("VNI %d", *n.Spec.VNI))
	}
	return keys
}

// Keys of claimsByDependency, by the name of what a claim depends on.
func onFunction(key string) string            { return "function " + key }
func onNode(name string) string               { return "node " + name }
func onPool(name string) string               { return "pool " + name }
func onNetwork(name string) string            { return "network " + name }
func onAddresses(networkOrPool string) string { return "addresses of " + networkOrPool }

// dependencies are what may change what comes of a claim: the Functions that it was allocated with their nodes, and the
// network that it names, or else the DevicePool that names one. A claim that could not get its addresses depends on
// those of the network as well.
func dependencies(c *resourceapi.ResourceClaim) []string {
	devices, err := claim.Devices(c)
	if err != nil {
		return nil
	}
	keys := sets.New[string]()
	for i := range devices {
		d := &devices[i]
		keys.Insert(onFunction(functionKey(d.ID.Node, claim.FunctionRef(d.Function))), onNode(d.ID.Node))
		network := onPool(d.ID.DevicePool)
		if d.Config.Network != "" {
			network = onNetwork(d.Config.Network)
		}
		keys.Insert(network)
		provisioned := deviceCondition(c, d, v1alpha1.ConditionProvisioned)
		if provisioned != nil && (provisioned.Reason == v1alpha1.ReasonNoFreeAddress || provisioned.Reason == v1alpha1.ReasonConflict) {
			keys.Insert(onAddresses(network))
		}
	}
	return keys.UnsortedList()
}

// nonEmpty is what an object without the key is not found by.
func nonEmpty(key string) []string {
	if key == "" {
		return nil
	}
	return []string{key}
}

func addIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	port := func(key func(*v1alpha1.XPUPort) string) client.IndexerFunc {
		return func(o client.Object) []string { return nonEmpty(key(o.(*v1alpha1.XPUPort))) }
	}
	for _, index := range []struct {
		object client.Object
		name   string
		keys   client.IndexerFunc
	}{
		{&resourceapi.ResourceClaim{}, claimsByDependency, func(o client.Object) []string { return dependencies(o.(*resourceapi.ResourceClaim)) }},
		{&v1alpha1.DevicePool{}, poolsByNetwork, func(o client.Object) []string { return nonEmpty(o.(*v1alpha1.DevicePool).Spec.Network) }},
		{&v1alpha1.XPUPort{}, portsByClaim, port(func(p *v1alpha1.XPUPort) string { return p.Spec.Claim.Name })},
		{&v1alpha1.XPUPort{}, portsByFunction, port(func(p *v1alpha1.XPUPort) string { return functionKey(p.Spec.NodeName, p.Spec.Function) })},
		{&v1alpha1.XPUPort{}, portsByNetwork, port(func(p *v1alpha1.XPUPort) string { return p.Spec.Network })},
		{&v1alpha1.XPUPort{}, portsByXPU, port(func(p *v1alpha1.XPUPort) string { return p.Spec.XPU })},
		{&v1alpha1.XPU{}, xpusByNode, func(o client.Object) []string { return []string{o.(*v1alpha1.XPU).Spec.NodeName} }},
		{&v1alpha1.XPU{}, xpusByEndpoint, func(o client.Object) []string { return []string{o.(*v1alpha1.XPU).Spec.Endpoint} }},
		{&v1alpha1.XPU{}, xpusBySecret, func(o client.Object) []string {
			if tls := o.(*v1alpha1.XPU).Spec.TLS; tls != nil {
				return []string{tls.SecretName}
			}
			return nil
		}},
		{&v1alpha1.XPUNetwork{}, networksByID, func(o client.Object) []string { return segmentKeys(o.(*v1alpha1.XPUNetwork)) }},
	} {
		if err := indexer.IndexField(ctx, index.object, index.name, index.keys); err != nil {
			return fmt.Errorf("index %s of %T: %w", index.name, index.object, err)
		}
	}
	return nil
}
