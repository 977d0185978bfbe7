// SPDX-License-Identifier: Apache-2.0

// Package claimtest makes ResourceClaims for tests, in the state in which the scheduler leaves
// them.
package claimtest

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Option changes a claim.
type Option func(*resourceapi.ResourceClaim)

// Allocated returns a claim in namespace "default" with an allocation that has only what the
// options add. Its UID is its name and "-uid".
func Allocated(name string, options ...Option) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID(name + "-uid"),
		},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}

	for _, option := range options {
		option(c)
	}
	return c
}

// Result allocates a device of this driver to a request, or to a subrequest "main/sub".
func Result(request, pool, device string) Option {
	return func(c *resourceapi.ResourceClaim) {
		devices := &c.Status.Allocation.Devices
		devices.Results = append(devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: request, Driver: v1alpha1.GroupName, Pool: pool, Device: device,
		})
	}
}

// ReservedFor reserves the claim for a pod, whose UID is its name and "-uid".
func ReservedFor(pod string) Option {
	return func(c *resourceapi.ResourceClaim) {
		c.Status.ReservedFor = append(c.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{
				Resource: "pods", Name: pod, UID: types.UID(pod + "-uid"),
			})
	}
}

// FromClass adds an InterfaceConfig of the DeviceClass for the requests, or for all requests if
// none is given. fields is JSON without braces, such as `"mtu": 9000`.
func FromClass(fields string, requests ...string) Option {
	return Config(resourceapi.AllocationConfigSourceClass, interfaceConfig(fields), requests...)
}

// FromClaim is like [FromClass], for an InterfaceConfig of the claim.
func FromClaim(fields string, requests ...string) Option {
	return Config(resourceapi.AllocationConfigSourceClaim, interfaceConfig(fields), requests...)
}

// Config adds opaque parameters of this driver.
func Config(
	source resourceapi.AllocationConfigSource, parameters string, requests ...string,
) Option {
	return func(c *resourceapi.ResourceClaim) {
		devices := &c.Status.Allocation.Devices
		devices.Config = append(devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: source, Requests: requests,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver:     v1alpha1.GroupName,
				Parameters: runtime.RawExtension{Raw: []byte(parameters)},
			}},
		})
	}
}

func interfaceConfig(fields string) string {
	if fields != "" {
		fields = ", " + fields
	}
	return fmt.Sprintf(`{"apiVersion": %q, "kind": "InterfaceConfig"%s}`,
		v1alpha1.SchemeGroupVersion, fields)
}
