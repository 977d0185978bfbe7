package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"
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
		told := ptr.Deref(deviceCondition(c, d, v1alpha1.ConditionProvisioned), metav1.Condition{})
		if told.Reason == v1alpha1.ReasonNoFreeAddress || told.Reason == v1alpha1.ReasonConflict {
			keys.Insert(onAddresses(network))
		}
	}
	return keys.UnsortedList()
}

// portKeys are the keys by which XPUPorts are indexed.
var portKeys = map[string]func(*v1alpha1.XPUPort) string{
	portsByClaim:    func(p *v1alpha1.XPUPort) string { return p.Spec.Claim.Name },
	portsByFunction: func(p *v1alpha1.XPUPort) string { return functionKey(p.Spec.NodeName, p.Spec.Function) },
	portsByNetwork:  func(p *v1alpha1.XPUPort) string { return p.Spec.Network },
	portsByXPU:      func(p *v1alpha1.XPUPort) string { return p.Spec.XPU },
}

func addIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	for name, key := range portKeys {
		if err := addIndex(ctx, indexer, name, func(p *v1alpha1.XPUPort) []string { return []string{key(p)} }); err != nil {
			return err
		}
	}
	return errors.Join(
		addIndex(ctx, indexer, claimsByDependency, dependencies),
		addIndex(ctx, indexer, poolsByNetwork, func(p *v1alpha1.DevicePool) []string { return []string{p.Spec.Network} }),
		addIndex(ctx, indexer, xpusByNode, func(x *v1alpha1.XPU) []string { return []string{x.Spec.NodeName} }),
		addIndex(ctx, indexer, xpusByEndpoint, func(x *v1alpha1.XPU) []string { return []string{x.Spec.Endpoint} }),
		addIndex(ctx, indexer, xpusBySecret, func(x *v1alpha1.XPU) []string {
			return []string{ptr.Deref(x.Spec.TLS, v1alpha1.XPUTLS{}).SecretName}
		}),
		addIndex(ctx, indexer, networksByID, segmentKeys),
	)
}

// addIndex adds an index of the cache. An object is not found by a key that is empty.
func addIndex[O any, P interface {
	*O
	client.Object
}](ctx context.Context, indexer client.FieldIndexer, name string, keys func(P) []string) error {
	err := indexer.IndexField(ctx, P(new(O)), name, func(o client.Object) []string {
		return slices.DeleteFunc(keys(o.(P)), func(key string) bool { return key == "" })
	})
	if err != nil {
		return fmt.Errorf("index %s of %T: %w", name, P(nil), err)
	}
	return nil
}
