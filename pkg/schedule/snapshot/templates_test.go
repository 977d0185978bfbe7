// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestAddLike checks what a Node that is made like another one has: its devices, but for those of the
// pods of DaemonSets, and these pods, and nothing of the other pods.
func TestAddLike(t *testing.T) {
	s := &Snapshot{}
	put := func(objects ...runtime.Object) {
		for _, object := range objects {
			must.Succeed(t, s.Put(object))
		}
	}

	slice := func(name, node, pool string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: "nic.example.com", NodeName: &node,
				Pool:    resourceapi.ResourcePool{Name: pool, ResourceSliceCount: 1},
				Devices: []resourceapi.Device{{Name: "a"}, {Name: "b"}},
			},
		}
	}
	pod := func(name, owner string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
				OwnerReferences: []metav1.OwnerReference{
					{APIVersion: "apps/v1", Kind: owner, Name: "x", UID: "u", Controller: new(true)},
				}},
			Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{
				Name: "c", Image: "i", Resources: corev1.ResourceRequirements{
					Claims: []corev1.ResourceClaim{{Name: "nic"}},
				},
			}}, ResourceClaims: []corev1.PodResourceClaim{
				{Name: "nic", ResourceClaimName: new(name)},
			}},
		}
	}
	claim := func(name, device string) *resourceapi.ResourceClaim {
		return &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{
					Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic"},
				}},
			}},
			Status: resourceapi.ResourceClaimStatus{
				ReservedFor: []resourceapi.ResourceClaimConsumerReference{
					{Resource: "pods", Name: name, UID: "u"},
				},
				Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
					Results: []resourceapi.DeviceRequestAllocationResult{{
						Request: "nic", Driver: "nic.example.com", Pool: "n1/fast", Device: device,
					}},
				}},
			},
		}
	}

	put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "n1", Labels: map[string]string{corev1.LabelHostname: "n1", "zone": "z"},
	}, Spec: corev1.NodeSpec{Unschedulable: true}})
	put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}})
	put(slice("s1", "n1", "n1/fast"), slice("s2", "n2", "n2/fast"))
	put(pod("daemon", "DaemonSet"), pod("web", "ReplicaSet"))
	put(claim("daemon", "a"), claim("web", "b"))

	must.Succeed(t, s.AddLike("n1=2"))
	var nodes, pods []string
	for _, node := range s.Nodes {
		nodes = append(nodes, node.Name)
	}
	for _, pod := range s.Pods {
		pods = append(pods, pod.Name+"@"+pod.Spec.NodeName)
	}
	if want := []string{"n1", "n2", "n1-like-1", "n1-like-2"}; !slices.Equal(nodes, want) {
		t.Errorf("nodes %q, want %q", nodes, want)
	}
	want := []string{"daemon@n1", "web@n1", "daemon-like-1@n1-like-1", "daemon-like-2@n1-like-2"}
	if !slices.Equal(pods, want) {
		t.Errorf("pods %q, want %q", pods, want)
	}

	made := s.Nodes[2]
	if made.Labels[corev1.LabelHostname] != "n1-like-1" || made.Labels["zone"] != "z" ||
		made.Spec.Unschedulable {
		t.Errorf("node %+v", made)
	}
	own := s.Slices[2].Spec
	if len(s.Slices) != 4 || *own.NodeName != "n1-like-1" || own.Pool.Name != "n1/fast-like-1" ||
		len(own.Devices) != 1 || own.Devices[0].Name != "b" {
		t.Errorf("%d slices, the first new one is %+v; want the device that no DaemonSet has",
			len(s.Slices), own)
	}

	for argument, want := range map[string]string{
		"n3": "there is no Node n3", "n1=0": "must be 1-1000", "n1=1001": "must be 1-1000",
		"n1=x": "must be 1-1000", "n1": "there is a Node n1-like-1 already",
	} {
		if err := s.AddLike(argument); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", argument, err, want)
		}
	}
}
