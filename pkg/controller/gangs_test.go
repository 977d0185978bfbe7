// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// gangOf makes a PodGroup whose pods run together.
func (c *cluster) gangOf(name string, minCount int32) *schedulingapi.PodGroup {
	c.Helper()
	return c.podGroup(name, schedulingapi.PodGroupSchedulingPolicy{
		Gang: &schedulingapi.GangSchedulingPolicy{MinCount: minCount},
	})
}

func (c *cluster) podGroup(
	name string, policy schedulingapi.PodGroupSchedulingPolicy,
) *schedulingapi.PodGroup {
	c.Helper()
	group := &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name},
		Spec:       schedulingapi.PodGroupSpec{SchedulingPolicy: policy},
	}
	c.create(group)
	return group
}

// worker is a pod of a gang with a claim for each of its Functions.
type worker struct {
	pod    *corev1.Pod
	claims []*resourceapi.ResourceClaim
	rails  []function.ID
}

// worker creates a pod of the group that asks for this many rails, and its claims. The Functions
// follow those of the workers before it.
func (c *cluster) worker(group, name string, first, rails int) *worker {
	c.Helper()
	w := &worker{pod: &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name},
		Spec: corev1.PodSpec{
			SchedulingGroup: &corev1.PodSchedulingGroup{PodGroupName: &group},
			Containers:      []corev1.Container{{Name: "main", Image: "pause"}},
		},
	}}
	for i := range rails {
		w.rails = append(w.rails, vf(first+i))
		w.pod.Spec.ResourceClaims = append(w.pod.Spec.ResourceClaims, corev1.PodResourceClaim{
			Name: fmt.Sprint("rail", i), ResourceClaimTemplateName: ptr.To("rail"),
		})
	}

	c.create(w.pod)
	for i := range rails {
		made := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: c.namespace, GenerateName: fmt.Sprintf("%s-rail%d-", name, i),
				OwnerReferences: []metav1.OwnerReference{
					*metav1.NewControllerRef(w.pod, corev1.SchemeGroupVersion.WithKind("Pod")),
				},
			},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{Name: "nic",
					Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic"}}},
			}},
		}
		c.create(made)
		w.claims = append(w.claims, made)
		w.pod.Status.ResourceClaimStatuses = append(w.pod.Status.ResourceClaimStatuses,
			corev1.PodResourceClaimStatus{Name: fmt.Sprint("rail", i), ResourceClaimName: &made.Name})
	}
	if err := c.Status().Update(context.Background(), w.pod); err != nil {
		c.Fatal(err)
	}
	return w
}

// place allocates the worker's claims, as the scheduler does before it waits.
func (c *cluster) place(w *worker) {
	c.Helper()
	for i, o := range w.claims {
		c.allocate(o, want{pool: "fast", function: w.rails[i], beforeBind: true,
			pod: w.pod.Name, podUID: w.pod.UID})
	}
}

// allocateAt is place for a scheduler whose clock says another time.
func (c *cluster) allocateAt(w *worker, at time.Time) {
	c.Helper()
	c.place(w)
	for _, o := range w.claims {
		c.eventually("allocated at another time", func() error {
			if err := c.get(o); err != nil {
				return err
			}
			status := o.Status
			o.Status = resourceapi.ResourceClaimStatus{}
			if err := c.Status().Update(context.Background(), o); err != nil {
				return err
			}
			o.Status.Allocation, o.Status.ReservedFor = status.Allocation, status.ReservedFor
			o.Status.Allocation.AllocationTimestamp = ptr.To(metav1.NewTime(at))
			return c.Status().Update(context.Background(), o)
		})
	}
}

// bind does what the scheduler does when all conditions are true.
func (c *cluster) bind(pod *corev1.Pod) {
	c.Helper()
	binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: c.node}}
	if err := c.SubResource("binding").Create(context.Background(), pod, binding); err != nil {
		c.Fatal(err)
	}
}

