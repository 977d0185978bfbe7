// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/pools"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
)

// Indexes of the cache.
const claimsByDependency = "dependency" // see dependencies

// Keys of claimsByDependency, by the name of what a claim depends on.
func onNode(name string) string    { return "node " + name }
func onPool(name string) string    { return "pool " + name }
func onNetwork(name string) string { return "network " + name }

// any of them
func onAddresses(networkOrPool string) string { return "addresses of " + networkOrPool }

// about certain addresses
func onConflict(networkOrPool string) string { return "conflict in " + networkOrPool }

// dependencies returns what a claim depends on: the nodes of its Functions, and the network that it
// names, or else the DevicePool that names one. A claim that sets privileged fields always depends
// on the DevicePool. A claim that could not get its addresses also depends on the network's
// addresses.
func dependencies(c *resourceapi.ResourceClaim) []string {
	devices, err := claim.Devices(c)
	if err != nil {
		return nil
	}

	keys := sets.New[string]()
	for i := range devices {
		d := &devices[i]
		keys.Insert(onNode(d.ID.Node))
		network := onPool(d.ID.DevicePool)
		if d.Config.Network != "" {
			network = onNetwork(d.Config.Network)
		}

		keys.Insert(network)
		if len(d.Privileged) > 0 {
			keys.Insert(onPool(d.ID.DevicePool)) // which allows them or not
		}

		switch deviceCondition(c, d, v1alpha1.ConditionProvisioned).Reason {
		case v1alpha1.ReasonNoFreeAddress:
			keys.Insert(onAddresses(network))
		case v1alpha1.ReasonConflict:
			keys.Insert(onConflict(network))
		}
	}

	return keys.UnsortedList()
}

// addIndexes adds the indexes of the cache. It leaves out kinds that the role does not read.
func addIndexes(ctx context.Context, indexer client.FieldIndexer, role Role) error {
	err := xpus.AddNodeIndex(ctx, indexer)
	if role != RoleInfra {
		err = errors.Join(err,
			pools.AddIndexes(ctx, indexer),
			reconciling.AddIndex(ctx, indexer, &resourceapi.ResourceClaim{}, claimsByDependency,
				dependencies),
		)
	}
	if role != RoleTenant {
		err = errors.Join(err, xpus.AddIndexes(ctx, indexer), networks.AddIndexes(ctx, indexer))
	}
	return err
}
