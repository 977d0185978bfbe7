// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestConsumers: a claim's pods are those that the API server names for a claim with this UID and
// this device.
func TestConsumers(t *testing.T) {
	known := journal.Claim{
		Namespace: "default", Name: "c", UID: "c-uid", Request: "nic", Pool: "p", Device: "d",
	}

	claim := func(uid types.UID, device string) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: uid},
		}
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "nic", Driver: v1alpha1.GroupName, Pool: "p", Device: device},
			},
		}}

		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: "pod", UID: "pod-uid"},
		}
		return c
	}

	for name, test := range map[string]struct {
		objects []runtime.Object
		want    bool
	}{
		"the claim":                  {[]runtime.Object{claim("c-uid", "d")}, true},
		"another claim of the name":  {[]runtime.Object{claim("other", "d")}, false},
		"the claim, another device":  {[]runtime.Object{claim("c-uid", "e")}, false},
		"another claim, the device?": {[]runtime.Object{claim("other", "e")}, false},
		"no claim":                   {nil, false},
	} {
		pods, isAllocated, err := API{fake.NewClientset(test.objects...)}.Consumers(t.Context(),
			known)
		if err != nil || isAllocated != test.want ||
			slices.Equal(pods, []types.UID{"pod-uid"}) != test.want {
			t.Errorf("%s: pods %q, allocated %t, %v", name, pods, isAllocated, err)
		}
	}
}

// TestConsumer: a claim must be reserved for one consumer, which is a pod.
func TestConsumer(t *testing.T) {
	for _, test := range []struct {
		consumers []resourceapi.ResourceClaimConsumerReference
		want      string
	}{
		{[]resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "a"}}, ""},
		{nil, "0 pods share it"},
		{
			[]resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", Name: "a"}, {Resource: "pods", Name: "b"},
			}, "2 pods share it",
		},
		{
			[]resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", Name: "a"},
				{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "workers"},
			}, "is reserved for podgroups workers, but an interface can be in one pod only",
		},
		{[]resourceapi.ResourceClaimConsumerReference{{Resource: "jobs", Name: "a"}},
			"is reserved for jobs a, but an interface can be in one pod only"},
		{
			[]resourceapi.ResourceClaimConsumerReference{
				{APIGroup: "example.com", Resource: "pods", Name: "a"},
			}, "is reserved for pods a, but",
		},
	} {
		c := &resourceapi.ResourceClaim{
			Status: resourceapi.ResourceClaimStatus{ReservedFor: test.consumers},
		}
		_, err := consumer(c)
		if (err == nil) != (test.want == "") || err != nil &&
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: error %v, want %q", test.consumers, err, test.want)
		}
	}
}

// TestEarlierPrepare: the reservation of an earlier Prepare is found for each Function of the
// claim.
func TestEarlierPrepare(t *testing.T) {
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	must.Succeed(t, err)
	t.Cleanup(func() { j.Close() })

	first, second := function.ID{Address: "0000:3b:00.2"}, function.ID{Address: "0000:3b:00.3"}
	claimed := function.Interface{Name: "net1", MTU: 9000}
	for _, a := range []journal.Attachment{
		{
			Function: first, PF: "0000:3b:00.0", State: journal.Reserved,
			Claim: journal.Claim{Namespace: "default", Name: "c", UID: "c-uid"},
			Setup: &journal.Setup{Driver: "vfio-pci"}, Interface: function.Interface{Name: "net7"},
			CNI: &journal.CNI{ContainerID: "x", IfName: "net7", Claimed: &claimed},
		},
		{
			Function: second, PF: "0000:3b:00.0", State: journal.Reserved,
			Claim:     journal.Claim{Namespace: "default", Name: "c", UID: "c-uid"},
			Interface: function.Interface{Name: "net2"},
		},
	} {
		must.Succeed(t, j.Put(a))
	}

	d := &Driver{Journal: j}
	for id, want := range map[function.ID]struct {
		driver v1alpha1.FunctionDriver
		name   string
	}{first: {v1alpha1.DriverVFIO, "net1"}, second: {"", "net2"}} {
		earlier := d.preparedBefore("c-uid", id)
		if got := earlier.BackToReserved().Interface; got.Name != want.name {
			t.Errorf("%s: earlier is %+v, want %s", id, got, want.name)
		}

		driver, err := wantedDriver(earlier, claim.Device{}, function.Function{},
			v1alpha1.DevicePoolSpec{})
		if err != nil || driver != want.driver {
			t.Errorf("%s: driver %q, %v, want %q", id, driver, err, want.driver)
		}
	}

	if got := d.preparedBefore("c-uid", function.ID{Address: "0000:3b:00.4"}); got.Claim.UID != "" {
		t.Errorf("earlier is %+v of a Function that the claim does not have", got)
	}
	if got := d.preparedBefore("another-uid", first); got.Claim.UID != "" || got.Setup != nil {
		t.Errorf("earlier is %+v of a Function that another claim has", got)
	}
}

// TestCreateFirst: the first slices are created only if the API server says that there are none.
func TestCreateFirst(t *testing.T) {
	resources := resourceslice.DriverResources{
		Pools: map[string]resourceslice.Pool{"p": {Slices: []resourceslice.Slice{{}}}},
	}
	owner := resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "node1", UID: "node1-uid"}
	for name, test := range map[string]struct {
		existing []resourceapi.ResourceSlice
		err      error
		creates  int
	}{
		"none":          {nil, nil, 1},
		"some":          {make([]resourceapi.ResourceSlice, 1), nil, 0},
		"not to be had": {nil, apierrors.NewInternalError(errors.New("not now")), 0},
	} {
		client := fake.NewClientset()
		client.PrependReactor("list", "resourceslices",
			func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, &resourceapi.ResourceSliceList{Items: test.existing}, test.err
			})

		creates := 0
		client.PrependReactor("create", "resourceslices",
			func(clienttesting.Action) (bool, runtime.Object, error) {
				creates++
				return true, &resourceapi.ResourceSlice{}, nil
			})

		w := &SliceWriter{Client: client, Node: "node1"}
		if err := w.createFirst(context.Background(), owner, resources); !errors.Is(err,
			test.err) || creates != test.creates {
			t.Errorf("%s: %d created, %v, want %d, %v", name, creates, err, test.creates, test.err)
		}
	}
}
