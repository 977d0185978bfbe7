// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// notAllocated explains why the scheduler has not chosen a device.
func (f *facts) notAllocated() Stage {
	s := Stage{Name: Allocated, Status: Waiting}
	switch {
	case f.target != "":
		s.Text = fmt.Sprintf("node %s can take the pod: the scheduler has not come to it yet, or "+
			"waits for something else", f.target)
	case len(f.why) > 0:
		s.Status, s.Text = Failed, f.why[0]+f.hint(f.why[0])
	default:
		if e := f.warning("FailedScheduling"); e != nil {
			s.Status, s.Text = Failed, e.Message
		}
	}

	return s
}

// hint returns what helps against a reason of the scheduler, to be added to it.
func (f *facts) hint(why string) string {
	asked := classesIn(why)
	for _, class := range slices.Sorted(maps.Keys(f.classPools)) {
		pool := f.classPools[class]
		if !f.unseen.Has(poolKind) && f.pools[pool] == nil &&
			slices.Contains(asked, class) {
			return fmt.Sprintf("; there is no DevicePool %s, whose Functions DeviceClass %s selects: "+
				"make it, or name another class", pool, class)
		}
	}

	if strings.Contains(why, "no such key: ") { // cel-go's words
		return "; a device lacks this attribute: kubectl get resourceslices -o yaml shows which " +
			"attributes there are"
	}
	return ""
}

// classesIn returns the DeviceClasses that a reason of the scheduler names.
func classesIn(why string) (names []string) {
	for _, behind := range strings.Split(why, "of DeviceClass ")[1:] {
		name := behind
		if end := strings.IndexAny(behind, " ,;:"); end >= 0 {
			name = behind[:end]
		}
		names = append(names, strings.TrimSuffix(name, "."))
	}
	return names
}

