package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// claimed are the interfaces of a claim: one for each Function that it has, or one that stands for those it waits for.
func (f *facts) claimed(c *podClaim) []Interface {
	if c.claim == nil {
		return []Interface{{Claim: c.inPod, Stages: []Stage{{Name: Requested, Status: Waiting, Text: c.why}}}}
	}
	requested := Stage{Name: Requested, Status: Done, Time: c.claim.CreationTimestamp.Time}
	if c.claim.Status.Allocation == nil {
		return []Interface{{Claim: c.claim.Name, Stages: []Stage{requested, f.notAllocated()}}}
	}
	devices, err := claim.Devices(c.claim)
	if err != nil {
		return []Interface{{Claim: c.claim.Name, Stages: []Stage{requested, {Name: Allocated, Status: Failed, Text: err.Error()}}}}
	}
	var out []Interface
	for _, device := range devices {
		if device.Admin {
			out = append(out, f.onlySeen(c.claim.Name, device, requested))
			continue
		}
		i := Interface{Claim: c.claim.Name, Request: device.Request, Pool: device.ID.DevicePool}
		what := "Function " + device.Function.String()
		if device.Share != "" {
			what = "a port of PF " + string(device.ID.PF)
		}
		if device.Function != (function.ID{}) { // else the agent has not chosen a VF for the share yet
			i.Function = device.Function.String()
		}
		port := f.portOf(func(p *v1alpha1.XPUPort) bool {
			return p.Spec.Claim.UID == c.claim.UID && claim.FunctionOf(p.Spec.Function) == device.Function
		})
		f.addPort(&i, port)
		attachment := f.attachment(i.Function, func(a *nodestate.Attachment) bool { return a.Claim.UID == string(c.claim.UID) })
		told := toldOf(c.claim, device)
		i.addHost(attachment, told)
		allocated := Stage{Name: Allocated, Status: Done, Text: fmt.Sprintf("%s of pool %s on node %s", what, i.Pool, device.ID.Node)}
		if at := c.claim.Status.Allocation.AllocationTimestamp; at != nil {
			allocated.Time = at.Time
		}
		provisioned := f.provisioned(&i, port, f.network(device), told)
		i.Stages = []Stage{requested, allocated, f.bound(), provisioned}
		if device.BeforeBind {
			i.Stages = []Stage{requested, allocated, provisioned, f.bound()}
		}
		if device.ConfigErr != nil {
			i.Stages = append(i.Stages, Stage{Name: Prepared, Status: Failed, Text: device.ConfigErr.Error()})
			out = append(out, i)
			continue
		}
		i.Stages = append(i.Stages, f.prepared(attachment, told), f.attached(attachment, told))
		i.Stages = append(i.Stages, f.ending(attachment)...)
		out = append(out, i)
	}
	return out
}

// onlySeen is a Function that the pod only looks at.
func (f *facts) onlySeen(claim string, device claim.Device, requested Stage) Interface {
	return Interface{
		Claim: claim, Request: device.Request, Pool: device.ID.DevicePool, Function: device.Function.String(),
		Stages: append([]Stage{
			requested, {Name: Allocated, Status: Done, Text: "adminAccess: the pod sees the Function, and takes nothing"}, f.bound(),
		}, f.ending(nil)...),
	}
}

// network is the one that a device is to join, "" for none.
func (f *facts) network(device claim.Device) string {
	if device.Config.Network != "" {
		return device.Config.Network
	}
	if p := f.pools[device.ID.DevicePool]; p != nil {
		return p.Spec.Network
	}
	return ""
}

// toldOf is what the claim's status says of a device; nil if it says nothing.
func toldOf(c *resourceapi.ResourceClaim, device claim.Device) *resourceapi.AllocatedDeviceStatus {
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

// extended are the interfaces of extended resources of the device plugin, of which the agent and the XPUPorts know the Functions.
func (f *facts) extended() []Interface {
	var out []Interface
	for resource, wanted := range f.resources() {
		var found []Interface
		if f.state != nil {
			for _, known := range f.state.Functions {
				if a := known.Attachment; a != nil && a.Resource == resource && a.Pod.UID == string(f.pod.UID) {
					found = append(found, f.handedOut(resource, known.ID.String(), known.Pool, a))
				}
			}
		}
		for len(found) < int(wanted) {
			found = append(found, f.notHandedOut(resource))
		}
		out = append(out, found...)
	}
	slices.SortFunc(out, func(a, b Interface) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Function, b.Function))
	})
	return out
}

