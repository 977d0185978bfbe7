// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

const (
	// askTimeout limits a question to the kubelet while a pod waits.
	askTimeout = time.Second
	// sweepTimeout limits the questions of a sweep to the kubelet and the API server.
	sweepTimeout = 10 * time.Second
	// serveTimeout limits the wait for the Port of a netdev that is back. After that, the log says
	// what is missing.
	serveTimeout = 30 * time.Second

	// admission is how long the kubelet may take between two Allocate calls for the same pod. Other
	// device plugins may be called in between, which takes seconds at most.
	admission = 10 * time.Second
)

// gather has a function for each kind of evidence. It reports whether the evidence is available for
// the decision.
var gather = map[Evidence]func(*Manager, context.Context, trigger, *decision) (bool, error){
	NoOtherPod:     (*Manager).noOtherPod,
	Unneeded:       (*Manager).unneeded,
	Untouched:      (*Manager).untouched,
	NamespaceGone:  (*Manager).namespaceGone,
	ReservedForPod: (*Manager).reservedForPod,
	NetdevGone:     (*Manager).netdevGone,
	DeviceBack:     (*Manager).deviceBack,
	RetryDue:       (*Manager).retryDue,
}

// noOtherPod reports whether the kubelet names no other pod that has the Function. It sets the
// decision's resource, or its refusal with the name of the other pod. A kubelet that does not
// answer, for example because it restarts, does not keep a pod from starting.
func (m *Manager) noOtherPod(ctx context.Context, t trigger, d *decision) (bool, error) {
	if m.options.Kubelet == nil {
		return true, nil
	}

	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()

	if t.event == Prepare {
		_, _ = m.options.Kubelet.Refresh(ctx) // Refresh logs its error itself.
		other := m.options.Kubelet.InUse(d.id, "")
		d.refusal = TakenError{other}
		return other == "", nil
	}

	assigned, err := m.options.Kubelet.Assigned(ctx)
	if err != nil {
		m.log.Info("The kubelet does not say which pods have which Functions; the request is "+
			"trusted",
			"function", d.id.String(), "pod", t.pod.Namespace+"/"+t.pod.Name, "error", err.Error())
		return true, nil
	}

	by, ok := assigned[d.id.String()]
	if ok && t.pod.Name != "" && by.Pod != "" &&
		(by.Namespace != t.pod.Namespace || by.Pod != t.pod.Name) {
		d.refusal = taken("the kubelet gave it to %s", by)
		return false, nil
	}

	d.resource = by.Resource
	return true, nil
}

// sandboxExists reports whether the network namespace to which the Function was moved still exists.
// No network namespace survives a reboot.
func (m *Manager) sandboxExists(a journal.Attachment) (bool, error) {
	if a.BootID != m.options.BootID {
		return false, nil
	}
	return m.engine.Alive(a.Place)
}

func (m *Manager) namespaceGone(_ context.Context, _ trigger, d *decision) (bool, error) {
	lives, err := m.sandboxExists(d.record)
	return !lives, err
}

func (m *Manager) unneeded(ctx context.Context, t trigger, d *decision) (bool, error) {
	a := d.record
	if m.options.Kubelet == nil || a.Claim.UID == "" &&
		m.ages.of(a, sinceReserved) < m.options.AbandonedAfter {
		return false, nil
	}

	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()

	if t.assigned == nil {
		t.assigned = func() (map[string]podresources.Assignment, error) {
			return m.options.Kubelet.Assigned(ctx)
		}
	}

	assigned, err := t.assigned()
	_, has := assigned[a.Function.String()]
	switch {
	case has || err != nil:
		return false, nil
	case a.Claim.UID == "":
		return true, nil
	case m.options.Claims == nil:
		return false, nil
	}

	pods, allocated, err := m.options.Claims.Consumers(ctx, a.Claim)
	return err == nil && (!allocated || len(pods) == 0), nil
}

