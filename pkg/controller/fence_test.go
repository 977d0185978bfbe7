// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// leaseReader has one Lease, and counts who asks.
type leaseReader struct {
	client.Reader
	spec  coordinationv1.LeaseSpec
	err   error
	asked atomic.Int32
}

func (r *leaseReader) Get(
	_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption,
) error {
	r.asked.Add(1)
	r.spec.DeepCopyInto(&o.(*coordinationv1.Lease).Spec)
	return r.err
}

var errNoAnswer = errors.New("the API server is away")

func heldBy(holder string, transitions int32) coordinationv1.LeaseSpec {
	return coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseTransitions: &transitions}
}

// TestFence: a process that was elected acts until the Lease is another one's, or was in between,
// or cannot be read.
func TestFence(t *testing.T) {
	reader := &leaseReader{spec: heldBy("pod-1_uid", 3)}
	key := client.ObjectKey{Namespace: "xpu-system", Name: "xpu-controller"}
	fence := NewFence(reader, key, "pod-1")
	later := func() { fence.checked = fence.checked.Add(-fenceAge) }

	for range 3 {
		must.Succeed(t, fence.Check(t.Context()))
	}

	if asked := reader.asked.Load(); asked != 1 {
		t.Errorf("the API server was asked %d times at once", asked)
	}

	for what, change := range map[string]func(){
		"another holder":              func() { reader.spec = heldBy("pod-2_uid", 4) },
		"another process of the host": func() { reader.spec = heldBy("pod-1_other", 3) },
		"another holder in between":   func() { reader.spec = heldBy("pod-1_uid", 5) },
		"no holder":                   func() { reader.spec = coordinationv1.LeaseSpec{} },
		"an API server that is away":  func() { reader.err = errNoAnswer },
		"a clock that was set back": func() {
			reader.err, fence.checked = errNoAnswer, time.Now().Add(time.Hour)
		},
	} {
		reader.spec, reader.err = heldBy("pod-1_uid", 3), nil
		later()
		must.Succeed(t, fence.Check(t.Context()))
		later()
		change()
		if err := fence.Check(t.Context()); err == nil ||
			!strings.Contains(err.Error(), "xpu-system/xpu-controller") {
			t.Errorf("%s: %v", what, err)
		}
	}

	if err := NewFence(&leaseReader{spec: heldBy("pod-2_uid", 1)}, key,
		"pod-1").Check(t.Context()); err == nil {
		t.Error("a process acts that was never elected")
	}

	must.Succeed(t, (*Fence)(nil).Check(t.Context()))
}

// TestNoLeaderAnyMore: a controller whose Lease another one has makes no Port, and asks no OPI
// agent for one.
func TestNoLeaderAnyMore(t *testing.T) {
	reader := &leaseReader{spec: heldBy("pod-2_uid", 1)}
	c := newCluster(t, func(o *Options) {
		o.Fence = NewFence(reader, client.ObjectKey{Name: "lease"}, "pod-1")
	})
	agent := opitest.Start(t)
	c.network("blue", 100, "10.1.0.0/24")
	c.create(&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card"}, Spec: v1alpha1.XPUSpec{
		NodeName: c.node, Endpoint: agent.Config().Endpoint, Insecure: true,
	}})
	o := c.blue("a", 0)
	port := c.podPort(vf(1), "blue")
	c.create(port)

	c.eventually("the controller has looked at its Lease several times", func() error {
		if reader.asked.Load() < 10 {
			return errors.New("it has not")
		}
		return nil
	})

	if err := c.get(c.port(o, vf(0))); !apierrors.IsNotFound(err) {
		t.Errorf("the XPUPort of the claim: %v", err)
	}

	must.Succeed(t, c.get(port))
	if port.Status.Conditions != nil || len(agent.Ports()) > 0 {
		t.Errorf("conditions %+v, and ports %v", port.Status.Conditions, agent.Ports())
	}
}

// TestAddressGivenTwice: two leaders gave an address to two claims. Both Ports stay, and one says
// so until the other has gone.
func TestAddressGivenTwice(t *testing.T) {
	c, _ := withCard(t)
	c.network("blue", 100, "10.1.0.0/24")
	first := c.up(c.blue("a", 0), vf(0))
	c.stop()

	o := c.blue("b", 1)
	second := first.DeepCopy()
	second.ObjectMeta = metav1.ObjectMeta{
		Namespace: c.namespace, Name: claim.PortName(c.node, vf(1)),
		Annotations: map[string]string{addresses.AnnotationAllocation: stampOf(o)},
	}

	second.Spec.Function, second.Spec.MAC, second.Status = claim.FunctionRef(
		vf(1),
	), "02:00:00:00:00:77", v1alpha1.XPUPortStatus{}
	second.Spec.Claim.Name, second.Spec.Claim.UID = o.Name, o.UID
	c.create(second)
	c.start(nil)

	var told, other *v1alpha1.XPUPort
	c.eventually("one of the two says so", func() error {
		for _, pair := range [][2]*v1alpha1.XPUPort{{first, second}, {second, first}} {
			told, other = pair[0], pair[1]
			if err := c.get(told); err != nil {
				return err
			}

			ready := v1alpha1.ReadyOf(told.Status.Conditions)
			if ready.Reason == v1alpha1.ReasonConflict &&
				strings.Contains(ready.Message, "address "+first.Spec.Addresses[0]+
					" belongs to XPUPort "+c.namespace+"/"+other.Name) {
				return nil
			}
		}
		return errors.New("none does")
	})

	c.portReason(other, v1alpha1.ReasonUp, "")
}
