// SPDX-License-Identifier: Apache-2.0

package kubecache_test

import (
	"fmt"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kubecache"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// largest is metadata with about as much as the API server takes.
func largest() metav1.ObjectMeta {
	m := metav1.ObjectMeta{
		Namespace: "default", Name: "large", UID: "uid", ResourceVersion: "7", Generation: 3,
		Annotations: map[string]string{"example.com/a": strings.Repeat("a", 255<<10)},
		Labels:      map[string]string{},
		ManagedFields: []metav1.ManagedFieldsEntry{
			{Manager: "m", FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 64<<10))},
		},
	}

	yes := true
	m.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "pod-uid", Controller: &yes},
	}
	for i := range 1000 {
		name := fmt.Sprintf("example.com/%032d", i)
		m.Labels[name] = strings.Repeat("l", 63)
		m.Finalizers = append(m.Finalizers, name)
		m.OwnerReferences = append(m.OwnerReferences,
			metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: name, UID: "other"})
	}

	return m
}

// largeClaim is a claim of which everything is large, allocated by a driver.
func largeClaim(driver string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: largest()}
	opaque := func(n int) resourceapi.DeviceConfiguration {
		return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driver, Parameters: runtime.RawExtension{Raw: make([]byte, n)},
		}}
	}

	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "nic", Driver: driver, Pool: "node1/p", Device: "d"},
		},
	}}

	for range resourceapi.DeviceConfigMaxSize {
		c.Spec.Devices.Config = append(c.Spec.Devices.Config,
			resourceapi.DeviceClaimConfiguration{DeviceConfiguration: opaque(10 << 10)})
		c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config,
			resourceapi.DeviceAllocationConfiguration{DeviceConfiguration: opaque(10 << 10)})
	}

	for i := range resourceapi.ResourceClaimReservedForMaxSize {
		c.Status.ReservedFor = append(c.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{
				Resource: "pods", Name: fmt.Sprintf("%0253d", i), UID: "u",
			})
	}

	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{
		{Driver: driver, Pool: "node1/p", Device: "d",
			Data: &runtime.RawExtension{Raw: make([]byte, 10<<10)}},
	}

	return c
}

// sizeOf is how many bytes of JSON an object has, which is about what it takes in memory.
func sizeOf(t *testing.T, o any) int {
	t.Helper()
	text, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	must.Succeed(t, err)
	return len(fmt.Sprint(text))
}

// TestOthersClaims: of the largest claim of another driver 1 KiB is kept at most, and what the
// controller asks of it.
func TestOthersClaims(t *testing.T) {
	for what, c := range map[string]*resourceapi.ResourceClaim{
		"allocated": largeClaim("gpu.example.com"),
		"not allocated, and asking for ours": func() *resourceapi.ResourceClaim {
			c := largeClaim(v1alpha1.GroupName)
			c.Status.Allocation = nil
			return c
		}(),
	} {
		allocated := c.Status.Allocation != nil
		trimmed, err := kubecache.TrimClaim(c)
		must.Succeed(t, err)
		c = trimmed.(*resourceapi.ResourceClaim)
		if size := sizeOf(t, c); size > 1<<10 {
			t.Errorf("%s: %d bytes are kept", what, size)
		}

		owner := metav1.GetControllerOf(c)
		known := c.Namespace == "default" && c.Name == "large" && c.UID == "uid" &&
			c.ResourceVersion == "7" && owner != nil && owner.Kind == "Pod"
		if !known || allocated != (c.Status.Allocation != nil) || len(c.Status.ReservedFor) != 1 {
			t.Errorf("%s: %+v", what, c)
		}
	}
}

// TestOwnClaims: the status of a claim with our devices stays whole, because it is written back.
func TestOwnClaims(t *testing.T) {
	c := largeClaim(v1alpha1.GroupName)
	want := c.Status.DeepCopy()
	trimmed, err := kubecache.TrimClaim(c)
	must.Succeed(t, err)
	if diff := gocmp.Diff(want, &trimmed.(*resourceapi.ResourceClaim).Status); diff != "" {
		t.Errorf("status: -want +got\n%s", diff)
	}

	c.Status = resourceapi.ResourceClaimStatus{}
	if size := sizeOf(t, c); size > 1<<10 {
		t.Errorf("%d bytes are kept beside the status", size)
	}
}

// TestTrim: of other kinds nothing but our own annotations is kept of what has no limit.
func TestTrim(t *testing.T) {
	for _, o := range []client.Object{
		&v1alpha1.XPUPort{ObjectMeta: largest()}, &corev1.Service{ObjectMeta: largest()},
		&metav1.PartialObjectMetadata{ObjectMeta: largest()},
	} {
		o.GetAnnotations()[v1alpha1.AnnotationTLSSecret] = "opi-client"
		trimmed, err := kubecache.Trim(o)
		must.Succeed(t, err)
		got := trimmed.(client.Object)
		if diff := gocmp.Diff(map[string]string{v1alpha1.AnnotationTLSSecret: "opi-client"},
			got.GetAnnotations()); diff != "" {
			t.Errorf("%T: annotations -want +got\n%s", o, diff)
		}
		if got.GetManagedFields() != nil || got.GetName() != "large" {
			t.Errorf("%T: %+v", o, got)
		}
	}
	if _, err := kubecache.Trim("text"); err == nil {
		t.Error("what is no object is kept")
	}
}
