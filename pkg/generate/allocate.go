// SPDX-License-Identifier: Apache-2.0

package generate

import (
	"fmt"
	"math"

	"github.com/google/uuid"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	xpuclaim "github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// allocate makes claims for a share of the devices, or of the ports of shared PFs. They are spread
// evenly over hosts and PFs.
func (c *Cluster) allocate(shape Shape, share float64) {
	seen, taken := 0, 0
	for _, slice := range c.Slices {
		for _, device := range slice.Spec.Devices {
			if shape.allocatable != nil && !shape.allocatable(device) {
				continue
			}
			for range ports(device) {
				seen++
				if taken < int(math.Round(share*float64(seen))) {
					taken++
					c.Claims = append(c.Claims, claim(taken, shape.Classes[0].Name, slice, device))
				}
			}
		}
	}
}

// ports returns how many claims can use the device.
func ports(device resourceapi.Device) int64 {
	if capacity, shared := device.Capacity[xpuclaim.CapacityPorts]; shared {
		return capacity.Value.Value()
	}
	return 1
}

// claim returns a claim for the device in the state in which the scheduler leaves it for a running
// pod.
func claim(
	number int, class string, slice *resourceapi.ResourceSlice, device resourceapi.Device,
) *resourceapi.ResourceClaim {
	const request = "device"
	name := fmt.Sprintf("taken-%05d", number)

	result := resourceapi.DeviceRequestAllocationResult{
		Request: request, Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name,
		Device: device.Name,
	}

	if device.AllowMultipleAllocations != nil && *device.AllowMultipleAllocations {
		share := types.UID(identity(name + "/share"))
		result.ShareID, result.ConsumedCapacity = &share, consumed(device)
	}

	return &resourceapi.ResourceClaim{
		TypeMeta: metav1.TypeMeta{
			APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim",
		},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault, Name: name,
			Finalizers: []string{resourceapi.Finalizer},
		},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: request, Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount,
				Count: 1,
			},
		}}}},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{
				Devices: resourceapi.DeviceAllocationResult{
					Results: []resourceapi.DeviceRequestAllocationResult{result},
				},
			},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", Name: name, UID: types.UID(identity(name))},
			},
		},
	}
}

// consumed returns what a claim takes of a device's capacity by default.
func consumed(device resourceapi.Device) map[resourceapi.QualifiedName]resource.Quantity {
	all := map[resourceapi.QualifiedName]resource.Quantity{}
	for name, capacity := range device.Capacity {
		all[name] = capacity.Value
		if capacity.RequestPolicy != nil && capacity.RequestPolicy.Default != nil {
			all[name] = *capacity.RequestPolicy.Default
		}
	}
	return all
}

// identity returns a UUID that depends only on the name.
func identity(name string) string { return uuid.NewSHA1(uuid.NameSpaceOID, []byte(name)).String() }
