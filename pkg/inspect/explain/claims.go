// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// claimed returns the interfaces of a claim: one for each of its Functions, or one for the
// Functions that it waits for.
func (f *facts) claimed(c *podClaim) []Interface {
	if c.unread {
		return []Interface{{Claim: c.inPod,
			Stages: []Stage{{Name: Requested, Status: Unknown, Text: "the claim cannot be read"}}}}
	}
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
		} else {
			out = append(out, f.claimedFunction(c.claim, device, requested))
		}
	}

	if len(out) > 0 {
		out[0].Differences = append(out[0].Differences, ignoredParameters(c.claim)...)
	}
	return out
}

// claimedFunction returns the interface for a Function, or for the share of a PF, that a claim has.
func (f *facts) claimedFunction(
	c *resourceapi.ResourceClaim, device claim.Device, requested Stage,
) Interface {
	i := Interface{Claim: c.Name, Request: device.Request, Pool: device.ID.DevicePool}
	if device.Function != (function.ID{}) { // else the agent has not chosen a VF for the share yet
		i.Function = device.Function.String()
	}

	port := f.portOf(func(p *v1alpha1.XPUPort) bool {
		return p.Spec.Claim.UID == c.UID &&
			claim.FunctionOf(p.Spec.Function) == device.Function
	})
	attachment := f.attachment(i.Function, func(a *nodestate.Attachment) bool {
		return a.Claim.UID == string(c.UID)
	})
	status := deviceStatusOf(c, device)
	owner := f.otherOwner(c, attachment)
	if owner != "" {
		attachment, status = nil, nil
	}

	f.addPort(&i, port)
	i.addHost(attachment, status)
	i.compareRequest(device)

	provisioned := f.withGang(f.provisioned(&i, port, f.joins(device), status), device, status)
	i.Stages = []Stage{requested, allocatedStage(c, device), f.bound(), provisioned}
	if device.BeforeBind {
		i.Stages = []Stage{requested, allocatedStage(c, device), provisioned, f.bound()}
	}

	switch {
	case device.ConfigErr != nil:
		i.Stages = append(i.Stages,
			Stage{Name: Prepared, Status: Failed, Text: device.ConfigErr.Error()})
		return i
	case owner != "":
		i.Stages = append(i.Stages, Stage{Name: Prepared, Status: Failed, Text: owner +
			" has the interface of this claim, and an interface can be in one pod only; give each " +
			"pod its own claim, by a ResourceClaimTemplate"})
	case attachment != nil || !f.hasEnded():
		i.Stages = append(i.Stages, f.prepared(attachment, status), f.attached(attachment, status))
	}

	i.Stages = append(i.Stages, f.endStages(attachment)...)
	return i
}

// allocatedStage says what the scheduler has chosen.
func allocatedStage(c *resourceapi.ResourceClaim, device claim.Device) Stage {
	what := "Function " + device.Function.String()
	if device.Share != "" {
		what = "a port of PF " + string(device.ID.PF)
	}

	s := Stage{Name: Allocated, Status: Done, Text: fmt.Sprintf("%s of pool %s on node %s", what,
		device.ID.DevicePool, device.ID.Node)}
	if at := c.Status.Allocation.AllocationTimestamp; at != nil {
		s.Time = at.Time
	}
	return s
}

// otherOwner returns the pod that has the interface of the claim, if this is not the pod that is
// explained, and "" otherwise.
func (f *facts) otherOwner(c *resourceapi.ResourceClaim, a *nodestate.Attachment) string {
	if a != nil {
		if a.Pod.UID == "" || a.Pod.UID == string(f.pod.UID) {
			return ""
		}
		return fmt.Sprintf("pod %s/%s", a.Pod.Namespace, a.Pod.Name)
	}

	isThis := func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == f.pod.UID }
	consumers := c.Status.ReservedFor
	if len(consumers) == 0 || slices.ContainsFunc(consumers, isThis) {
		return ""
	}
	return fmt.Sprintf("%s %s/%s", strings.TrimSuffix(consumers[0].Resource, "s"), c.Namespace,
		consumers[0].Name)
}

// compareRequest finds what the interface was asked to have, and does not have.
func (i *Interface) compareRequest(device claim.Device) {
	asked := int32(device.Interface.MTU)
	if i.Host == nil || i.Host.MTU == 0 || asked <= i.Host.MTU {
		return
	}

	because := "the driver sets no larger one"
	if i.Card != nil && i.Card.MTU != 0 && asked > i.Card.MTU {
		because = "network " + i.Network + " carries no more"
	}
	i.Differences = append(i.Differences, fmt.Sprintf("its configuration asks for mtu %d, and it has "+
		"%d, because %s", asked, i.Host.MTU, because))
}

// ignoredParameters returns a sentence for each configuration of the claim that is for a driver of
// which the claim has no device. It returns none for a claim with alternatives, whose configurations
// may be for those that were not taken.
func ignoredParameters(c *resourceapi.ResourceClaim) (sentences []string) {
	hasAlternatives := func(r resourceapi.DeviceRequest) bool { return len(r.FirstAvailable) > 0 }
	if slices.ContainsFunc(c.Spec.Devices.Requests, hasAlternatives) {
		return nil
	}

	for n, config := range c.Spec.Devices.Config {
		if config.Opaque == nil {
			continue
		}

		driver := config.Opaque.Driver
		isOf := func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Driver == driver }
		if !slices.ContainsFunc(c.Status.Allocation.Devices.Results, isOf) {
			sentences = append(sentences, fmt.Sprintf("config[%d] of the claim is ignored: it is for "+
				"driver %s, and no device of the claim is of that driver; ours is %s", n, driver,
				v1alpha1.GroupName))
		}
	}
	return sentences
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
