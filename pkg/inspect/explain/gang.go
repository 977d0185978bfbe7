// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// gang is what the pod's PodGroup waits for.
type gang struct {
	name string
	// claims is how many the pods of the group have that may have devices of this driver. waiting is
	// how many of these are not allocated, or have a Port that is not up.
	claims, waiting int
}

// podKind is the plural of pods, for messages.
const podKind kind = "pods"

// readGang reads what the PodGroup of a pod waits for that is not bound.
func (f *facts) readGang(ctx context.Context, s Sources) error {
	if f.pod.Spec.SchedulingGroup == nil || f.pod.Spec.NodeName != "" {
		return nil
	}

	var pods corev1.PodList
	var claims resourceapi.ResourceClaimList
	var ports v1alpha1.XPUPortList
	for what, list := range map[kind]client.ObjectList{
		podKind: &pods, claimKind: &claims, portKind: &ports,
	} {
		if f.unseen.Has(what) {
			return nil
		}
		err := f.unread(what, s.Reader.List(ctx, list, client.InNamespace(f.pod.Namespace)))
		if err != nil || f.unseen.Has(what) {
			return err
		}
	}

	f.gang = &gang{name: ptr.Deref(f.pod.Spec.SchedulingGroup.PodGroupName, "")}
	names := claimsOfGang(pods.Items, f.gang.name)
	up := upPorts(ports.Items)
	for i := range claims.Items {
		c := &claims.Items[i]
		if !names.Has(c.Name) {
			continue
		}
		if ours, waits := f.waitsFor(c, up); ours {
			f.gang.claims++
			if waits {
				f.gang.waiting++
			}
		}
	}
	return nil
}

// claimsOfGang returns the names of the claims of the pods of a group that have not ended.
func claimsOfGang(pods []corev1.Pod, group string) sets.Set[string] {
	names := sets.New[string]()
	for i := range pods {
		p := &pods[i]
		of := p.Spec.SchedulingGroup
		if of == nil || ptr.Deref(of.PodGroupName, "") != group || p.DeletionTimestamp != nil ||
			p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
			continue
		}
		for n := range p.Spec.ResourceClaims {
			name, _, err := resourceclaim.Name(p, &p.Spec.ResourceClaims[n])
			if err == nil && name != nil {
				names.Insert(*name)
			}
		}
		if made := p.Status.ExtendedResourceClaimStatus; made != nil {
			names.Insert(made.ResourceClaimName)
		}
	}
	return names
}

// upPorts returns the claims of Ports that are or were up, each with its Function.
func upPorts(ports []v1alpha1.XPUPort) sets.Set[string] {
	up := sets.New[string]()
	for _, p := range ports {
		if p.Status.BridgePort != "" {
			up.Insert(upKey(p.Spec.Claim.UID, claim.FunctionOf(p.Spec.Function).String()))
		}
	}
	return up
}

func upKey(of types.UID, function string) string { return string(of) + " " + function }

// waitsFor reports whether a claim has devices for which the scheduler waits, or may get some, and
// whether it still waits for them.
func (f *facts) waitsFor(c *resourceapi.ResourceClaim, up sets.Set[string]) (ours, waits bool) {
	if c.Status.Allocation == nil {
		ours = f.asksForOurs(c)
		return ours, ours
	}
	devices, err := claim.Devices(c)
	if err != nil {
		return true, true
	}

	for _, d := range devices {
		if d.BeforeBind && !d.Admin {
			ours = true
			waits = waits || !f.needsNoPort(d) && !up.Has(upKey(c.UID, d.Function.String()))
		}
	}
	return ours, waits
}

// asksForOurs reports whether a claim can be given devices of this driver.
func (f *facts) asksForOurs(c *resourceapi.ResourceClaim) bool {
	if f.unseen.Has(classKind) {
		return true
	}
	return slices.ContainsFunc(c.Spec.Devices.Requests, func(r resourceapi.DeviceRequest) bool {
		return r.Exactly != nil && f.ourClasses.Has(r.Exactly.DeviceClassName) ||
			r.Exactly != nil && slices.ContainsFunc(r.Exactly.Selectors, isOurs) ||
			slices.ContainsFunc(r.FirstAvailable, func(s resourceapi.DeviceSubRequest) bool {
				return f.ourClasses.Has(s.DeviceClassName) || slices.ContainsFunc(s.Selectors, isOurs)
			})
	})
}

// isOurs reports whether a selector is about devices of this driver.
func isOurs(s resourceapi.DeviceSelector) bool {
	return s.CEL != nil && strings.Contains(s.CEL.Expression, v1alpha1.GroupName)
}

// needsNoPort reports whether a device joins no network, and so has no Port.
func (f *facts) needsNoPort(d claim.Device) bool {
	return d.ConfigErr == nil && f.pools[d.ID.DevicePool] != nil && len(f.joins(d)) == 0
}

// withGang changes the stage of a Port that is up or not needed, if the pod waits for others of its
// gang, or is given back with them.
func (f *facts) withGang(
	s Stage, device claim.Device, status *resourceapi.AllocatedDeviceStatus,
) Stage {
	provisioned := conditionOf(status, v1alpha1.ConditionProvisioned)
	failed := conditionOf(status, v1alpha1.ConditionProvisionFailed)
	text := s.Text
	if s.Status == Done {
		text += " is up"
	}

	switch {
	case !device.BeforeBind || s.Status != Done && s.Status != Skipped:
	case failed != nil && failed.Status == metav1.ConditionTrue:
		s.Status, s.Text = Failed, fmt.Sprintf("%s: %s", failed.Reason, failed.Message)
	case f.gang != nil && f.gang.waiting > 0 &&
		(provisioned == nil || provisioned.Reason == v1alpha1.ReasonGangIncomplete):
		s.Status, s.Text = Waiting, fmt.Sprintf("%s; waits for %d of %d claims of gang %s",
			text, f.gang.waiting, f.gang.claims, f.gang.name)
	case provisioned != nil && provisioned.Reason == v1alpha1.ReasonGangIncomplete:
		s.Status, s.Text = Waiting, fmt.Sprintf("%s: %s", provisioned.Reason, provisioned.Message)
	}
	return s
}
