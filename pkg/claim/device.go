// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Device is a Function that is allocated to a claim.
type Device struct {
	// Request is the request that the Function satisfies, or "request/subrequest" for a prioritized
	// list.
	Request string
	// Pool and Name identify the device in ResourceSlices. ID is the parsed Pool. Function is the
	// parsed Name, unless Share is set.
	Pool, Name string
	ID         PoolID
	Function   function.ID
	// Share identifies the claim's part of a PF that claims share (model: Ports); "" for a whole
	// Function. Function is then the VF that the agent chose, or the zero value before it chose
	// one.
	Share types.UID
	// Bandwidth is the claim's part of a shared PF's bandwidth, in Mbit/s; 0 if the PF has no such
	// capacity.
	Bandwidth int
	// Admin is set if the pod only observes the Function, which another pod may use (KEP-5018). The
	// pod gets no interface and no Port, and Config is empty.
	Admin bool
	// BeforeBind is set if the scheduler binds the pod only after the xPU serves the Port.
	BeforeBind bool
	// Config is the configuration of the interface, merged from class and claim. It is invalid if
	// ConfigErr is set.
	Config v1alpha1.InterfaceConfig
	// Privileged lists the privileged fields that the claim itself sets, also those that its class
	// sets too; see [Device.Allowed].
	Privileged []v1alpha1.PrivilegedField
	// Networks are the tagged networks that the interface joins, derived from Config.
	Networks []Network
	// Interface is derived from Config, without the Port's addresses and MAC. Its Name may be
	// empty.
	Interface function.Interface
	// ConfigErr describes errors in the opaque parameters and names the fields.
	ConfigErr error
}

// Network is a network whose frames have a VLAN tag at the Function.
type Network struct {
	Name          string
	InterfaceName string         // of the VLAN interface in the pod; "" for none
	Addresses     []netip.Prefix // none: one of each of the network's subnets is assigned
}

// NetworkNames returns the names of the networks that the device joins. If its configuration names
// no network, the device joins the network of its DevicePool, if the pool has one.
func (d Device) NetworkNames(pool v1alpha1.DevicePoolSpec) []string {
	var names []string
	for _, network := range d.Config.Networks {
		names = append(names, network.Name)
	}
	if name := cmp.Or(d.Config.Network, pool.Network); len(names) == 0 && name != "" {
		return []string{name}
	}
	return names
}

// Devices returns the Functions of this driver that are allocated to the claim, in the order of the
// allocation. It returns an error if the allocation itself is invalid. Errors in the opaque
// parameters of a request are in Device.ConfigErr.
func Devices(claim *resourceapi.ResourceClaim) ([]Device, error) {
	if claim.Status.Allocation == nil {
		return nil, nil
	}

	var devices []Device
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != v1alpha1.GroupName {
			continue
		}

		device, err := newDevice(claim, result)
		if err != nil {
			return nil, fmt.Errorf("claim %s/%s, request %q: %w", claim.Namespace, claim.Name,
				result.Request, err)
		}
		devices = append(devices, device)
	}

	checkBonds(devices)
	return devices, nil
}

func newDevice(
	claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult,
) (Device, error) {
	pool, err := ParsePoolID(result.Pool)
	if err != nil {
		return Device{}, err
	}

	function, err := function.ParseDeviceName(result.Device)
	if err != nil {
		return Device{}, err
	}

	device := Device{
		Request:    result.Request,
		Pool:       result.Pool,
		Name:       result.Device,
		ID:         pool,
		Function:   function,
		BeforeBind: slices.Contains(result.BindingConditions, v1alpha1.ConditionProvisioned),
	}

	if result.ShareID != nil {
		device.Share = *result.ShareID
		device.Function = chosenFunction(claim, result)
		device.Bandwidth = bandwidth(result)
	}

	if device.Admin = ptr.Deref(result.AdminAccess, false); device.Admin {
		return device, nil
	}

	device.Config, device.Privileged, device.ConfigErr = config(
		claim.Status.Allocation.Devices.Config, result,
	)
	if device.ConfigErr == nil {
		device.Interface, device.Networks, device.ConfigErr = settings(&device.Config)
	}

	if device.ConfigErr == nil && device.Bandwidth > 0 {
		device.Interface.VF, device.ConfigErr = limitRate(device.Interface.VF, device.Bandwidth)
	}

	return device, nil
}

// config merges the opaque parameters that apply to a result: first the class's, then the claim's.
// It also returns the privileged fields that the claim sets.
func config(
	all []resourceapi.DeviceAllocationConfiguration,
	result resourceapi.DeviceRequestAllocationResult,
) (merged v1alpha1.InterfaceConfig, ofClaim []v1alpha1.PrivilegedField, _ error) {
	applicable := resourceclaim.ConfigForResult(all, result)
	for _, source := range []struct {
		kind resourceapi.AllocationConfigSource
		name string
	}{{resourceapi.AllocationConfigSourceClass, "DeviceClass"},
		{resourceapi.AllocationConfigSourceClaim, "claim"}} {
		for _, c := range applicable {
			if c.Source != source.kind || c.Opaque.Driver != v1alpha1.GroupName {
				continue
			}

			one, err := decode(c.Opaque.Parameters.Raw)
			if err != nil {
				return v1alpha1.InterfaceConfig{}, nil, fmt.Errorf("parameters in the %s: %w",
					source.name, err)
			}

			if source.kind == resourceapi.AllocationConfigSourceClaim {
				ofClaim = append(ofClaim, PrivilegedFields(one)...)
			}

			merged = merge(merged, one)
		}
	}

	return merged, ofClaim, nil
}
