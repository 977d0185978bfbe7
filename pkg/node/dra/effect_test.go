// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"testing"

	"github.com/go-logr/logr/testr"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestEffectNoneReadBack checks that the effect None is published only to an API server that was
// seen to store it.
func TestEffectNoneReadBack(t *testing.T) {
	isNone := func(s *resourceapi.ResourceSlice) bool {
		taints := s.Spec.Devices[0].Taints
		return len(taints) > 0 && taints[0].Effect == resourceapi.DeviceTaintEffectNone
	}
	slices := schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}
	forbidden := apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("policy"))

	for name, tt := range map[string]struct {
		store func(*resourceapi.ResourceSlice) error
		want  bool
	}{
		"stores it": {store: func(*resourceapi.ResourceSlice) error { return nil }, want: true},
		"refuses it": {store: func(s *resourceapi.ResourceSlice) error {
			if isNone(s) {
				return apierrors.NewInvalid(slices, "x", nil)
			}
			return nil
		}},
		"makes it another": {store: func(s *resourceapi.ResourceSlice) error {
			if isNone(s) {
				s.Spec.Devices[0].Taints[0].Effect = resourceapi.DeviceTaintEffectNoSchedule
			}
			return nil
		}},
		"does not tell": {store: func(*resourceapi.ResourceSlice) error { return forbidden }},
		"does not tell about it": {store: func(s *resourceapi.ResourceSlice) error {
			if isNone(s) {
				return forbidden
			}
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			client.PrependReactor("create", "resourceslices",
				func(action clienttesting.Action) (bool, runtime.Object, error) {
					asked := action.(clienttesting.CreateAction).GetObject()
					slice := asked.DeepCopyObject().(*resourceapi.ResourceSlice)
					return true, slice, tt.store(slice)
				})

			f := &Features{Client: client, Node: "node1", Changed: func() {}, Log: testr.New(t)}
			must.Succeed(t, f.check(t.Context()))
			if got, known := f.Current(); !known || !got.Taints || got.EffectNone != tt.want {
				t.Errorf("known: %t, features %+v", known, got)
			}
		})
	}
}