// resources are how many Functions of DevicePools with a device plugin the pod asks for.
func (f *facts) resources() map[string]int64 {
	wanted := map[string]int64{}
	for _, p := range f.pools {
		if p.Spec.Publish != v1alpha1.PublishDevicePlugin {
			continue
		}
		spec := ptr.Deref(p.Spec.DevicePlugin, v1alpha1.DevicePluginSpec{})
		name := cmp.Or(spec.ResourcePrefix, v1alpha1.GroupName) + "/" + cmp.Or(spec.ResourceName, p.Name)
		for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
			if n, asks := c.Resources.Limits[corev1.ResourceName(name)]; asks {
				wanted[name] += n.Value()
			}
		}
	}
	return wanted
}

func (f *facts) handedOut(resource, function, pool string, a *nodestate.Attachment) Interface {
	i := Interface{Resource: resource, Function: function, Pool: pool}
	port := f.portOf(func(p *v1alpha1.XPUPort) bool { return claim.FunctionOf(p.Spec.Function).String() == function })
	f.addPort(&i, port)
	i.Network = cmp.Or(i.Network, a.Network)
	i.addHost(a, nil)
	allocated := Stage{Name: Allocated, Status: Done, Time: a.ReservedAt, Text: fmt.Sprintf("Function %s by the kubelet", function)}
	i.Stages = []Stage{
		{Name: Requested, Status: Done, Time: f.pod.CreationTimestamp.Time}, f.bound(), allocated, f.provisioned(&i, port, i.Network, nil),
		f.attached(a, nil),
	}
	i.Stages = append(i.Stages, f.ending(a)...)
	return i
}

func (f *facts) notHandedOut(resource string) Interface {
	i := Interface{Resource: resource, Stages: []Stage{{Name: Requested, Status: Done, Time: f.pod.CreationTimestamp.Time}}}
	switch {
	case f.pod.Spec.NodeName == "":
		i.Stages = append(i.Stages, f.notAllocated())
	case f.state == nil:
		i.Stages = append(i.Stages, f.bound(), Stage{Name: Allocated, Status: Unknown, Text: "only the kubelet and xpu-agent know the Function"})
	default:
		wait := Stage{Name: Allocated, Status: Waiting, Text: "the kubelet has given the pod no Function of the resource, or no CNI plugin has asked for it yet"}
		if e := f.warning("UnexpectedAdmissionError", "FailedCreatePodSandBox"); e != nil {
			wait.Status, wait.Text = Failed, e.Message
		}
		i.Stages = append(i.Stages, f.bound(), wait)
	}
	return i
}

// notAllocated says why the scheduler has not chosen a device.
func (f *facts) notAllocated() Stage {
	s := Stage{Name: Allocated, Status: Waiting}
	switch {
	case f.target != "":
		s.Text = fmt.Sprintf("node %s can take the pod: the scheduler has not come to it yet, or waits for something else", f.target)
	case len(f.why) > 0:
		s.Status, s.Text = Failed, f.why[0]
	default:
		if e := f.warning("FailedScheduling"); e != nil {
			s.Status, s.Text = Failed, e.Message
		}
	}
	return s
}

func (f *facts) bound() Stage {
	if f.pod.Spec.NodeName == "" {
		s := Stage{Name: Bound, Status: Waiting, Text: "the scheduler has not put the pod on a node yet"}
		if e := f.warning("FailedScheduling"); e != nil {
			s.Text = e.Message
		}
		return s
	}
	s := Stage{Name: Bound, Status: Done, Text: "node " + f.pod.Spec.NodeName}
	if c := podCondition(f.pod, corev1.PodScheduled); c != nil {
		s.Time = c.LastTransitionTime.Time
	}
	return s
}

// provisioned says whether the xPU serves the Port of a Function that is to join a network.
func (f *facts) provisioned(i *Interface, port *v1alpha1.XPUPort, network string, told *resourceapi.AllocatedDeviceStatus) Stage {
	s := Stage{Name: Provisioned, Status: Waiting}
	switch {
	case port != nil:
		c := v1alpha1.ReadyOf(port.Status.Conditions)
		where := fmt.Sprintf("XPUPort %s/%s at XPU %s", port.Namespace, port.Name, port.Spec.XPU)
		switch {
		case c.Status == metav1.ConditionTrue:
			s.Status, s.Time, s.Text = Done, c.LastTransitionTime.Time, where
		case c.Reason == "":
			s.Text = where + ": xpu-controller has not said anything of it yet: is it running?"
		case v1alpha1.Refused(c.Reason):
			s.Status, s.Text = Failed, fmt.Sprintf("%s: %s: %s", where, c.Reason, c.Message)
		default:
			s.Text = fmt.Sprintf("%s: %s: %s", where, c.Reason, c.Message)
		}
	case network == "":
		s.Status, s.Text = Skipped, "neither the InterfaceConfig nor the DevicePool names a network"
	default:
		i.Network = network
		s.Text = fmt.Sprintf("xpu-controller has not made the XPUPort in network %s yet: is it running?", network)
		if f.networks[network] == nil {
			s.Status, s.Text = Failed, fmt.Sprintf("XPUNetwork %s does not exist: create it, or name another one", network)
		} else if c := conditionOf(told, v1alpha1.ConditionProvisioned); c != nil && c.Status == metav1.ConditionFalse {
			s.Status, s.Text = Failed, fmt.Sprintf("%s: %s", c.Reason, c.Message)
		}
	}
	return s
}

