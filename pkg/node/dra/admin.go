// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// prepareAdminAccess prepares the devices with adminAccess, and returns the other devices in
// others. Containers get the attributes of such devices in the device metadata file, and nothing
// else. The journal records that the claim has adminAccess only, because the kubelet lists these
// devices like devices that a pod has.
func (d *Driver) prepareAdminAccess(
	c *resourceapi.ResourceClaim, all []claim.Device,
) (prepared []kubeletplugin.Device, others []claim.Device, _ error) {
	access := journal.AdminAccess{Namespace: c.Namespace, Name: c.Name}
	for _, device := range all {
		if !device.Admin {
			others = append(others, device)
			continue
		}

		access.Functions = append(access.Functions, device.Function)
		attributes, err := d.adminAttributes(device)
		if err != nil {
			return nil, nil, fmt.Errorf("claim %s/%s, request %s, Function %s: %w", c.Namespace,
				c.Name, device.Request, device.Function, err)
		}

		prepared = append(prepared, kubeletplugin.Device{
			Requests: []string{device.Request}, PoolName: device.Pool, DeviceName: device.Name,
			Metadata: &kubeletplugin.DeviceMetadata{Attributes: attributes},
		})
	}

	if len(prepared) == 0 {
		return nil, others, nil
	}
	if err := d.Journal.PutAdminAccess(c.UID, access); err != nil {
		return nil, nil, err
	}

	return prepared, others, nil
}

// adminAttributes returns what a pod with adminAccess sees of a Function: its attributes in the
// ResourceSlice, and two counters. They say how many Functions of the DevicePool the PF has, and
// how many of these are in use.
func (d *Driver) adminAttributes(
	device claim.Device,
) (map[string]resourceapi.DeviceAttribute, error) {
	pools, _ := d.Pools()
	for _, p := range pools {
		functions := p.ByPF()[device.ID.PF]
		if p.Name != device.ID.DevicePool || len(functions) == 0 {
			continue
		}

		f, offered := devicemodel.Find(p, device.Name)
		if !offered {
			break
		}

		out := map[string]resourceapi.DeviceAttribute{}
		for name, attribute := range devicemodel.Attributes(p, f) {
			out[string(name)] = attribute
		}

		var used int64
		for _, other := range functions {
			if _, has := d.Journal.Get(other.ID); has {
				used++
			}
		}

		out["adminAccess"] = resourceapi.DeviceAttribute{BoolValue: new(true)}
		out["functions"] = resourceapi.DeviceAttribute{IntValue: new(int64(len(functions)))}
		out["functionsInUse"] = resourceapi.DeviceAttribute{IntValue: &used}

		return out, nil
	}

	return nil, errGone
}

// checkExclusive returns an error if a claim cannot have a device although the scheduler allocated
// it. This happens only in clusters without a feature gate: their API server drops the fields that
// would prevent this allocation.
func (d *Driver) checkExclusive(device claim.Device) error {
	pf := function.ID{Address: device.ID.PF}
	if device.Function != pf {
		if a, has := d.Journal.Get(pf); has && device.Share == "" {
			return fmt.Errorf("pod %s/%s has its PF %s as a whole", a.Pod.Namespace, a.Pod.Name, pf)
		}
		return nil
	}

	if p, has := d.DevicePool(device.ID.DevicePool); has && devicemodel.Shared(p) {
		return fmt.Errorf("DevicePool %s has claims share the PF, but this cluster allocates it "+
			"as a whole: feature gate "+
			"DRAConsumableCapacity is off; turn it on, or use another model", device.ID.DevicePool)
	}

	for _, a := range d.Journal.All() {
		if a.PF == pf.Address && a.Function != pf {
			return fmt.Errorf("pod %s/%s has its VF or SF %s, and this cluster allocates the PF "+
				"all the same: feature gate "+
				"DRAPartitionableDevices is off; turn it on, or use another model", a.Pod.Namespace,
				a.Pod.Name, a.Function)
		}
	}

	return nil
}
