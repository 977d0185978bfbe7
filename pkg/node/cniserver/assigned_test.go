// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"context"
	"errors"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// kubelet answers which Functions pods have.
type kubelet struct {
	assigned map[string]podresources.Assignment
	err      error
}

func (k kubelet) Assigned(context.Context) (map[string]podresources.Assignment, error) {
	return k.assigned, k.err
}

func (k kubelet) Refresh(context.Context) (bool, error) { return false, k.err }
func (k kubelet) InUse(function.ID, string) string      { return "" }

// nowhere is a node whose pools have no Function.
type nowhere struct{}

func (nowhere) Pools() ([]pool.Pool, bool)           { return nil, true }
func (nowhere) PoolOf(function.ID) (pool.Pool, bool) { return pool.Pool{}, false }
func (nowhere) Considered(function.ID) bool          { return true }

// unread is a node whose pools have not been read yet.
type unread struct{ nowhere }

func (unread) Pools() ([]pool.Pool, bool)  { return nil, false }
func (unread) Considered(function.ID) bool { return false }

// before is a node whose pools were read before the Function appeared, as after each reset of a
// card.
type before struct{ nowhere }

func (before) Considered(function.ID) bool { return false }

// TestAssigned: the kubelet's answer decides which pod may have a Function, and by which resource.
func TestAssigned(t *testing.T) {
	t.Parallel()
	has := func(namespace, name, resource string) map[string]podresources.Assignment {
		return map[string]podresources.Assignment{
			vf.String(): {Namespace: namespace, Pod: name, Container: "app", Resource: resource},
		}
	}
	for name, test := range map[string]struct {
		kubelet kubelet
		// pools are the node's own if nil.
		pools    Pools
		code     uint
		resource string
	}{
		"nobody has it": {kubelet: kubelet{}},
		"the pod has it": {
			kubelet:  kubelet{assigned: has("default", "pod-c1", "xpu.opiproject.org/fast")},
			resource: "xpu.opiproject.org/fast",
		},
		"another has it": {
			kubelet: kubelet{assigned: has("default", "other", "xpu.opiproject.org/fast")},
			code:    CodeTaken,
		},
		"one of another namespace": {
			kubelet: kubelet{assigned: has("kube-system", "pod-c1", "xpu.opiproject.org/fast")},
			code:    CodeTaken,
		},
		"the kubelet is away": {kubelet: kubelet{err: errors.New("no such socket")}},
		"its pool was moved": {
			kubelet: kubelet{assigned: has("default", "pod-c1", "example.com/old")},
			pools:   nowhere{}, resource: "example.com/old",
		},
		// The Function's pool may name a network, in which the xPU would not serve it.
		"no pools are known yet": {
			kubelet: kubelet{assigned: has("default", "pod-c1", "xpu.opiproject.org/fast")},
			pools:   unread{}, code: types.ErrTryAgainLater,
		},
		"the Function came since": {
			kubelet: kubelet{assigned: has("default", "pod-c1", "xpu.opiproject.org/fast")},
			pools:   before{}, code: types.ErrTryAgainLater,
		},
		"in no pool, and no pod has it": {
			kubelet: kubelet{}, pools: nowhere{}, code: CodeNotOffered,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, s := newCard(t)
			c.options.Kubelet = test.kubelet
			s.Lifecycle = c.lifecycle()
			if test.pools != nil {
				s.Pools = test.pools
			}

			checkCode(t, s.handle(t.Context(), addVF("c1", nil), nil), test.code)
			if a, _ := c.Journal.Get(vf); a.Resource != test.resource {
				t.Errorf("resource %q, want %q", a.Resource, test.resource)
			}
		})
	}
}

// TestAssignedToAnother: a request for a Function that the kubelet gave to another pod does not
// touch the other pod's reservation.
func TestAssignedToAnother(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	c.options.Kubelet = kubelet{assigned: map[string]podresources.Assignment{
		vf.String(): {
			Namespace: "default", Pod: "pod-c1", Container: "app",
			Resource: "xpu.opiproject.org/fast",
		},
	}}

	s.Lifecycle = c.lifecycle()
	c.attachErr = errors.New("not yet")
	checkCode(t, s.handle(t.Context(), addVF("c1", nil), nil), CodeAttach)
	checkCode(t, s.handle(t.Context(), addVF("c2", nil), nil), CodeTaken)
	if a, _ := c.Journal.Get(vf); a.CNI == nil || a.CNI.ContainerID != "c1" {
		t.Errorf("record %+v", a)
	}
}