func (m *Manager) untouched(_ context.Context, t trigger, d *decision) (bool, error) {
	have, want := d.record, t.want
	// A driver for userspace programs, which use device nodes, was bound.
	bound := have.Setup != nil && have.Setup.Driver != ""
	if have.Nodes || want.Nodes || bound || have.Ended != nil || have.Resource != want.Resource {
		return false, nil
	}

	// Both clocks must agree, because each alone may be wrong: the wall clock may have been set,
	// and an agent that was started in between counts from 0.
	age := m.options.Now().Sub(have.ReservedAt)
	if age < 0 || age > admission || m.ages.of(have, sinceReserved) > admission {
		return false, nil
	}

	return reflect.DeepEqual(have.Port, want.Port) && sameSetup(have.Setup, want.Setup), nil
}

// sameSetup reports whether a Function that keeps its driver was set up as it is wanted now.
func sameSetup(have, want *journal.Setup) bool {
	if have == nil || want == nil {
		return have == want
	}
	return have.SF == want.SF && want.Driver == ""
}

// reservedForPod reports whether a claim that was prepared for another pod is reserved for the
// event's pod, too or instead.
func (m *Manager) reservedForPod(ctx context.Context, t trigger, d *decision) (bool, error) {
	if m.options.Claims == nil {
		return false, nil
	}

	c := d.record.Claim
	pods, allocated, err := m.options.Claims.Consumers(ctx, c)
	if err != nil {
		return false, fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	return allocated && slices.Contains(pods, t.pod.UID), nil
}

func (m *Manager) netdevGone(ctx context.Context, _ trigger, d *decision) (bool, error) {
	a := d.record
	name, err := m.netdevs.Netdev(a.Function)
	gone := errors.Is(err, fs.ErrNotExist)
	if a.Interface.Userspace {
		// A driver that makes netdevs is not the driver that was bound for the pod.
		gone = gone || err == nil && a.Setup != nil && a.Setup.Driver != "" || m.replaced(a)
	} else {
		gone = gone || name != "" || errors.Is(err, inventory.ErrNoNetdev)
	}

	if !gone || m.passedToVM(a) {
		return false, nil
	}

	lives, err := m.sandboxExists(a)
	if !lives || err != nil || a.Interface.Userspace {
		return lives, err
	}

	holds, err := m.engine.Holds(a.Place, a.Before.Identity)
	if holds || err != nil || name == "" {
		return !holds && err == nil, err
	}

	moved, err := m.movedByPod(ctx, a)
	return !moved && err == nil, err
}

// replaced reports whether another device is in place of the one that a program of the pod had. The
// program cannot get that one back. It is false if anything of it is unknown.
func (m *Manager) replaced(a journal.Attachment) bool {
	if !a.Interface.Userspace || a.Inode == 0 || a.BootID != m.options.BootID {
		return false
	}
	now := m.inode(a.Function)
	return now != 0 && now != a.Inode
}

// passedToVM reports whether the pod's runtime has passed the netdev's device to a virtual machine,
// as Kata Containers do. The device exists and has a driver for userspace programs then, so that
// the pod has not lost it.
func (m *Manager) passedToVM(a journal.Attachment) bool {
	f, exists := m.options.Seen(a.Function)
	return exists && !a.Interface.Userspace && f.Userspace()
}

// deviceBack reports whether the Function can go back to the sandbox that lost it. It waits for the
// Function's Port, and fails if the Port is not up in time.
func (m *Manager) deviceBack(ctx context.Context, _ trigger, d *decision) (bool, error) {
	a := d.record
	if a.Interface.Userspace {
		return false, nil
	}

	id := a.Function
	if ownSF(a) {
		// The SF is made again on its PF.
		id = function.ID{Address: a.PF}
	}
	if name, err := m.netdevs.Netdev(id); name == "" || err != nil {
		return false, nil
	}
	// The kernel may be ahead of the inventory, which must know the Function to say what containers
	// get.
	if _, known := m.options.Seen(id); !known {
		return false, nil
	}
	if lives, err := m.sandboxExists(a); !lives || err != nil {
		return false, err
	}
	if err := m.losses.pause(a); err != nil {
		return false, err
	}
	if m.options.Serve == nil {
		return true, nil
	}

	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()

	err := m.options.Serve(ctx, a)
	return err == nil, err
}