// reason waits until all claims of the worker have the reason.
func (c *cluster) reason(w *worker, reason, text string) {
	c.Helper()
	for _, o := range w.claims {
		c.claimReason(o, v1alpha1.ConditionProvisioned, reason, text)
	}
}

// notReady fails the test if the scheduler would bind the worker.
func (c *cluster) notReady(w *worker) {
	c.Helper()
	for _, o := range w.claims {
		if err := c.get(o); err != nil {
			c.Fatal(err)
		}
		if len(o.Status.Devices) > 0 && meta.IsStatusConditionTrue(
			o.Status.Devices[0].Conditions, v1alpha1.ConditionProvisioned) {
			c.Errorf("claim %s may be bound before its gang is complete", o.Name)
		}
	}
}

// gangCluster has a network, and an xPU whose agent is returned.
func gangCluster(t *testing.T, set func(*Options)) (*cluster, *opitest.Agent) {
	c := newCluster(t, set)
	agent := c.agent()
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "blue")
	return c, agent
}

// TestGangTogether: no claim of a gang reports that it is ready before the last Port is up.
func TestGangTogether(t *testing.T) {
	c, agent := gangCluster(t, nil)
	c.gangOf("train", 3)
	workers := []*worker{
		c.worker("train", "a", 0, 2), c.worker("train", "b", 2, 2), c.worker("train", "c", 4, 2),
	}
	for _, w := range workers[:2] {
		c.place(w)
	}
	for _, w := range workers[:2] {
		c.reason(w, v1alpha1.ReasonGangIncomplete, "all Ports of PodGroup train are up")
	}

	agent.Set(func(b *opitest.Behaviour) { b.Held = true })
	c.place(workers[2])
	c.eventually("the last Ports are asked for", func() error {
		if got := len(agent.Ports()); got != 6 {
			return fmt.Errorf("the agent has %d ports", got)
		}
		return nil
	})
	for _, w := range workers {
		c.notReady(w)
	}

	agent.Set(func(b *opitest.Behaviour) { b.Held = false })
	for _, w := range workers {
		c.reason(w, v1alpha1.ReasonUp, "")
	}

	var events eventsv1.EventList
	if err := c.List(t.Context(), &events); err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Items {
		if e.Reason == v1alpha1.ReasonGangIncomplete {
			t.Errorf("event %q warns of a gang that is not complete yet", e.Note)
		}
	}
}

// TestGangRefused: when an xPU refuses a Port, the device is tainted first, and then the scheduler is
// told to place the pod again. It is told by all claims of the pod, because it looks at none behind
// one that is not ready. The others of the gang wait.
func TestGangRefused(t *testing.T) {
	c, agent := gangCluster(t, nil)
	slice := c.slice("fast", vf(0), vf(1), vf(2), vf(3))
	c.gangOf("train", 2)
	agent.Set(func(b *opitest.Behaviour) { b.Realise = refuse(vf(3)) })

	a, b := c.worker("train", "a", 0, 2), c.worker("train", "b", 2, 2)
	c.place(a)
	c.place(b)
	c.reason(a, v1alpha1.ReasonGangIncomplete, "PodGroup train")
	refused, sibling := b.claims[1], b.claims[0]
	c.claimReason(refused, v1alpha1.ConditionProvisioned, v1alpha1.ReasonFailed, "representor")
	if deviceHas(refused, v1alpha1.ConditionProvisionFailed) {
		t.Error("the claim failed before the device was tainted")
	}

	slice.Spec.Devices[3].Taints = []resourceapi.DeviceTaint{{
		Key: v1alpha1.TaintProvisionFailed, Effect: resourceapi.DeviceTaintEffectNoSchedule,
	}}
	if err := c.Update(t.Context(), slice); err != nil {
		t.Fatal(err)
	}
	c.claimReason(refused, v1alpha1.ConditionProvisionFailed, v1alpha1.ReasonFailed, "representor")
	c.claimReason(sibling, v1alpha1.ConditionProvisionFailed, v1alpha1.ReasonSiblingFailed,
		"ResourceClaim "+refused.Name+": Failed: ")
	c.notReady(a)
	c.notReady(b)

	c.deallocate(refused)
	c.deallocate(sibling)
	b.rails[1] = vf(4)
	c.place(b)
	c.reason(a, v1alpha1.ReasonUp, "")
	c.reason(b, v1alpha1.ReasonUp, "")
}

