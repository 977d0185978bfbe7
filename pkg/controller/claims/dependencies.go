// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// byDependency is the index of ResourceClaims by [dependencies].
const byDependency = "dependency"

// AddIndexes adds the index of the cache that this package reads.
func AddIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	return reconciling.AddIndex(ctx, indexer, &resourceapi.ResourceClaim{}, byDependency,
		dependencies)
}

// Keys of byDependency, by the name of what a claim depends on.
func onNode(name string) string    { return "node " + name }
func onPool(name string) string    { return "pool " + name }
func onNetwork(name string) string { return "network " + name }

// any of them
func onAddresses(networkOrPool string) string { return "addresses of " + networkOrPool }

// about certain addresses
func onConflict(networkOrPool string) string { return "conflict in " + networkOrPool }

// onQuota is the key of claims that exceed the quota of a namespace.
func onQuota(namespace string) string { return "quota of " + namespace }

// dependencies returns what a claim depends on: the nodes of its Functions, and the network that it
// names, or else the DevicePool that names one. A claim that sets privileged fields always depends
// on the DevicePool. A claim that could not get its addresses also depends on the network's
// addresses, and a claim that exceeds a quota on the quotas of its namespace.
func dependencies(c *resourceapi.ResourceClaim) []string {
	devices, err := claim.Devices(c)
	if err != nil {
		return nil
	}

	keys := sets.New[string]()
	for i := range devices {
		d := &devices[i]
		keys.Insert(onNode(d.ID.Node))
		names := []string{onPool(d.ID.DevicePool)}
		if given := d.NetworkNames(v1alpha1.DevicePoolSpec{}); len(given) > 0 {
			names = names[:0]
			for _, network := range given {
				names = append(names, onNetwork(network))
			}
		}

		keys.Insert(names...)
		if len(d.Privileged) > 0 {
			keys.Insert(onPool(d.ID.DevicePool)) // which allows them or not
		}

		switch deviceCondition(c, d, v1alpha1.ConditionProvisioned).Reason {
		case v1alpha1.ReasonNoFreeAddress:
			insertEach(keys, onAddresses, names)
		case v1alpha1.ReasonConflict:
			insertEach(keys, onConflict, names)
		case v1alpha1.ReasonQuotaExceeded:
			keys.Insert(onQuota(c.Namespace))
		}
	}

	return keys.UnsortedList()
}

// insertEach inserts the keys for these networks or pools.
func insertEach(keys sets.Set[string], key func(string) string, networksOrPools []string) {
	for _, name := range networksOrPools {
		keys.Insert(key(name))
	}
}
