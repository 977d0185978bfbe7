// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
)

// undoTimeout is the additional time that a failed Allocate may take to give the Function up.
const undoTimeout = time.Second

// podAllocator implements [deviceplugin.Allocator].
type podAllocator struct {
	// mac returns the MAC address for the Port of a Function.
	mac func(function.ID) function.MAC
	// portID returns the id of that Port, for the journal.
	portID func(function.ID) string
	// find returns the current state of a Function of this node.
	find        func(function.ID) (f function.Function, exists bool)
	lifecycle   *lifecycle.Manager
	provisioner provisioning.Provisioner
	rdma        *rdmaMoves
	log         logr.Logger
}

// Reserve records that the Function belongs to the next pod that asks for it, and sets it up as its
// pool says. It first releases the Function from its last pod.
//
// The kubelet allocates the Function of an init container once more for a container of the same
// pod, without saying so. Nothing happens in this case. The name of the interface is not known
// before the CNI plugin is called.
func (a *podAllocator) Reserve(
	ctx context.Context, f function.Function, p pool.Pool,
) (function.Function, error) {
	f, err := a.reserve(ctx, f, p)
	if err == nil {
		err = a.rdma.allocated(f, p)
	}
	return f, err
}

func (a *podAllocator) reserve(
	ctx context.Context, f function.Function, p pool.Pool,
) (function.Function, error) {
	mac := a.mac(f.ID)
	reservation := journal.Attachment{
		Function: f.ID, PF: f.PF, PFName: f.PFName, VFIndex: f.Index, Resource: p.ResourceName(),
		Setup: setup.Wanted(p.Spec, f.ID, "", mac), Nodes: givesNodes(f, p),
	}

	if deviceplugin.ProvisionsAtAllocate(p) {
		reservation.Port = a.port(f, p)
		reservation.Interface = function.Interface{MAC: mac}
	}
	if reservation.Setup == nil && reservation.Port == nil { // there will be nothing to undo
		_, err := a.lifecycle.Admit(ctx, reservation)
		return f, err
	}
	if err := a.lifecycle.Reserve(ctx, reservation); err != nil {
		return f, err
	}

	now, exists := a.find(f.ID)
	if !exists {
		return f, errors.New("is gone from this node")
	}

	return now, nil
}

// givesNodes reports whether containers get device nodes of the pool's Function, so that they can
// use it without its netdev.
func givesNodes(f function.Function, p pool.Pool) bool {
	options := p.Options(f)
	return f.Userspace() || p.Spec.Driver != "" || options.RDMA || options.VDPA != ""
}

// Ready makes the xPU serve the Function.
func (a *podAllocator) Ready(ctx context.Context, f function.Function, p pool.Pool) error {
	_, err := a.provisioner.Provision(ctx,
		journal.Attachment{Function: f.ID, PF: f.PF, Port: a.port(f, p)})
	return err
}

// port returns the Port of a Function that is allocated before its pod is known.
func (a *podAllocator) port(f function.Function, p pool.Pool) *journal.Port {
	return &journal.Port{
		ID: a.portID(f.ID), DevicePool: p.Name, Network: p.Spec.Network, MAC: a.mac(f.ID),
	}
}

// GiveUp releases a Function that no pod got. The kubelet waits for this call, so it ends after
// undoTimeout, and a sweep does the rest.
func (a *podAllocator) GiveUp(ctx context.Context, f function.Function, p pool.Pool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := a.lifecycle.GiveUp(ctx, f.ID, p.ResourceName()); err != nil {
		a.log.Error(err,
			"A Function that was allocated in vain is not free yet; trying again later", "resource",
			p.ResourceName())
	}
}