func conditionOf(told *resourceapi.AllocatedDeviceStatus, kind string) *metav1.Condition {
	if told == nil {
		return nil
	}
	return meta.FindStatusCondition(told.Conditions, kind)
}

// prepared says whether the agent has reserved the Function for the claim, as the kubelet asked it to.
func (f *facts) prepared(a *nodestate.Attachment, told *resourceapi.AllocatedDeviceStatus) Stage {
	s := Stage{Name: Prepared, Status: Waiting, Text: "the kubelet has not asked xpu-agent for the claim yet"}
	ready := conditionOf(told, v1alpha1.ConditionReady)
	switch {
	case a != nil:
		s.Status, s.Time, s.Text = Done, a.ReservedAt, ""
	case ready != nil:
		s.Status, s.Text = Done, ""
	case f.pod.Spec.NodeName != "" && f.state == nil:
		s.Status, s.Text = Unknown, ""
	}
	if e := f.warning("FailedPrepareDynamicResources"); s.Status == Waiting && e != nil {
		s.Status, s.Text = Failed, e.Message
	}
	return s
}

// attached says whether the pod has the interface.
func (f *facts) attached(a *nodestate.Attachment, told *resourceapi.AllocatedDeviceStatus) Stage {
	s := Stage{Name: Attached, Status: Waiting, Text: "the pod's sandbox has not started yet"}
	ready := conditionOf(told, v1alpha1.ConditionReady)
	switch {
	case a != nil && a.State == "Attached":
		s.Status, s.Time, s.Text = Done, a.AttachedAt, "interface "+a.Interface.Name
		if a.Interface.Userspace {
			s.Text = "without a netdev, for a program of the pod"
		}
		return s
	case a != nil && a.State == "Lost" || ready != nil && ready.Status == metav1.ConditionFalse:
		s.Status, s.Text = Failed, "the device went while the pod had it"
		if ready != nil && ready.Message != "" {
			s.Text = ready.Message
		}
		return s
	case a != nil && a.State != "Reserved":
		s.Text = "it is " + a.State
	case a == nil && ready != nil:
		s.Status, s.Time, s.Text = Done, ready.LastTransitionTime.Time, ""
		return s
	case f.pod.Spec.NodeName != "" && f.state == nil:
		s.Status, s.Text = Unknown, ""
	}
	if e := f.warning("FailedCreatePodSandBox", "FunctionLost"); e != nil {
		s.Status, s.Text = Failed, e.Message
	}
	return s
}

// ending is how far the pod itself is: that it runs, or that it ends.
func (f *facts) ending(a *nodestate.Attachment) []Stage {
	if f.pod.DeletionTimestamp != nil || f.pod.Status.Phase == corev1.PodSucceeded || f.pod.Status.Phase == corev1.PodFailed {
		s := Stage{Name: Released, Status: Waiting, Text: "the pod is ending"}
		switch {
		case a == nil && f.state != nil:
			s.Status, s.Text = Done, "the Function is free"
		case a == nil:
			s.Status, s.Text = Unknown, ""
		case a.Hook != nil && a.Hook.Attempts > 0:
			s.Status, s.Time = Failed, a.RestoredAt
			s.Text = fmt.Sprintf("post-delete hook %s failed %d times: %s", a.Hook.Name, a.Hook.Attempts, a.Hook.Error)
		case a.Hook != nil:
			s.Time, s.Text = a.RestoredAt, "post-delete hook "+a.Hook.Name+" runs"
		}
		return []Stage{s}
	}
	s := Stage{Name: Running, Status: Waiting, Text: "the containers have not all started yet"}
	if c := podCondition(f.pod, corev1.PodReady); c != nil && c.Status == corev1.ConditionTrue {
		s.Status, s.Time, s.Text = Done, c.LastTransitionTime.Time, ""
	} else if f.pod.Status.Phase == corev1.PodRunning {
		s.Text = "the pod runs, and is not ready: " + notReady(f.pod)
	} else if waits := notReady(f.pod); waits != "" {
		s.Text = waits
	}
	return []Stage{s}
}

