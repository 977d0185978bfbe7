// SPDX-License-Identifier: Apache-2.0

package bind

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// decided returns an API server with a pod and its claim, and the decision that the pod goes to node
// n1 with device vf-0.
func decided() (*fake.Clientset, *schedule.Decision) {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-of-" + name)}
	}
	pod := &corev1.Pod{
		ObjectMeta: meta("web"), Spec: corev1.PodSpec{SchedulerName: SchedulerName},
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: meta("net")}
	allocated := claim.DeepCopy()
	allocated.Status.Allocation = allocation("vf-0")
	return fake.NewClientset(pod, claim), &schedule.Decision{
		Pod: pod, Node: "n1",
		Claims: []schedule.ClaimDecision{{PodClaim: "net", Claim: allocated, New: true}},
	}
}

func allocation(device string) *resourceapi.AllocationResult {
	return &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "nic", Driver: "net.example.com", Pool: "n1", Device: device},
		},
	}}
}

func bindPod(t *testing.T, api *fake.Clientset, d *schedule.Decision) (
	resourceapi.ResourceClaimStatus, error,
) {
	t.Helper()
	err := Binder{Pods: api.CoreV1(), Claims: api.ResourceV1(), Timeout: time.Minute}.
		Bind(t.Context(), d)
	claim, failed := api.ResourceV1().ResourceClaims("default").Get(t.Context(), "net",
		metav1.GetOptions{})
	must.Succeed(t, failed)
	return claim.Status, err
}

// TestReleaseOfOthers: a claim that another xpuctl has allocated for the same pod meanwhile keeps its
// devices, because that one may bind the pod.
func TestReleaseOfOthers(t *testing.T) {
	api, d := decided()
	claims := api.ResourceV1().ResourceClaims("default")
	claim, err := claims.Get(t.Context(), "net", metav1.GetOptions{})
	must.Succeed(t, err)
	claim.Status.Allocation = allocation("vf-1")
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{Resource: "pods", Name: d.Pod.Name, UID: d.Pod.UID},
	}
	_, err = claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{})
	must.Succeed(t, err)

	status, err := bindPod(t, api, d)
	if err == nil || !strings.Contains(err.Error(), "was allocated by somebody else") {
		t.Errorf("error %v", err)
	}
	if status.Allocation == nil || len(status.ReservedFor) != 1 {
		t.Errorf("the claim of the other is %+v", status)
	}
}

// TestUnclearBinding: an error that does not say whether the pod is bound is no reason to take the
// devices of the pod away.
func TestUnclearBinding(t *testing.T) {
	lost := errors.New("connection lost")
	conflict := apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, "web", lost)
	for name, test := range map[string]struct {
		err, read error
		node      string
		want      string // in the error; "" for success
		keeps     bool
	}{
		"refused":                {conflict, nil, "", "connection lost", false},
		"lost, and bound":        {lost, nil, "n1", "", true},
		"lost, and not bound":    {lost, nil, "", "connection lost", false},
		"lost, and nobody knows": {lost, lost, "n1", "whether it is bound is not known", true},
		"bound by another":       {conflict, nil, "n2", "connection lost", true},
	} {
		t.Run(name, func(t *testing.T) {
			api, d := decided()
			api.PrependReactor("create", "pods", func(action clienttesting.Action) (
				bool, runtime.Object, error,
			) {
				return action.GetSubresource() == "binding", nil, test.err
			})
			api.PrependReactor("get", "pods", func(clienttesting.Action) (
				bool, runtime.Object, error,
			) {
				pod := d.Pod.DeepCopy()
				pod.Spec.NodeName = test.node
				return true, pod, test.read
			})

			status, err := bindPod(t, api, d)
			if (err == nil) != (test.want == "") ||
				err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if kept := status.Allocation != nil && len(status.ReservedFor) == 1; kept != test.keeps {
				t.Errorf("the claim is %+v", status)
			}
		})
	}
}
