// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/controlplane"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/bind"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// create creates a pod that xpuctl binds, and returns it once its claims exist.
func (w *world) create(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	made := pod.DeepCopy()
	made.Spec.SchedulerName = bind.SchedulerName
	if err := w.Create(t.Context(), made); err != nil {
		t.Fatal(err)
	}

	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true,
		func(ctx context.Context) (bool, error) {
			err := w.Get(ctx, client.ObjectKeyFromObject(made), made)
			templates := 0
			for _, c := range made.Spec.ResourceClaims {
				if c.ResourceClaimTemplateName != nil {
					templates++
				}
			}
			return len(made.Status.ResourceClaimStatuses) >= templates, err
		})

	if err != nil {
		t.Fatalf("claims of pod %s are not made: %v", made.Name, err)
	}

	return made
}

func (w *world) decideLive(t *testing.T, pod *corev1.Pod) *schedule.Decision {
	t.Helper()
	from, err := snapshot.List(t.Context(), w.clients())
	if err != nil {
		t.Fatal(err)
	}
	return decide(t, from, pod)
}

// TestBind binds the pods of scenarios in place of the scheduler. It checks that the API server
// accepts the decisions, and that the pods have the devices.
func TestBind(t *testing.T) {
	w := start(t)
	binder := bind.Binder{
		Pods: w.clientset.CoreV1(), Claims: w.clientset.ResourceV1(), Timeout: time.Minute,
	}
	for _, file := range []string{
		"net-model-ports", "net-model-counters", "net-two-rails", "net-admin-access",
		"two-pods-one-gpu-0", "pools-two-nodes-dgxa100",
		"pod-one-container-gpu-priority-list-one-vf",
	} {
		t.Run(file, func(t *testing.T) {
			objects := objectsOf(t, file+".yaml")
			pods := objects.Pods
			objects.Pods = nil
			t.Cleanup(func() { w.clear(t) })

			if err := controlplane.Load(t.Context(), w, objects); err != nil {
				t.Fatal(err)
			}

			for _, pod := range pods {
				made := w.create(t, pod)
				d := w.decideLive(t, made)
				err := binder.Bind(t.Context(), d)
				if d.Node == "" {
					if err == nil || !strings.Contains(err.Error(), "no node takes it") {
						t.Errorf("pod %s: error %v", pod.Name, err)
					}
					continue
				}

				if err != nil {
					t.Fatal(err)
				}

				var want []string
				for _, c := range d.Claims {
					want = append(want, told(c.Claim)...)
				}

				if err := w.Get(t.Context(), client.ObjectKeyFromObject(made), made); err != nil ||
					made.Spec.NodeName != d.Node {
					t.Errorf("pod %s is on node %q, want %s: %v", made.Name, made.Spec.NodeName,
						d.Node, err)
				}

				if diff := gocmp.Diff(want, w.devices(t, made)); diff != "" {
					t.Errorf("pod %s (-decided +has):\n%s", made.Name, diff)
				}
			}
		})
	}
}

// TestBindWaits checks that a pod is bound when its device's binding conditions are true. If they
// fail or take too long, the claim is deallocated.
func TestBindWaits(t *testing.T) {
	w := start(t)
	const waits, fails = "example.com/Ready", "example.com/Failed"
	for name, test := range map[string]struct {
		condition string
		timeout   time.Duration
		want      string
	}{
		"true":    {waits, time.Minute, ""},
		"fails":   {fails, time.Minute, "device vf-0: example.com/Failed: Told: so"},
		"nothing": {"", time.Second, "not within 1s: device vf-0: example.com/Ready is not true"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { w.clear(t) })
			pod := w.waiting(t, waits, fails)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()

			done := make(chan error, 1)
			go func() { done <- w.tell(ctx, test.condition) }()
			err := bind.Binder{
				Pods: w.clientset.CoreV1(), Claims: w.clientset.ResourceV1(),
				Timeout: test.timeout,
			}.Bind(t.Context(), w.decideLive(t, pod))
			stop()
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			if (err == nil) != (test.want == "") ||
				err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}

			var claim resourceapi.ResourceClaim
			if err := w.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "net"},
				&claim); err != nil {
				t.Fatal(err)
			}
			if kept := claim.Status.Allocation != nil &&
				len(claim.Status.ReservedFor) == 1; kept != (test.want == "") {
				t.Errorf("the claim is %+v", claim.Status)
			}
		})
	}
}

// waiting makes a node with a device that has binding conditions, and a pod that claims it.
func (w *world) waiting(t *testing.T, waits, fails string) *corev1.Pod {
	t.Helper()
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "default", Name: name}
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-0"}}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "net.example.com", NodeName: &node.Name, Pool: resourceapi.ResourcePool{
				Name: "node-0", ResourceSliceCount: 1,
			},
			Devices: []resourceapi.Device{
				{Name: "vf-0", BindingConditions: []string{waits},
					BindingFailureConditions: []string{fails}},
			},
		}}

	claim := &resourceapi.ResourceClaim{ObjectMeta: meta("net"),
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{
				{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "net"}},
			},
		}}}

	for _, o := range []client.Object{
		node, slice, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "net"}}, claim,
	} {
		if err := w.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}

	node.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("10")}
	if err := w.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}

	return w.create(t, &corev1.Pod{ObjectMeta: meta("web"), Spec: corev1.PodSpec{
		ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: &claim.Name}},
		Containers:     []corev1.Container{{Name: "main", Image: "none"}},
	}})
}

// This function plays the driver: it sets the condition on the claim once the claim is allocated.
func (w *world) tell(ctx context.Context, condition string) error {
	if condition == "" {
		return nil
	}
	return wait.PollUntilContextCancel(ctx, 20*time.Millisecond,
		true, func(ctx context.Context) (bool, error) {
			claim, err := w.clientset.ResourceV1().ResourceClaims("default").Get(ctx,
				"net", metav1.GetOptions{})
			if err != nil || claim.Status.Allocation == nil {
				return false, err
			}

			result := claim.Status.Allocation.Devices.Results[0]
			claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
				Driver: result.Driver, Pool: result.Pool, Device: result.Device,
				Conditions: []metav1.Condition{{
					Type: condition, Status: metav1.ConditionTrue, Reason: "Told", Message: "so",
					LastTransitionTime: metav1.Now(),
				}},
			}}

			if _, err := w.clientset.ResourceV1().ResourceClaims("default").UpdateStatus(ctx, claim,
				metav1.UpdateOptions{}); err != nil {
				return false, fmt.Errorf("the driver's condition: %w", err)
			}

			return true, nil
		})
}
