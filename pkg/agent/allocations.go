package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/outfit"
	"github.com/opiproject/xpu-device-plugin/pkg/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/provisioner"
)

// undoTimeout is how long an Allocate that failed may take to give the Function up again, beyond its own time.
const undoTimeout = time.Second

// allocations has Functions ready for pods that the kubelet allocates them to. It is a [deviceplugin.Provisioner].
type allocations struct {
	node        string
	journal     *journal.Journal
	functions   functions
	attacher    reserver
	releases    *releases
	provisioner provisioner.Provisioner
	log         logr.Logger
}

// functions knows the node's Functions as they are at this moment: fitted out, where they are.
type functions interface {
	Get(inventory.ID) (inventory.Function, bool)
}

// Reserve records that the Function goes to the next pod that comes for it, and has it fitted out as its pool says.
func (a *allocations) Reserve(ctx context.Context, f inventory.Function, p pool.Pool) (inventory.Function, error) {
	reservation := a.reservation(f, p)
	if err := a.freeFromLast(ctx, reservation); err != nil {
		return f, err
	}
	if reservation.Outfit == nil && reservation.Port == nil {
		return f, nil // nothing to be undone
	}
	if err := a.attacher.Reserve(ctx, reservation); err != nil {
		return f, err
	}
	now, exists := a.functions.Get(f.ID)
	if !exists {
		return f, errors.New("is gone from this node")
	}
	return now, nil
}

// Reserved says whether the Function was reserved for a pod that never came.
func (a *allocations) Reserved(f inventory.Function) bool {
	have, exists := a.journal.Get(f.ID)
	return exists && isAbandonable(have) && have.CNI == nil
}

// reservation is for whomever the kubelet allocates the Function to. What the interface is called, the CNI plugin says
// when it comes.
func (a *allocations) reservation(f inventory.Function, p pool.Pool) journal.Attachment {
	mac := provisioner.MAC(a.node, f.ID)
	reservation := journal.Attachment{
		Function: f.ID, PF: f.PF, PFName: f.PFName, VFIndex: f.Index, Resource: p.ResourceName(),
		Outfit: outfit.Wish(p.Spec, f.ID, "", mac),
	}
	if deviceplugin.ProvisionsAtAllocate(p) {
		reservation.Port = &journal.Port{DevicePool: p.Name, Network: p.Spec.Network, MAC: mac}
		reservation.Interface = link.Interface{MAC: mac}
	}
	return reservation
}

// Ready reserves the Function, if that is not done, and has the xPU serve it.
func (a *allocations) Ready(ctx context.Context, f inventory.Function, p pool.Pool) error {
	if _, err := a.Reserve(ctx, f, p); err != nil {
		return err
	}
	_, err := a.provisioner.Provision(ctx, provisioner.Request{
		Function: f, DevicePool: p.Name, Network: p.Spec.Network, MAC: provisioner.MAC(a.node, f.ID),
	})
	return err
}

// GiveUp has the Function free again, which no pod has. The kubelet waits: what cannot be released now, the sweep
// releases.
func (a *allocations) GiveUp(ctx context.Context, f inventory.Function, p pool.Pool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := a.releases.Release(ctx, f.ID, func(have journal.Attachment) bool {
		return have.State == journal.Reserved && have.CNI == nil && have.Claim.UID == "" && have.Resource == p.ResourceName()
	})
	if err != nil {
		a.log.Error(err, "A Function that was allocated in vain is not free yet; trying again later",
			"resource", p.ResourceName())
	}
}

// freeFromLast waits until the Function is free from its last pod. The kubelet allocates only what no pod has any more:
// the CNI DEL of what a pod still has is on its way, as it may be in the spool. What is on the host again without one
// is released now, and so is what was reserved for a pod that never came, and fitted out as its pool does not want it any
// more.
func (a *allocations) freeFromLast(ctx context.Context, want journal.Attachment) error {
	id := want.Function
	watching, stop := context.WithCancel(ctx)
	defer stop()
	changes := a.journal.Subscribe(watching)
	for {
		if err := a.releases.Free(ctx, id); err != nil {
			return err
		}
		have, exists := a.journal.Get(id)
		if !exists || have.Claim.UID != "" || have.CNI == nil && (have.State != journal.Reserved || sameFit(have, want)) {
			return nil
		}
		if have.State == journal.Reserved {
			left := func(now journal.Attachment) bool { return isAbandonable(now) && now.ReservedAt.Equal(have.ReservedAt) }
			if err := a.releases.Release(ctx, id, left); err != nil {
				return err
			}
			continue
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return fmt.Errorf("is %s in pod %s/%s, which is gone for the kubelet: its CNI DEL has not come",
				have.State, have.Pod.Namespace, have.Pod.Name)
		}
	}
}

// sameFit says whether a Function that was reserved before is fitted out as it is wanted now.
func sameFit(have, want journal.Attachment) bool {
	if have.Outfit == nil || want.Outfit == nil {
		return have.Outfit == nil
	}
	return have.Outfit.SF == want.Outfit.SF && have.Outfit.Driver == want.Outfit.Driver
}
