// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// attached returns the record of a VF in a pod, for a claim that claimtest made with the name.
func attached(t *testing.T, claimName string, index int) journal.Attachment {
	t.Helper()
	f := pooltest.VF(0x3b, index)
	return journal.Attachment{
		Function: f.ID, PF: f.PF, VFIndex: index,
		Claim: journal.Claim{
			Namespace: "default", Name: claimName, UID: claimtest.Allocated(claimName).UID,
			Request: "a", Pool: fastPool, Device: f.ID.DeviceName(),
		},
		Pod:       journal.Pod{Namespace: "default", Name: "pod1", UID: "pod1-uid"},
		Interface: function.Interface{Name: "net1"},
		State:     journal.Attached, Before: &netdev.Snapshot{},
		Observed: &netdev.Observed{
			Name: "net1", MAC: "02:00:00:00:00:01", MTU: 1500,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")},
		},
	}
}

// reporting runs a reporter for a cluster with the claims and a journal with the records.
func reporting(
	t *testing.T, claims []runtime.Object, records ...journal.Attachment,
) (*StatusReporter, *fake.Clientset) {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })

	for _, a := range records {
		if err := j.Put(a); err != nil {
			t.Fatal(err)
		}
	}

	clientset := fake.NewClientset(claims...)
	r := NewStatusReporter(clientset.ResourceV1(), j, NewMetrics(prometheus.NewRegistry()),
		testr.New(t))
	must.Run(t, r.Run)

	return r, clientset
}

func statusOf(
	t *testing.T, clientset *fake.Clientset, name string,
) []resourceapi.AllocatedDeviceStatus {
	t.Helper()
	c, err := clientset.ResourceV1().ResourceClaims("default").Get(t.Context(), name,
		metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c.Status.Devices
}

// TestStatusWithoutClaim: nothing is written for a Function without a claim.
func TestStatusWithoutClaim(t *testing.T) {
	r := NewStatusReporter(nil, nil, NewMetrics(prometheus.NewRegistry()), testr.New(t))
	if r.Report(journal.Claim{}); r.queue.Len() != 0 {
		t.Error("there is a claim without a UID in the queue")
	}
}

func TestStatus(t *testing.T) {
	c := claimtest.Allocated("net", claimtest.Result("a", fastPool, "0000-3b-00-2"),
		claimtest.Result("b", fastPool, "0000-3b-00-3"),
		claimtest.Result("c", fastPool, "0000-3b-00-4"))

	provisioned := metav1.Condition{
		Type: v1alpha1.ConditionProvisioned, Status: metav1.ConditionTrue,
		Reason: v1alpha1.ReasonUp,
	}

	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{
		{Driver: "gpu.example.com", Pool: "p", Device: "gpu-0"},
		{Driver: v1alpha1.GroupName, Pool: fastPool, Device: "0000-3b-00-2",
			Conditions: []metav1.Condition{provisioned}},
	}

	notYet := attached(t, "net", 1)
	notYet.State = journal.Attaching
	lost := attached(t, "net", 3) // this Function is no longer allocated to the claim
	r, clientset := reporting(t, []runtime.Object{c}, attached(t, "net", 0), notYet,
		attached(t, "net", 2), lost)
	r.Report(journal.Claim{Namespace: "default", Name: "net", UID: c.UID, Request: "a"})
	must.Eventually(t, "status is written", func() bool {
		return len(statusOf(t, clientset, "net")) == 3
	})

	ready := func(device string) metav1.Condition {
		return metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue,
			Reason:  v1alpha1.ReasonAttached,
			Message: "Function " + device + " is net1 in pod pod1"}
	}

	data := &resourceapi.NetworkDeviceData{
		InterfaceName: "net1", HardwareAddress: "02:00:00:00:00:01", IPs: []string{"10.1.0.2/24"},
	}
	want := []resourceapi.AllocatedDeviceStatus{
		{Driver: "gpu.example.com", Pool: "p", Device: "gpu-0"},
		{Driver: v1alpha1.GroupName, Pool: fastPool, Device: "0000-3b-00-2",
			Conditions: []metav1.Condition{provisioned, ready("0000:3b:00.2")}, NetworkData: data},
		{Driver: v1alpha1.GroupName, Pool: fastPool, Device: "0000-3b-00-4",
			Conditions: []metav1.Condition{ready("0000:3b:00.4")}, NetworkData: data},
	}

	if diff := gocmp.Diff(want, statusOf(t, clientset, "net"),
		cmpopts.IgnoreFields(metav1.Condition{}, "LastTransitionTime")); diff != "" {
		t.Errorf("status.devices: -want +got\n%s", diff)
	}
}