// refuse has an OPI agent refuse the port of a Function.
func refuse(f function.ID) func(id string) error {
	port := "vf-" + strings.NewReplacer(":", "-", ".", "-").Replace(f.String())
	return func(id string) error {
		if id == port {
			return errors.New("no such representor")
		}
		return nil
	}
}

// TestGangNotComplete: a gang of which a pod is missing is given back after a while, with a message
// that says which, also those claims whose Ports are not up. Given back, it may be placed again.
func TestGangNotComplete(t *testing.T) {
	c, agent := gangCluster(t, func(o *Options) { o.GangTimeout = 3 * time.Second })
	c.gangOf("train", 3)
	a, b := c.worker("train", "a", 0, 1), c.worker("train", "b", 1, 1)
	pending := c.worker("train", "c", 2, 1)
	c.place(a)
	c.reason(a, v1alpha1.ReasonGangIncomplete, "")
	agent.Set(func(b *opitest.Behaviour) { b.Held = true })
	c.place(pending)
	message := "PodGroup train was not complete in time, with 1 of 3 pods: pod b: ResourceClaim " +
		b.claims[0].Name + " is not allocated; pod c: a Port of ResourceClaim"
	for _, w := range []*worker{a, pending} {
		c.claimReason(w.claims[0], v1alpha1.ConditionProvisionFailed, v1alpha1.ReasonGangFailed,
			message)
		c.told("Pod", w.pod.Name, v1alpha1.ReasonGangFailed)
	}

	agent.Set(func(b *opitest.Behaviour) { b.Held = false })
	c.deallocate(a.claims[0])
	c.deallocate(pending.claims[0])
	c.has(agent)
	for _, w := range []*worker{a, b, pending} {
		c.place(w)
	}
	for _, w := range []*worker{a, b, pending} {
		c.reason(w, v1alpha1.ReasonUp, "")
	}
}

// TestGangGivenBackTwice: a controller that ended while it gave a gang back is followed by one that
// tells the other claims. What was allocated since then is not given back.
func TestGangGivenBackTwice(t *testing.T) {
	c, _ := gangCluster(t, nil)
	c.gangOf("train", 3)
	told, untold, next := c.worker("train", "a", 0, 1), c.worker("train", "b", 1, 1),
		c.worker("train", "c", 2, 1)
	c.place(told)
	c.place(untold)
	c.reason(told, v1alpha1.ReasonGangIncomplete, "")
	c.reason(untold, v1alpha1.ReasonGangIncomplete, "")
	c.stop()

	c.eventually("one claim is told, by the controller before this one", func() error {
		o := told.claims[0]
		if err := c.get(o); err != nil {
			return err
		}
		meta.SetStatusCondition(&o.Status.Devices[0].Conditions, metav1.Condition{
			Type: v1alpha1.ConditionProvisionFailed, Status: metav1.ConditionTrue,
			Reason: v1alpha1.ReasonGangFailed, Message: "PodGroup train was not complete in time",
			LastTransitionTime: metav1.NewTime(time.Now().Add(2 * time.Second)),
		})
		return c.Status().Update(t.Context(), o)
	})
	c.start(nil)
	c.claimReason(untold.claims[0], v1alpha1.ConditionProvisionFailed, v1alpha1.ReasonGangFailed,
		"not complete in time")

	c.allocateAt(next, time.Now().Add(5*time.Second))
	c.reason(next, v1alpha1.ReasonGangIncomplete, "")
}

