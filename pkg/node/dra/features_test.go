// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"testing"
	"time"

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
		"stores them": {store: change(func(*resourceapi.DeviceAttribute) {}), version: "v1.37.0",
			want: true},
		"and tells no version": {store: change(func(*resourceapi.DeviceAttribute) {})},
		"and tells a version that is not understood": {
			store: change(func(*resourceapi.DeviceAttribute) {}), version: "main"},
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
			f := &Features{Client: storing(tt.store, tt.version), Node: "node1", Changed: func() {}, Log: testr.New(t)}
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

// TestForbiddenLists checks that a policy that forbids lists hides none of what else was learnt.
func TestForbiddenLists(t *testing.T) {
	client := storing(func(s *resourceapi.ResourceSlice) error {
		if len(s.Spec.Devices[0].Attributes) > 0 {
			return apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("policy"))
		}
		return nil
	}, "v1.36.1")
	f := &Features{Client: client, Node: "node1", Changed: func() {}, Log: testr.New(t)}
	must.Succeed(t, f.check(t.Context()))

	want := devicemodel.AllFeatures()
	want.Lists = false
	want.Counters, want.CountersHarm = false, devicemodel.CountersHarm("v1.36.1")
	got, _ := f.Current()
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("features: -want +got\n%s", diff)
	}
}

// TestRefused checks that lists are left out at once after an API server refused a slice, and that
// another API server that takes lists does not bring them back until listsRefused is over.
func TestRefused(t *testing.T) {
	changes := 0
	f := &Features{
		Client: storing(func(*resourceapi.ResourceSlice) error { return nil }, "v1.37.0"),
		Node:   "node1", Changed: func() { changes++ }, Log: testr.New(t),
	}
	f.Refused()
	if _, known := f.Current(); known || changes > 0 {
		t.Fatal("a refusal before the first answer says something of the features")
	}

	check := func(when string, lists bool, wantChanges int) {
		t.Helper()
		got, _ := f.Current()
		want := devicemodel.AllFeatures()
		want.Lists = lists
		if diff := gocmp.Diff(want, got); diff != "" || changes != wantChanges {
			t.Errorf("%s: %d changes, want %d; features -want +got\n%s", when, changes, wantChanges,
				diff)
		}
	}
	must.Succeed(t, f.check(t.Context()))
	check("at first", true, 1)
	f.Refused()
	check("refused", false, 2)
	f.Refused()
	must.Succeed(t, f.check(t.Context()))
	check("asked again", false, 2)

	f.refused.Store(new(time.Now().Add(-listsRefused)))
	must.Succeed(t, f.check(t.Context()))
	check("later", true, 3)
}

// storing returns an API server of a version that stores slices as they are, unless store refuses
// or changes them.
func storing(store func(*resourceapi.ResourceSlice) error, gitVersion string) *fake.Clientset {
	client := fake.NewClientset()
	client.Discovery().(*discovery.FakeDiscovery).FakedServerVersion =
		&version.Info{GitVersion: gitVersion}
	client.PrependReactor("create", "resourceslices",
		func(action clienttesting.Action) (bool, runtime.Object, error) {
			asked := action.(clienttesting.CreateAction).GetObject()
			slice := asked.DeepCopyObject().(*resourceapi.ResourceSlice)
			return true, slice, store(slice)
		})
	return client
}
