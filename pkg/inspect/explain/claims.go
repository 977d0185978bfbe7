// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// claimed returns the interfaces of a claim: one for each of its Functions, or one for the
// Functions that it waits for.
func (f *facts) claimed(c *podClaim) []Interface {
	if c.claim == nil {
		return []Interface{
			{Claim: c.inPod, Stages: []Stage{{Name: Requested, Status: Waiting, Text: c.reason}}},
		}
	}

	requested := Stage{Name: Requested, Status: Done, Time: c.claim.CreationTimestamp.Time}
	if c.claim.Status.Allocation == nil {
		return []Interface{{Claim: c.claim.Name, Stages: []Stage{requested, f.notAllocated()}}}
	}

	devices, err := claim.Devices(c.claim)
	if err != nil {
		return []Interface{
			{Claim: c.claim.Name,
				Stages: []Stage{requested, {Name: Allocated, Status: Failed, Text: err.Error()}}},
		}
	}

	var out []Interface
	for _, device := range devices {
		if device.Admin {
			out = append(out, f.observedFunction(c.claim.Name, device, requested))
			continue
		}

		i := Interface{Claim: c.claim.Name, Request: device.Request, Pool: device.ID.DevicePool}
		what := "Function " + device.Function.String()
		if device.Share != "" {
			what = "a port of PF " + string(device.ID.PF)
		}

		// Otherwise the agent has not chosen a VF for the share yet.
		if device.Function != (function.ID{}) {
			i.Function = device.Function.String()
		}

		port := f.portOf(func(p *v1alpha1.XPUPort) bool {
			return p.Spec.Claim.UID == c.claim.UID &&
				claim.FunctionOf(p.Spec.Function) == device.Function
		})

		f.addPort(&i, port)
		attachment := f.attachment(i.Function, func(a *nodestate.Attachment) bool {
			return a.Claim.UID == string(c.claim.UID)
		})
		status := deviceStatusOf(c.claim, device)
		i.addHost(attachment, status)

		allocated := Stage{
			Name: Allocated, Status: Done,
			Text: fmt.Sprintf("%s of pool %s on node %s", what, i.Pool, device.ID.Node),
		}

		if at := c.claim.Status.Allocation.AllocationTimestamp; at != nil {
			allocated.Time = at.Time
		}

		provisioned := f.provisioned(&i, port, f.joins(device), status)
		i.Stages = []Stage{requested, allocated, f.bound(), provisioned}
		if device.BeforeBind {
			i.Stages = []Stage{requested, allocated, provisioned, f.bound()}
		}

		if device.ConfigErr != nil {
			i.Stages = append(i.Stages,
				Stage{Name: Prepared, Status: Failed, Text: device.ConfigErr.Error()})
			out = append(out, i)
			continue
		}

		i.Stages = append(i.Stages, f.prepared(attachment, status), f.attached(attachment, status))
		i.Stages = append(i.Stages, f.endStages(attachment)...)
		out = append(out, i)
	}

	return out
}

// observedFunction returns the interface for a Function with admin access.
func (f *facts) observedFunction(claim string, device claim.Device, requested Stage) Interface {
	return Interface{
		Claim: claim, Request: device.Request, Pool: device.ID.DevicePool,
		Function: device.Function.String(),
		Stages: append([]Stage{
			requested, {
				Name: Allocated, Status: Done,
				Text: "adminAccess: the pod sees the Function, and takes nothing",
			}, f.bound(),
		}, f.endStages(nil)...),
	}
}

// joins returns the networks that a device is to join.
func (f *facts) joins(device claim.Device) []string {
	var spec v1alpha1.DevicePoolSpec
	if p := f.pools[device.ID.DevicePool]; p != nil {
		spec = p.Spec
	}
	return device.NetworkNames(spec)
}

// deviceStatusOf returns the entry for a device in the claim's status, or nil.
func deviceStatusOf(
	c *resourceapi.ResourceClaim, device claim.Device,
) *resourceapi.AllocatedDeviceStatus {
	i := slices.IndexFunc(c.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		return d.Driver == v1alpha1.GroupName && d.Pool == device.Pool && d.Device == device.Name
	})
	if i < 0 {
		return nil
	}
	return &c.Status.Devices[i]
}

func (f *facts) portOf(is func(*v1alpha1.XPUPort) bool) *v1alpha1.XPUPort {
	for i := range f.ports {
		if is(&f.ports[i]) {
			return &f.ports[i]
		}
	}
	return nil
}