// TestStatusOfBond: both ports of a bond have the name and the addresses of the bond, and a MAC address
// of their own.
func TestStatusOfBond(t *testing.T) {
	bonded := func(n int, mac function.MAC) journal.Attachment {
		a := attached(t, "net", n)
		a.Interface.Name = fmt.Sprintf("net%d", n+1)
		a.Interface.Bond = &function.Bond{Name: "bond0", Mode: function.BondActiveBackup, MIIMon: 100}
		a.Observed.Name, a.Observed.MAC, a.Observed.Bond = a.Interface.Name, mac, "bond0"
		return a
	}
	c := claimtest.Allocated("net", claimtest.Result("a", fastPool, "0000-3b-00-2"),
		claimtest.Result("a", fastPool, "0000-3b-00-3"))
	left, right := bonded(0, "02:00:00:00:00:01"), bonded(1, "02:00:00:00:00:02")
	r, clientset := reporting(t, []runtime.Object{c}, left, right)
	r.Report(left.Claim)
	must.Eventually(t, "status is written", func() bool {
		return len(statusOf(t, clientset, "net")) == 2
	})

	for n, status := range statusOf(t, clientset, "net") {
		want := &resourceapi.NetworkDeviceData{
			InterfaceName: "bond0", HardwareAddress: fmt.Sprintf("02:00:00:00:00:0%d", n+1),
			IPs: []string{"10.1.0.2/24"},
		}
		if diff := gocmp.Diff(want, status.NetworkData); diff != "" {
			t.Errorf("networkData: -want +got\n%s", diff)
		}
		message := fmt.Sprintf("Function 0000:3b:00.%d is net%d, a port of bond0, in pod pod1", n+2, n+1)
		if got := status.Conditions[0].Message; got != message {
			t.Errorf("message %q, want %q", got, message)
		}
	}

	environment := environment("VF", "a", []content{{attachment: left}, {attachment: right}})
	if !slices.Contains(environment, "XPU_INTERFACE_VF=bond0,bond0") {
		t.Errorf("environment %q", environment)
	}

	left.Observed = nil
	if got := networkData(left).InterfaceName; got != "bond0" {
		t.Errorf("the interface is %s before it is attached, want bond0", got)
	}
}

// TestStatusLost: the claim's status says that its pod lost the Function, and whether the pod gets
// it back.
func TestStatusLost(t *testing.T) {
	c := claimtest.Allocated("net", claimtest.Result("a", fastPool, "0000-3b-00-2"),
		claimtest.Result("b", fastPool, "0000-3b-00-3"))
	comesBack, ended := attached(t, "net", 0), attached(t, "net", 1)
	for _, a := range []*journal.Attachment{&comesBack, &ended} {
		a.State, a.LostAt = journal.Lost, time.Now()
	}

	ended.Interface.Userspace = true
	r, clientset := reporting(t, []runtime.Object{c}, comesBack, ended)
	r.Report(comesBack.Claim)
	must.Eventually(t, "status is written", func() bool {
		return len(statusOf(t, clientset, "net")) == 2
	})

	for i, want := range []string{
		"pod pod1 lost Function 0000:3b:00.2 with its device; it gets it back when the device is " +
			"there again",
		"pod pod1 lost Function 0000:3b:00.3 with its device, and its program cannot get it " +
			"back: delete the pod",
	} {
		condition := statusOf(t, clientset, "net")[i].Conditions[0]
		if condition.Status != metav1.ConditionFalse || condition.Reason != v1alpha1.ReasonLost ||
			condition.Message != want {
			t.Errorf("condition %+v, want message %q", condition, want)
		}
	}
}