func (f *facts) bound() Stage {
	if f.pod.Spec.NodeName == "" {
		s := Stage{Name: Bound, Status: Waiting,
			Text: "the scheduler has not put the pod on a node yet"}
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

// provisioned explains whether the xPU serves the Port of a Function that is to join networks.
func (f *facts) provisioned(
	i *Interface, port *v1alpha1.XPUPort, joins []string, status *resourceapi.AllocatedDeviceStatus,
) Stage {
	s := Stage{Name: Provisioned, Status: Waiting}
	switch {
	case port != nil:
		c := v1alpha1.ReadyOf(port.Status.Conditions)
		where := fmt.Sprintf("XPUPort %s/%s at XPU %s", port.Namespace, port.Name, port.Spec.XPU)
		switch {
		case c.Status == metav1.ConditionTrue:
			s.Status, s.Time, s.Text = Done, c.LastTransitionTime.Time, where
		case c.Reason == v1alpha1.ReasonStandby:
			// The pod of a virtual machine that is being migrated does not wait for the Port.
			s.Status, s.Time, s.Text = Done, c.LastTransitionTime.Time, fmt.Sprintf("%s: %s: %s",
				where, c.Reason, c.Message)
		case c.Reason == "":
			s.Text = where + ": xpu-controller has not said anything of it yet: is it running?"
		case v1alpha1.Refused(c.Reason):
			s.Status, s.Text = Failed, fmt.Sprintf("%s: %s: %s", where, c.Reason, c.Message)
		default:
			s.Text = fmt.Sprintf("%s: %s: %s", where, c.Reason, c.Message)
		}
	case len(joins) == 0 && f.unseen.Has(poolKind):
		s.Status, s.Text = Unknown, "the DevicePool may name a network"
	case len(joins) == 0:
		s.Status, s.Text = Skipped, "neither the InterfaceConfig nor the DevicePool names a network"
	case f.unseen.Has(portKind):
		i.Network = strings.Join(joins, ", ")
		s.Status, s.Text = Unknown, "XPUPorts cannot be read"
	default:
		i.Network = strings.Join(joins, ", ")
		s.Text = fmt.Sprintf("xpu-controller has not made the XPUPort in network %s yet: is it "+
			"running?", i.Network)
		missing := slices.IndexFunc(joins, func(name string) bool { return f.networks[name] == nil })
		if missing >= 0 && !f.unseen.Has(networkKind) {
			s.Status, s.Text = Failed, fmt.Sprintf("XPUNetwork %s does not exist: create it, or "+
				"name another one", joins[missing])
		} else if c := conditionOf(status, v1alpha1.ConditionProvisioned); c != nil &&
			c.Status == metav1.ConditionFalse {
			s.Status, s.Text = Failed, fmt.Sprintf("%s: %s", c.Reason, c.Message)
		}
	}

	return s
}

func conditionOf(status *resourceapi.AllocatedDeviceStatus, kind string) *metav1.Condition {
	if status == nil {
		return nil
	}
	return meta.FindStatusCondition(status.Conditions, kind)
}

// prepared explains whether the agent has reserved the Function for the claim, which the kubelet
// requests.
func (f *facts) prepared(a *nodestate.Attachment, status *resourceapi.AllocatedDeviceStatus) Stage {
	s := Stage{Name: Prepared, Status: Waiting,
		Text: "the kubelet has not asked xpu-agent for the claim yet"}
	ready := conditionOf(status, v1alpha1.ConditionReady)
	switch {
	case a != nil:
		s.Status, s.Time, s.Text = Done, a.ReservedAt, ""
	case ready != nil:
		s.Status, s.Text = Done, ""
	case f.pod.Spec.NodeName != "" && f.state == nil:
		s.Status, s.Text = Unknown, ""
	}

	if e := f.warning("FailedPrepareDynamicResources"); s.Status == Waiting && e != nil {
		s.Status, s.Text = Failed, plain(e.Message)
	}

	return s
}

// attached explains whether the pod has the interface.
func (f *facts) attached(a *nodestate.Attachment, status *resourceapi.AllocatedDeviceStatus) Stage {
	s := Stage{Name: Attached, Status: Waiting, Text: "the pod's sandbox has not started yet"}
	ready := conditionOf(status, v1alpha1.ConditionReady)
	switch {
	case a != nil && a.State == "Attached":
		s.Status, s.Time, s.Text = Done, a.AttachedAt, "interface "+a.Interface.Name
		if a.Interface.Bond != "" {
			s.Text += ", a port of bond " + a.Interface.Bond
		}
		if a.Interface.Userspace {
			s.Text = "without a netdev, for a program of the pod"
		}
		return s
	case a != nil && a.State == "Lost" || ready != nil && ready.Status == metav1.ConditionFalse:
		s.Status, s.Text = Failed, "the device went while the pod had it"
		if a != nil && a.Interface.Userspace {
			s.Text += ", and its program cannot get it back: delete the pod"
		}
		if ready != nil && ready.Message != "" {
			s.Text = ready.Message
		}
		return s
	case a != nil && a.Quarantine != nil:
		s.Status, s.Time, s.Text = Failed, a.Quarantine.Since, "quarantined: "+a.Quarantine.Message
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
		s.Status, s.Text = Failed, plain(e.Message)
	}

	return s
}

// endStages returns the stages of the pod itself: it runs, or it ends.
func (f *facts) endStages(a *nodestate.Attachment) []Stage {
	if f.hasEnded() {
		s := Stage{Name: Released, Status: Waiting, Text: "the pod is ending"}
		switch {
		case a == nil && f.state != nil:
			s.Status, s.Text = Done, "the Function is free"
		case a == nil:
			s.Status, s.Text = Unknown, ""
		case a.Quarantine != nil:
			s.Status, s.Time = Done, a.Quarantine.Since
			s.Text = "the pod may go, and the Function is quarantined: " + a.Quarantine.Message
		case a.Hook != nil && a.Hook.Attempts > 0:
			s.Status, s.Time = Failed, a.RestoredAt
			s.Text = fmt.Sprintf("post-delete hook %s failed %d times: %s", a.Hook.Name,
				a.Hook.Attempts, a.Hook.Error)
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

// notReady describes what containers wait for.
func notReady(pod *corev1.Pod) string {
	var waits []string
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses,
		pod.Status.ContainerStatuses) {
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			waits = append(waits,
				strings.TrimSuffix(fmt.Sprintf("container %s: %s: %s", c.Name,
					c.State.Waiting.Reason, c.State.Waiting.Message), ": "))
		case c.State.Terminated != nil && c.State.Terminated.ExitCode != 0:
			waits = append(waits,
				fmt.Sprintf("container %s ended with %d", c.Name, c.State.Terminated.ExitCode))
		}
	}

	return strings.Join(waits, "; ")
}

func podCondition(pod *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == kind
	})
	if i < 0 {
		return nil
	}
	return &pod.Status.Conditions[i]
}
