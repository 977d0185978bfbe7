// SPDX-License-Identifier: Apache-2.0

// Package kubecache bounds what the caches of watched objects keep. Users write most objects that
// agent, controller and broker watch, and the API server lets them put 256 KiB of annotations, and
// still more labels and owners, into each.
package kubecache

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Trim is the transform of all caches. It leaves out managed fields and the annotations of others.
// Whoever writes an object back that was read from such a cache does so by a patch, or by an update
// of its status, so that the API server keeps what was left out.
func Trim(o any) (any, error) {
	object, err := meta.Accessor(o)
	if err != nil {
		return nil, fmt.Errorf("trim a watched object: %w", err)
	}

	object.SetManagedFields(nil)

	own := maps.Clone(object.GetAnnotations())
	maps.DeleteFunc(own, func(key, _ string) bool {
		return !strings.HasPrefix(key, v1alpha1.GroupName+"/")
	})

	if len(own) == 0 {
		own = nil
	}

	object.SetAnnotations(own)
	return o, nil
}

// TrimClaim is [Trim] for ResourceClaims. Of a claim with devices of this driver it leaves out what
// was asked for, labels and annotations: the allocation has all that matters. Of all other claims
// it leaves no more than which claim it is, and whether it is in use or about to end.
func TrimClaim(o any) (any, error) {
	c, ok := o.(*resourceapi.ResourceClaim)
	if !ok {
		return Trim(o)
	}

	c.ManagedFields, c.Annotations, c.Labels, c.Finalizers = nil, nil, nil, nil
	c.OwnerReferences = controllerOnly(c)
	c.Spec = resourceapi.ResourceClaimSpec{}
	if !hasOwnDevices(c) {
		c.Status.Allocation, c.Status.Devices = withoutContents(c.Status.Allocation), nil
		c.Status.ReservedFor = first(c.Status.ReservedFor)
	}

	return c, nil
}

func hasOwnDevices(c *resourceapi.ResourceClaim) bool {
	if c.Status.Allocation == nil {
		return false
	}

	for _, result := range c.Status.Allocation.Devices.Results {
		if result.Driver == v1alpha1.GroupName {
			return true
		}
	}

	return false
}

// controllerOnly is the owner that controls the object. The other owners matter to the garbage
// collector only.
func controllerOnly(o metav1.Object) []metav1.OwnerReference {
	if owner := metav1.GetControllerOf(o); owner != nil {
		return []metav1.OwnerReference{*owner}
	}
	return nil
}

// withoutContents still says that a claim is allocated.
func withoutContents(a *resourceapi.AllocationResult) *resourceapi.AllocationResult {
	if a == nil {
		return nil
	}
	return &resourceapi.AllocationResult{}
}

// first still says that a claim is reserved. A copy lets go of the rest.
func first(
	all []resourceapi.ResourceClaimConsumerReference,
) []resourceapi.ResourceClaimConsumerReference {
	return slices.Clone(all[:min(1, len(all))])
}
