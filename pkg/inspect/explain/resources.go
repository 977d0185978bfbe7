// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
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

		for len(found) < int(wanted) {
			found = append(found, f.pendingResource(resource))
		}

		out = append(out, found...)
	}

	slices.SortFunc(out, func(a, b Interface) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Function, b.Function))
	})

	return out
}

// resources returns how many Functions of each DevicePool with a device plugin the pod requests.
func (f *facts) resources() map[string]int64 {
	wanted := map[string]int64{}
	for _, p := range f.pools {
		if p.Spec.Publish != v1alpha1.PublishDevicePlugin {
			continue
		}

		spec := ptr.Deref(p.Spec.DevicePlugin, v1alpha1.DevicePluginSpec{})
		name := cmp.Or(spec.ResourcePrefix, v1alpha1.GroupName) + "/" +
			cmp.Or(spec.ResourceName, p.Name)
		for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
			if n, asks := c.Resources.Limits[corev1.ResourceName(name)]; asks {
				wanted[name] += n.Value()
			}
		}
	}

	return wanted
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
		f.provisioned(&i, port, joins, nil),
		f.attached(a, nil),
	}

	i.Stages = append(i.Stages, f.endStages(a)...)
	return i
}

func (f *facts) pendingResource(resource string) Interface {
	i := Interface{
		Resource: resource,
		Stages:   []Stage{{Name: Requested, Status: Done, Time: f.pod.CreationTimestamp.Time}},
	}

	switch {
	case f.pod.Spec.NodeName == "":
		i.Stages = append(i.Stages, f.notAllocated())
	case f.state == nil:
		i.Stages = append(i.Stages, f.bound(),
			Stage{Name: Allocated, Status: Unknown,
				Text: "only the kubelet and xpu-agent know the Function"})
	default:
		wait := Stage{Name: Allocated, Status: Waiting, Text: "the kubelet has given the pod no " +
			"Function of the resource, or no CNI plugin has asked for it yet"}
		if e := f.warning("UnexpectedAdmissionError", "FailedCreatePodSandBox"); e != nil {
			wait.Status, wait.Text = Failed, e.Message
		}
		i.Stages = append(i.Stages, f.bound(), wait)
	}

	return i
}
