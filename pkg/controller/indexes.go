package controller

import (
	"context"
	"fmt"
	"strconv"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Indexes of the cache.
const (
	portsByClaim    = "claim"    // name of the ResourceClaim, in the Port's namespace; none for Ports without one
	portsByFunction = "function" // see functionKey
	portsByNetwork  = "network"  // name of the XPUNetwork
	portsByXPU      = "xpu"      // name of the XPU
	xpusByNode      = "node"     // name of the node
	xpusBySecret    = "secret"   // name of the TLS Secret
	xpusByEndpoint  = "endpoint" // host:port
	networksByID    = "id"       // see segmentKeys
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