// TestGangRuns: a pod that is made anew while its gang runs, and a pod beyond minCount, wait for
// nobody.
func TestGangRuns(t *testing.T) {
	c, _ := gangCluster(t, nil)
	c.gangOf("train", 2)
	a, b := c.worker("train", "a", 0, 1), c.worker("train", "b", 1, 1)
	c.place(a)
	c.place(b)
	c.reason(a, v1alpha1.ReasonUp, "")
	c.reason(b, v1alpha1.ReasonUp, "")
	c.bind(a.pod)
	c.bind(b.pod)

	if err := c.Delete(t.Context(), b.pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	c.delete(b.claims[0])
	again := c.worker("train", "b", 2, 1)
	c.place(again)
	c.reason(again, v1alpha1.ReasonUp, "")
	more := c.worker("train", "c", 3, 1)
	c.place(more)
	c.reason(more, v1alpha1.ReasonUp, "")
}

// TestGangOfUnknownSize: nothing is held where nothing says how many pods run together.
func TestGangOfUnknownSize(t *testing.T) {
	c, _ := gangCluster(t, nil)
	c.podGroup("loose", schedulingapi.PodGroupSchedulingPolicy{
		Basic: &schedulingapi.BasicSchedulingPolicy{},
	})
	for i, group := range []string{"loose", "deleted"} {
		w := c.worker(group, group, i, 1)
		c.place(w)
		c.reason(w, v1alpha1.ReasonUp, "")
	}
}

// TestGangWithLauncher: a pod of the gang that has no claim counts when it is bound.
func TestGangWithLauncher(t *testing.T) {
	c, _ := gangCluster(t, nil)
	c.gangOf("train", 2)
	launcher, w := c.worker("train", "launcher", 0, 0), c.worker("train", "w", 0, 1)
	c.place(w)
	c.reason(w, v1alpha1.ReasonGangIncomplete, "")
	c.bind(launcher.pod)
	c.reason(w, v1alpha1.ReasonUp, "")
}

// TestGangSpares: of a gang with more pods than minCount, a pod whose Port is refused fails alone.
func TestGangSpares(t *testing.T) {
	c, agent := gangCluster(t, func(o *Options) { o.TaintGrace = time.Millisecond })
	c.slice("fast", vf(0), vf(1), vf(2))
	c.gangOf("train", 2)
	agent.Set(func(b *opitest.Behaviour) { b.Realise = refuse(vf(0)) })
	spare := c.worker("train", "spare", 0, 1)
	a, b := c.worker("train", "a", 1, 1), c.worker("train", "b", 2, 1)
	c.place(spare)
	c.claimReason(spare.claims[0], v1alpha1.ConditionProvisionFailed, v1alpha1.ReasonFailed, "")
	c.place(a)
	c.reason(a, v1alpha1.ReasonGangIncomplete, "")
	c.place(b)
	c.reason(a, v1alpha1.ReasonUp, "")
	c.reason(b, v1alpha1.ReasonUp, "")
}

// TestGangOfUnheld: claims without binding conditions are not held, because their pods are bound at
// once.
func TestGangOfUnheld(t *testing.T) {
	c, _ := gangCluster(t, nil)
	c.gangOf("train", 2)
	w := c.worker("train", "a", 0, 1)
	c.allocate(w.claims[0], want{pool: "fast", function: vf(0), pod: "a", podUID: w.pod.UID})
	c.up(w.claims[0], vf(0))
	c.claimQuiet(w.claims[0])
}

// TestClaimOfPodGroup: a claim of a PodGroup itself is refused before a Port is made and a pod is
// bound.
func TestClaimOfPodGroup(t *testing.T) {
	c, agent := gangCluster(t, nil)
	group := c.gangOf("train", 1)
	o := c.named("group")
	o.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic"}},
	}
	c.create(o)
	o.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{
		APIGroup: schedulingapi.GroupName, Resource: "podgroups", Name: group.Name, UID: group.UID,
	}}
	c.allocate(o, want{pool: "fast", function: vf(0), beforeBind: true})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonInvalidConfig,
		"is reserved for podgroups train, but an interface can be in one pod only")
	c.told("ResourceClaim", "group", v1alpha1.ReasonInvalidConfig)
	c.has(agent)
}
