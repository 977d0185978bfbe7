// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestWhyPending checks that the answer about a pod that matches two devices by lists depends on the
// feature gate of the scheduler, and says so if nobody gave it.
func TestWhyPending(t *testing.T) {
	const pcieRoot, claimed = "resource.kubernetes.io/pcieRoot", "both"
	device := func(name string, roots ...string) resourceapi.Device {
		return resourceapi.Device{Name: name,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				pcieRoot: {StringValues: roots},
			}}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "main"}},
			ResourceClaims: []corev1.PodResourceClaim{
				{Name: claimed, ResourceClaimName: new(claimed)},
			},
		},
	}
	from := &snapshot.Snapshot{
		Nodes: []*corev1.Node{{
			ObjectMeta: metav1.ObjectMeta{Name: "node1"},
			Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
				corev1.ResourcePods: resource.MustParse("10"),
			}},
		}},
		Namespaces: []*corev1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: "default"}}},
		Classes:    []*resourceapi.DeviceClass{{ObjectMeta: metav1.ObjectMeta{Name: "nic"}}},
		Claims: []*resourceapi.ResourceClaim{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: claimed},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{
					Name: "nics", Exactly: &resourceapi.ExactDeviceRequest{
						DeviceClassName: "nic", Count: 2,
						AllocationMode: resourceapi.DeviceAllocationModeExactCount,
					},
				}},
				Constraints: []resourceapi.DeviceConstraint{
					{MatchAttribute: new(resourceapi.FullyQualifiedName(pcieRoot))},
				},
			}},
		}},
		Pods: []*corev1.Pod{pod},
		Slices: []*resourceapi.ResourceSlice{{
			ObjectMeta: metav1.ObjectMeta{Name: "slice"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: "nic.example.com", NodeName: new("node1"),
				Pool:    resourceapi.ResourcePool{Name: "node1", Generation: 1, ResourceSliceCount: 1},
				Devices: []resourceapi.Device{device("a", "r1", "r2"), device("b", "r3", "r2")},
			},
		}},
	}

	const note = "if the scheduler has the feature gate, add --feature-gates DRAListTypeAttributes=true"
	for gates, want := range map[string]struct {
		node string
		note bool
	}{
		"":                            {"", true},
		"DRAListTypeAttributes=false": {"", false},
		"DRAListTypeAttributes=true":  {"node1", false},
	} {
		why, node, err := whyPending(t.Context(), from, "v1.37.1", gates, pod)
		must.Succeed(t, err)
		if noted := strings.Contains(strings.Join(why, "\n"), note); node != want.node ||
			noted != want.note || node == "" && len(why) == 0 {
			t.Errorf("gates %q: node %q, note %t; want %+v; why: %s", gates, node, noted, want, why)
		}
	}

	from.Slices[0].Spec.Devices = nil
	why, _, err := whyPending(t.Context(), from, "v1.37.1", "", pod)
	must.Succeed(t, err)
	if strings.Contains(strings.Join(why, "\n"), note) {
		t.Errorf("the note is there without lists: %s", why)
	}
}
