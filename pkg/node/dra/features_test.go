// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"testing"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/version"
	discovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestListsReadBack checks that lists are published only to an API server that stores what it is
// told, whether another one refuses them, drops them or keeps a part.
func TestListsReadBack(t *testing.T) {
	change := func(to func(a *resourceapi.DeviceAttribute)) func(*resourceapi.ResourceSlice) error {
		return func(s *resourceapi.ResourceSlice) error {
			for name, a := range s.Spec.Devices[0].Attributes {
				to(&a)
				s.Spec.Devices[0].Attributes[name] = a
			}
			return nil
		}
	}
	refuse := func(err error) func(*resourceapi.ResourceSlice) error {
		return func(s *resourceapi.ResourceSlice) error {
			if len(s.Spec.Devices[0].Attributes) > 0 {
				return err
			}
			return nil
		}
	}
	slices := schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}
	failed := errors.New("no answer")

	for name, tt := range map[string]struct {
		store   func(*resourceapi.ResourceSlice) error
		version string
		want    bool
		err     error
	}{
		"stores them":    {store: change(func(*resourceapi.DeviceAttribute) {}), want: true},
		"and is of 1.36": {store: change(func(*resourceapi.DeviceAttribute) {}), version: "v1.36.6"},
		"refuses what is left": {store: refuse(apierrors.NewInvalid(slices, "x",
			field.ErrorList{field.Required(field.NewPath("spec"), "exactly one value")}))},
		"does not know the fields": {store: refuse(apierrors.NewBadRequest("unknown field"))},
		"drops all": {store: change(func(a *resourceapi.DeviceAttribute) {
			*a = resourceapi.DeviceAttribute{}
		})},
		"drops numbers": {store: change(func(a *resourceapi.DeviceAttribute) {
			a.IntValues = nil
		})},
		"drops texts": {store: change(func(a *resourceapi.DeviceAttribute) {
			a.StringValues = nil
		})},
		"keeps the first": {store: change(func(a *resourceapi.DeviceAttribute) {
			a.IntValues = a.IntValues[:min(1, len(a.IntValues))]
		})},
		"does not answer": {store: refuse(failed), err: failed},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			client.Discovery().(*discovery.FakeDiscovery).FakedServerVersion =
				&version.Info{GitVersion: tt.version}
			client.PrependReactor("create", "resourceslices",
				func(action clienttesting.Action) (bool, runtime.Object, error) {
					asked := action.(clienttesting.CreateAction).GetObject()
					slice := asked.DeepCopyObject().(*resourceapi.ResourceSlice)
					return true, slice, tt.store(slice)
				})

			f := &Features{Client: client, Node: "node1", Changed: func() {}, Log: testr.New(t)}
			if err := f.check(t.Context()); !errors.Is(err, tt.err) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			got, known := f.Current()
			if known == (tt.err != nil) || got.Lists != tt.want {
				t.Errorf("known: %t, features %+v", known, got)
			}
		})
	}
}

// TestRefusedQuestion checks that a cluster that answers nothing is taken for one with the
// defaults, which have no lists.
func TestRefusedQuestion(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("create", "resourceslices",
		func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{}, "",
				errors.New("policy"))
		})
	f := &Features{Client: client, Node: "node1", Changed: func() {}, Log: testr.New(t)}
	must.Succeed(t, f.check(t.Context()))
	got, _ := f.Current()
	if diff := gocmp.Diff(devicemodel.DefaultFeatures(), got); diff != "" {
		t.Errorf("features: -want +got\n%s", diff)
	}
}
