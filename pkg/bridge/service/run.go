// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
)

// scopeFailed is a Scope of the agent's own: all objects that failed.
const scopeFailed plane.Scope = -1

// Run follows the events of the data plane, and keeps the data plane as clients want it. It returns
// nil when ctx ends, and an error when there are no more events. It may be called once.
func (a *Agent) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, a.queue.ShutDown)()
	ended := make(chan error, 1)
	go func() {
		ended <- a.plane.Watch(a.queue.Add)
		a.queue.ShutDown()
	}()

	for {
		change, shutdown := a.queue.Get()
		if ctx.Err() != nil {
			return nil
		}
		if shutdown {
			return errors.Join(errors.New("opi-bridge: no more netdev events"), <-ended)
		}

		a.handle(ctx, change)
		a.queue.Done(change)
	}
}

// handle reconciles what may have changed.
func (a *Agent) handle(ctx context.Context, change plane.Change) {
	release, err := a.acquire(ctx)
	if err != nil {
		return // because ctx has ended, and so does Run
	}
	defer release()

	switch change.Scope {
	case plane.ScopeAll:
		a.reconcileAll()
	case plane.ScopeVXLAN:
		a.networks.reconcileEach(a.networks.withKey(keyVXLAN))
	case plane.ScopeObject:
		a.reconcileObject(change.Object)
	case plane.ScopeRouting:
		a.reconcileRouting()
	case plane.ScopeMissing:
		a.ports.reconcileFailed()
		// A driver may say later, without an event, which Function a netdev represents.
		a.retrySoon()
	case plane.ScopeFilter:
		if err := a.filter.Restore(); err != nil {
			a.log.Error(err, "restore the source filter")
			a.queue.AddRateLimited(change)
			return
		}
		a.queue.Forget(change)
		a.log.Info("somebody changed the source filter, it is as wanted again")
	case scopeFailed:
		if a.retry() {
			a.queue.AddRateLimited(change)
		}
	}
}

// reconcileObject reconciles an object, and the SVIs that need it.
func (a *Agent) reconcileObject(object plane.Object) {
	switch object.Kind {
	case plane.KindNetwork:
		a.networks.reconcile(object.ID, false)
		a.reconcileSVIs(keyNetwork(object.ID))
	case plane.KindPort:
		a.ports.reconcile(object.ID, false)
	case plane.KindVRF:
		a.vrfs.reconcile(object.ID, false)
		a.reconcileSVIs(keyVRF(object.ID))
	case plane.KindSVI:
		a.svis.reconcile(object.ID, false)
	}
}

// reconcileRouting reconciles the VRFs, and then the SVIs that are in them.
func (a *Agent) reconcileRouting() {
	a.vrfs.reconcileEach(slices.Clone(a.vrfs.ids))
	a.svis.reconcileEach(slices.Clone(a.svis.ids))
}

// reconcileAll reconciles each object after those that it needs. The gateways come before the
// ports, so that no port can pretend to be one.
func (a *Agent) reconcileAll() {
	a.networks.reconcileEach(slices.Clone(a.networks.ids))
	a.reconcileRouting()
	a.ports.reconcileEach(slices.Clone(a.ports.ids))
}

// retry reconciles everything that failed, and reports whether something still fails.
func (a *Agent) retry() (failed bool) {
	a.networks.reconcileFailed()
	a.vrfs.reconcileFailed()
	a.svis.reconcileFailed()
	a.ports.reconcileFailed()
	return len(a.networks.failed)+len(a.vrfs.failed)+len(a.svis.failed)+len(a.ports.failed) > 0
}

// retrySoon makes Run retry after a second, and then after 2, 4 ... 30 s. A retry that is due
// sooner is not postponed. Retries are necessary because not every cause of a failure ends with an
// event. For example, the kernel sends no event for an alternative name of a netdev that is down
// (netdev_state_change).
func (a *Agent) retrySoon() {
	a.queue.Forget(plane.Change{Scope: scopeFailed})
	a.queue.AddRateLimited(plane.Change{Scope: scopeFailed})
}
