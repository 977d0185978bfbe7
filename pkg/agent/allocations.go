package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/provisioner"
)

// undoTimeout is how long an Allocate that failed may take to give the Function up again, beyond its own time.
const undoTimeout = time.Second

// allocations has the xPU ready for Functions of pools with provisionAt: Allocate. It is a [deviceplugin.Provisioner].
type allocations struct {
	node        string
	journal     *journal.Journal
	attacher    reserver
	releases    *releases
	provisioner provisioner.Provisioner
}

// Ready records that the Function goes to the next pod that comes for it, and has the xPU serve it. If the xPU does
// not, the Function is free again.
func (a *allocations) Ready(ctx context.Context, f inventory.Function, p pool.Pool) error {
	if err := a.freeFromLast(ctx, f.ID); err != nil {
		return err
	}
	mac := provisioner.MAC(a.node, f.ID)
	reservation := journal.Attachment{
		Function: f.ID, PF: f.PF, PFName: f.PFName, VFIndex: f.Index, Resource: p.ResourceName(),
		Port: &journal.Port{DevicePool: p.Name, Network: p.Spec.Network, MAC: mac},
		// What it is called, the CNI plugin says when it comes.
		Interface: link.Interface{MAC: mac},
	}
	if err := a.attacher.Reserve(ctx, reservation); err != nil {
		return err
	}
	_, err := a.provisioner.Provision(ctx, provisioner.Request{
		Function: f, DevicePool: p.Name, Network: p.Spec.Network, MAC: mac,
	})
	if err == nil {
		return nil
	}
	// The kubelet waits. What cannot be released now, the sweep releases.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	release := a.releases.Release(ctx, f.ID, func(have journal.Attachment) bool {
		return have.State == journal.Reserved && have.CNI == nil && have.Resource == reservation.Resource
	})
	return errors.Join(err, release)
}

// freeFromLast waits until the Function is free from its last pod. The kubelet allocates only what no pod has any more:
// the CNI DEL of what a pod still has is on its way, as it may be in the spool. What is on the host again without one
// is released now.
func (a *allocations) freeFromLast(ctx context.Context, id inventory.ID) error {
	watching, stop := context.WithCancel(ctx)
	defer stop()
	changes := a.journal.Subscribe(watching)
	for {
		if err := a.releases.Free(ctx, id); err != nil {
			return err
		}
		have, exists := a.journal.Get(id)
		if !exists || have.Claim.UID != "" || have.CNI == nil {
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