// notReady is what containers wait for.
func notReady(pod *corev1.Pod) string {
	var waits []string
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			waits = append(waits, strings.TrimSuffix(fmt.Sprintf("container %s: %s: %s", c.Name, c.State.Waiting.Reason, c.State.Waiting.Message), ": "))
		case c.State.Terminated != nil && c.State.Terminated.ExitCode != 0:
			waits = append(waits, fmt.Sprintf("container %s ended with %d", c.Name, c.State.Terminated.ExitCode))
		}
	}
	return strings.Join(waits, "; ")
}

func podCondition(pod *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
	if i < 0 {
		return nil
	}
	return &pod.Status.Conditions[i]
}

// addPort adds what the xPU serves.
func (f *facts) addPort(i *Interface, port *v1alpha1.XPUPort) {
	if port == nil {
		return
	}
	i.Network, i.XPU = port.Spec.Network, port.Spec.XPU
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	i.Card = &Side{
		MAC: port.Spec.MAC, MTU: port.Status.MTU, Addresses: port.Status.Addresses, Port: port.Status.BridgePort,
		State: cmp.Or(ready.Reason, "not looked at yet"),
	}
	if network := f.networks[port.Spec.Network]; network != nil {
		i.Card.VLAN = network.Spec.VLAN
	}
}

// addHost adds what the pod has, by the agent or else by the claim's status.
func (i *Interface) addHost(a *nodestate.Attachment, told *resourceapi.AllocatedDeviceStatus) {
	switch {
	case a != nil:
		i.Name = a.Interface.Name
		i.Host = &Side{MAC: string(a.Interface.MAC), VLAN: int32(a.Interface.VLAN), MTU: int32(a.Interface.MTU), State: a.State}
		for _, address := range a.Interface.Addresses {
			i.Host.Addresses = append(i.Host.Addresses, address.String())
		}
	case told != nil && told.NetworkData != nil:
		i.Name = told.NetworkData.InterfaceName
		i.Host = &Side{MAC: told.NetworkData.HardwareAddress, Addresses: told.NetworkData.IPs}
	}
}

// compare finds what does not fit together of both sides.
func compare(i *Interface) {
	if i.Host == nil || i.Card == nil || i.Host.State != "Attached" && i.Host.State != "" {
		return
	}
	differ := func(format string, args ...any) { i.Differences = append(i.Differences, fmt.Sprintf(format, args...)) }
	if i.Host.MAC != "" && !strings.EqualFold(i.Host.MAC, i.Card.MAC) {
		differ("the interface has MAC %s in the pod, but the xPU knows %s: it drops what the pod sends", i.Host.MAC, i.Card.MAC)
	}
	if i.Card.MTU != 0 && i.Host.MTU > i.Card.MTU {
		differ("the interface has MTU %d in the pod, but the network carries %d: large packets are lost", i.Host.MTU, i.Card.MTU)
	}
	if i.Host.VLAN != 0 {
		differ("the PF tags what the pod sends with VLAN %d, but the xPU's port takes untagged frames", i.Host.VLAN)
	}
	for _, address := range i.Card.Addresses {
		if !slices.Contains(i.Host.Addresses, address) {
			differ("the network gave the interface %s, but the pod does not have it", address)
		}
	}
}

// verdict is the one sentence: the first stage that is not done, or else the first difference.
func verdict(f *facts, p *Pod) (ok bool, sentence string) {
	if len(p.Interfaces) == 0 {
		return true, "the pod asks for no Function: it has no ResourceClaim for one, and no extended resource of a DevicePool"
	}
	for _, status := range []Status{Failed, Waiting} {
		for _, i := range p.Interfaces {
			for _, s := range i.Stages {
				if s.Status == status {
					return false, fmt.Sprintf("%s is not %s: %s", i.Title(), s.Name, s.Text)
				}
			}
		}
	}
	for _, i := range p.Interfaces {
		if len(i.Differences) > 0 {
			return false, fmt.Sprintf("%s: %s", i.Title(), i.Differences[0])
		}
	}
	if f.state == nil && f.pod.Spec.NodeName != "" {
		return true, "nothing wrong is known, but the agent of the node could not be asked"
	}
	if len(p.Interfaces) == 1 {
		return true, "nothing is wrong"
	}
	return true, fmt.Sprintf("nothing is wrong with any of the %d interfaces", len(p.Interfaces))
}

// Title names an interface.
func (i Interface) Title() string {
	var parts []string
	if i.Name != "" {
		parts = append(parts, "interface "+i.Name)
	}
	switch {
	case i.Claim != "" && i.Request != "":
		parts = append(parts, fmt.Sprintf("request %s of claim %s", i.Request, i.Claim))
	case i.Claim != "":
		parts = append(parts, "claim "+i.Claim)
	case i.Resource != "":
		parts = append(parts, i.Resource)
	}
	return strings.Join(parts, ", ")
}

// shown is a time for people.
func shown(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.TimeOnly)
}
