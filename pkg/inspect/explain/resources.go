// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// extended returns the interfaces for extended resources of the device plugin. Their Functions are
// known from the agent and the XPUPorts.
func (f *facts) extended() []Interface {
	var out []Interface
	for resource, wanted := range f.resources() {
		var found []Interface
		if f.state != nil {
			for _, known := range f.state.Functions {
				if a := known.Attachment; a != nil && a.Resource == resource &&
					a.Pod.UID == string(f.pod.UID) {
					found = append(found,
						f.allocatedResource(resource, known.ID.String(), known.Pool, a))
				}
			}
		}

		for len(found) < int(wanted.count) {
			found = append(found, f.pendingResource(resource, wanted.offered))
		}

		out = append(out, found...)
	}

	slices.SortFunc(out, func(a, b Interface) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Function, b.Function))
	})

	return out
}

// wantedResource is an extended resource that the pod requests.
type wantedResource struct {
	count int64 // of Functions
	// offered is whether a DevicePool offers the resource. It is set if this is not known.
	offered bool
}

// resources returns the extended resources of this driver that the pod requests. These are the ones
// of DevicePools and of DeviceClasses, others with the project's prefix, and all that the agent gave
// the pod. A resource for which the scheduler has made a claim is not among them.
func (f *facts) resources() map[string]wantedResource {
	offered := f.classResources.Clone()
	for _, p := range f.pools {
		if p.Spec.Publish == v1alpha1.PublishDevicePlugin {
			spec := ptr.Deref(p.Spec.DevicePlugin, v1alpha1.DevicePluginSpec{})
			offered.Insert(cmp.Or(spec.ResourcePrefix, v1alpha1.GroupName) + "/" +
				cmp.Or(spec.ResourceName, p.Name))
		}
	}

	given, claimed := f.givenResources(), f.claimedResources()
	wanted := map[string]wantedResource{}
	for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
		for resource, n := range c.Resources.Limits {
			name := string(resource)
			prefix, _, _ := strings.Cut(name, "/")
			isOurs := prefix == v1alpha1.GroupName || offered.Has(name) || given.Has(name)
			if !isOurs || claimed.Has(name) {
				continue
			}
			// Pools of a file of the agent are not known here, but a pod that has a node has got
			// what it asks for.
			known := offered.Has(name) || f.unseen.HasAny(poolKind, classKind) ||
				f.pod.Spec.NodeName != ""
			wanted[name] = wantedResource{wanted[name].count + n.Value(), known}
		}
	}

	return wanted
}

// claimedResources returns the resources for which the scheduler has made a claim.
func (f *facts) claimedResources() sets.Set[string] {
	claimed := sets.New[string]()
	if made := f.pod.Status.ExtendedResourceClaimStatus; made != nil {
		for _, mapping := range made.RequestMappings {
			claimed.Insert(mapping.ResourceName)
		}
	}
	return claimed
}

// unexplained returns the extended resources of the pod that may be this driver's, if it is not
// known which ones are.
func (f *facts) unexplained() (names []string) {
	if !f.unseen.Has(poolKind) || f.state != nil {
		return nil
	}
	wanted := f.resources()
	for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
		for resource := range c.Resources.Limits {
			prefix, _, isExtended := strings.Cut(string(resource), "/")
			_, isOurs := wanted[string(resource)]
			if isExtended && !isOurs && !strings.HasSuffix(prefix, "kubernetes.io") {
				names = append(names, string(resource))
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// givenResources returns the resources of the Functions that the agent gave the pod.
func (f *facts) givenResources() sets.Set[string] {
	given := sets.New[string]()
	if f.state == nil {
		return given
	}
	for _, known := range f.state.Functions {
		if a := known.Attachment; a != nil && a.Resource != "" && a.Pod.UID == string(f.pod.UID) {
			given.Insert(a.Resource)
		}
	}
	return given
}

func (f *facts) allocatedResource(
	resource, function, pool string, a *nodestate.Attachment,
) Interface {
	i := Interface{Resource: resource, Function: function, Pool: pool}
	port := f.portOf(func(p *v1alpha1.XPUPort) bool {
		return claim.FunctionOf(p.Spec.Function).String() == function
	})
	f.addPort(&i, port)
	i.Network = cmp.Or(i.Network, a.Network)
	i.addHost(a, nil)

	var joins []string
	if i.Network != "" {
		joins = []string{i.Network}
	}

	allocated := Stage{
		Name: Allocated, Status: Done, Time: a.ReservedAt,
		Text: fmt.Sprintf("Function %s by the kubelet", function),
	}

	i.Stages = []Stage{
		{Name: Requested, Status: Done, Time: f.pod.CreationTimestamp.Time}, f.bound(), allocated,
		f.provisionedResource(&i, port, joins, a),
		f.attached(a, nil),
	}

	i.Stages = append(i.Stages, f.endStages(a)...)
	return i
}

// provisionedResource is provisioned for a Function whose attachment is known. In direct mode there
// are no XPUPorts, and the agent attaches a Function once the OPI agent serves its port.
func (f *facts) provisionedResource(
	i *Interface, port *v1alpha1.XPUPort, joins []string, a *nodestate.Attachment,
) Stage {
	if port == nil && len(joins) > 0 && f.absent.Has(portKind) && a.State == "Attached" {
		return Stage{Name: Provisioned, Status: Done, Time: a.AttachedAt,
			Text: "network " + i.Network + ", by xpu-agent itself"}
	}
	if len(joins) == 0 {
		return Stage{Name: Provisioned, Status: Skipped, Text: "it joins no network"}
	}
	return f.provisioned(i, port, joins, nil)
}

func (f *facts) pendingResource(resource string, offered bool) Interface {
	i := Interface{
		Resource: resource,
		Stages:   []Stage{{Name: Requested, Status: Done, Time: f.pod.CreationTimestamp.Time}},
	}

	switch {
	case f.hasEnded():
		i.Stages = append(i.Stages, f.endStages(nil)...)
	case !offered:
		i.Stages = []Stage{{Name: Requested, Status: Failed,
			Text: "no DevicePool and no DeviceClass offers this resource: correct its name, or make a " +
				"DevicePool with publish: DevicePlugin"}}
	case f.pod.Spec.NodeName == "":
		i.Stages = append(i.Stages, f.notAllocated())
	case f.state == nil:
		i.Stages = append(i.Stages, f.bound(),
			Stage{Name: Allocated, Status: Unknown,
				Text: "only the kubelet and xpu-agent know the Function"})
	default:
		wait := Stage{Name: Allocated, Status: Waiting, Text: "the kubelet has given the pod no " +
			"Function of the resource, or no CNI plugin has asked for it yet"}
		failed := []string{"UnexpectedAdmissionError", "FailedCreatePodSandBox"}
		if f.pod.Status.Phase == corev1.PodRunning {
			failed = failed[:1] // its sandbox is there by now
			wait.Text = "the pod runs, and no network of its annotation k8s.v1.cni.cncf.io/networks has " +
				"taken the Function: name a network of the resource for each Function, unless a program " +
				"uses it without a network"
		}
		if e := f.warning(failed...); e != nil {
			wait.Status, wait.Text = Failed, plain(e.Message)
		}
		i.Stages = append(i.Stages, f.bound(), wait)
	}

	return i
}