// TestStatusRetries: a write is retried if the API server refuses it, or if another client changed
// the claim in the meantime.
func TestStatusRetries(t *testing.T) {
	c := claimtest.Allocated("net", claimtest.Result("a", fastPool, "0000-3b-00-2"))
	r, clientset := reporting(t, []runtime.Object{c}, attached(t, "net", 0))

	failures := []error{
		errors.New("the API server is away"),
		apierrors.NewConflict(schema.GroupResource{Resource: "resourceclaims"}, "net",
			errors.New("changed")),
	}

	var attempts atomic.Int32
	clientset.PrependReactor("update", "resourceclaims",
		func(kubetesting.Action) (bool, runtime.Object, error) {
			if attempt := int(attempts.Add(1)); attempt <= len(failures) {
				return true, nil, failures[attempt-1]
			}
			return false, nil, nil
		})

	r.Report(journal.Claim{Namespace: "default", Name: "net", UID: c.UID})
	must.Eventually(t, "status is written", func() bool {
		return len(statusOf(t, clientset, "net")) == 1
	})
	if got := attempts.Load(); got != 3 {
		t.Errorf("%d attempts, want 3", got)
	}
}

// TestStatusNotWritten: nothing is written for a claim that is gone, even if another claim has its
// name, or for a claim whose status is up to date.
func TestStatusNotWritten(t *testing.T) {
	later := claimtest.Allocated("later", claimtest.Result("a", fastPool, "0000-3b-00-3"))
	later.UID = "another-uid"
	deallocated := claimtest.Allocated("deallocated")
	deallocated.Status.Allocation = nil
	last := claimtest.Allocated("last", claimtest.Result("a", fastPool, "0000-3b-00-5"))
	r, clientset := reporting(t, []runtime.Object{later, deallocated, last},
		attached(t, "gone", 0), attached(t, "later", 1), attached(t, "deallocated", 2),
		attached(t, "last", 3))
	for _, name := range []string{"gone", "later", "deallocated", "last"} {
		r.Report(attached(t, name, 0).Claim)
	}

	must.Eventually(t, "last is written", func() bool {
		return len(statusOf(t, clientset, "last")) == 1
	})
	r.Report(attached(t, "last", 3).Claim)
	must.Eventually(t, "all are done", func() bool { return r.queue.Len() == 0 })
	r.queue.ShutDownWithDrain()
	var updated []string
	for _, action := range clientset.Actions() {
		if update, ok := action.(kubetesting.UpdateAction); ok {
			updated = append(updated, update.GetObject().(*resourceapi.ResourceClaim).Name)
		}
	}

	if diff := gocmp.Diff([]string{"last"}, updated); diff != "" {
		t.Errorf("updates: -want +got\n%s", diff)
	}

	if n := r.queue.NumRequeues(journal.Claim{
		Namespace: "default", Name: "gone", UID: "gone-uid",
	}); n != 0 {
		t.Errorf("the claim that is gone is tried again %d times", n)
	}
}

func TestMetadataOfAnSF(t *testing.T) {
	a := attached(t, "net", 0)
	a.Function = function.SubfunctionID(a.PF, 88)
	if got := *metadata(a).
		Attributes["resource.kubernetes.io/pciBusID"].StringValue; got != string(a.PF) {
		t.Errorf("pciBusID is %q, want the PF's %s", got, a.PF)
	}
}
