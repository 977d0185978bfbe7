// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// Recover continues work that was interrupted or failed. It does not touch Functions that are
// attached to a network namespace that exists, and it sets nothing up: see [Manager.SetUp].
func (m *Manager) Recover(ctx context.Context) error {
	return m.resume(ctx, false)
}

// SetUp completes the setup of reserved Functions. The agent may have ended before the setup was
// complete. A reboot undoes SFs and drivers, and the kubelet then starts pods on their old
// allocations without another Allocate.
func (m *Manager) SetUp(ctx context.Context) error {
	return m.resume(ctx, true)
}

// resume carries out [Resume] for several Functions at once. If setUp is set, these are the
// Functions whose step is SetUp; otherwise, all the others. Each setup is reported when it has
// ended, because another card may take long.
func (m *Manager) resume(ctx context.Context, setUp bool) error {
	all := m.journal.All()
	for _, a := range all {
		m.ages.observe(a)
	}

	errs := make([]error, len(all))
	var group sync.WaitGroup
	t := trigger{event: Resume}
	for i, a := range all {
		if (t.rule(a).Step == SetUp) != setUp {
			continue
		}
		group.Go(func() {
			defer wrap(&errs[i], a.Function)
			errs[i] = m.withLock(ctx, a.Function, func(a journal.Attachment) error {
				d, err := m.decide(ctx, t, a.Function)
				if err != nil || (d.step == SetUp) != setUp {
					return err
				}
				return m.carryOut(ctx, a, d.step)
			})
			if setUp {
				m.options.Changed() // device nodes come with a driver that was bound
			}
		})
	}

	group.Wait()
	return errors.Join(errs...)
}

// Run carries out [Resume] and [Sweep] at intervals, and [DeviceChanges] after every value from
// changes, until ctx ends.
func (m *Manager) Run(ctx context.Context, changes <-chan struct{}) error {
	defer m.endAnnouncements()
	for _, a := range m.journal.All() {
		m.ages.observe(a)
	}

	// The queue has the Functions whose device may have disappeared or returned. Only one goroutine
	// works on a Function at a time.
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[function.ID](500*time.Millisecond,
			30*time.Second))
	var checking sync.WaitGroup
	defer checking.Wait()
	defer queue.ShutDown()

	checking.Go(func() { m.checkDevices(ctx, queue) })
	tick := time.NewTicker(m.options.SweepEvery)
	defer tick.Stop()

	for {
		m.queueDevices(queue)
		select {
		case <-ctx.Done():
			return nil
		case <-changes:
			continue
		case <-tick.C:
		}

		if err := errors.Join(m.Recover(ctx), m.SetUp(ctx)); err != nil && ctx.Err() == nil {
			m.log.Error(err, "Functions are not what they should be yet; trying again", "after",
				m.options.SweepEvery.String())
		}

		m.sweep(ctx)
		m.options.Changed()
	}
}

// sweep releases reservations that no pod needs any more. The agent has to look for them, because
// the kubelet reports nothing when it takes an extended resource or a claim from a pod that never
// ran. A reservation must be unneeded in two consecutive sweeps, because the kubelet may just be
// starting its pod during one of them.
func (m *Manager) sweep(ctx context.Context) {
	m.ages.keep(m.recorded())
	before := m.abandoned
	m.abandoned = map[function.ID]time.Time{}
	asking, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()

	t := trigger{event: Sweep,
		assigned: sync.OnceValues(func() (map[string]podresources.Assignment, error) {
			return m.options.Kubelet.Assigned(asking)
		})}

	for _, a := range m.journal.All() {
		if a.State != journal.Reserved || m.ages.of(a, sinceReserved) < m.options.AbandonedAfter {
			continue
		}

		d, err := m.decide(ctx, t, a.Function)
		if err != nil || d.step != Release {
			continue
		}

		reservedAt := d.record.ReservedAt
		m.abandoned[a.Function] = reservedAt
		if seen, twice := before[a.Function]; !twice || !seen.Equal(reservedAt) {
			continue
		}

		if err := m.takeBack(ctx, t, d); err != nil {
			m.log.Error(err, "The Function is not back yet; trying again", "function",
				a.Function.String(),
				"after", m.options.SweepEvery.String())
		}

		m.healthChanged(a.Function)
	}
}

// recorded returns the Functions that have a record.
func (m *Manager) recorded() map[function.ID]bool {
	ids := map[function.ID]bool{}
	for _, a := range m.journal.All() {
		ids[a.Function] = true
	}
	return ids
}

// queueDevices queues the Functions that pods have lost or may have lost, and quarantined Functions
// whose device has changed. It uses what the inventory saw last, which may be outdated for a netdev
// that was just moved.
func (m *Manager) queueDevices(queue workqueue.TypedRateLimitingInterface[function.ID]) {
	for _, a := range m.journal.All() {
		if t, tried := m.failures.get(a.Function); a.Quarantined() && tried &&
			m.view(a) != t.device {
			queue.AddAfter(a.Function, changePause-time.Since(t.last))
		}

		f, known := m.options.Seen(a.Function)
		changed := !known || f.Netdev != "" || f.Driver == ""
		if a.State == journal.Lost || a.State == journal.Attached && changed {
			queue.Add(a.Function)
		}
	}
}

// checkDevices carries out [DeviceChanges] for the queued Functions, in parallel, until the queue
// is shut down.
func (m *Manager) checkDevices(
	ctx context.Context, queue workqueue.TypedRateLimitingInterface[function.ID],
) {
	var checks sync.WaitGroup
	defer checks.Wait()

	for id, shutdown := queue.Get(); !shutdown; id, shutdown = queue.Get() {
		checks.Go(func() {
			defer queue.Done(id)
			switch _, err := m.reconcile(ctx, trigger{event: DeviceChanges}, id, nil); {
			case err == nil:
				queue.Forget(id)
			case ctx.Err() == nil:
				wrap(&err, id)
				m.log.Error(err,
					"A Function whose device changed is not what it should be yet; trying again")
				queue.AddRateLimited(id)
			}
		})
	}
}

// lose records that the sandbox lost the Function, and withdraws the Function from containers that
// start later. The settings that the PF enforces for the pod stay. The caller must hold the
// Function's lock.
func (m *Manager) lose(ctx context.Context, a journal.Attachment) error {
	again := a.State == journal.Reattaching
	if again { // the netdev may be in the sandbox
		if err := m.restore(ctx, &a); err != nil {
			return err
		}
		a.Rebinding = ""
	}

	a.State, a.LostAt = journal.Lost, cmp.Or(a.LostAt, m.options.Now().UTC())
	// The Function is withdrawn before the journal says Lost, because nothing retries it after
	// that.
	if err := m.options.Expose(a); err != nil {
		return err
	}
	if err := m.put(a); err != nil {
		return err
	}

	m.healthChanged(a.Function)
	if !again {
		m.losses.add(a)
		m.log.Info("A pod has lost its Function: the device went, or another driver has it",
			"function", a.Function.String(),
			"interface", a.Interface.Name, "pod", a.Pod.Namespace+"/"+a.Pod.Name,
			"sandbox", a.Sandbox)
		m.options.Report(a)
	}

	return nil
}

// reattach moves the netdev back into the sandbox, with the properties that it had there. A later
// release restores the properties that the netdev had before the pod, not those that it has after
// the reset of the device. The caller must hold the Function's lock.
func (m *Manager) reattach(ctx context.Context, a journal.Attachment) error {
	if err := m.setUp(ctx, a); err != nil {
		return err
	}

	// Properties that the pod did not ask for keep the values that they had in the sandbox before
	// the reset.
	wanted := a
	wanted.Interface.Name = a.Observed.Name
	wanted.Interface.MTU = cmp.Or(a.Interface.MTU, a.Observed.MTU)
	// An InfiniBand interface has its address from its GUID.
	if !a.Interface.Bond.SetsMAC() && a.Observed.MAC.PortGUID() == "" {
		wanted.Interface.MAC = cmp.Or(a.Interface.MAC, a.Observed.MAC)
	}
	device, now, place, err := m.plan(ctx, wanted, a.Place.NetNS)
	if err != nil {
		return err
	}
	if place.Cookie != a.Place.Cookie {
		return nil // the sandbox is gone
	}

	a.State, a.Place, a.Before = journal.Reattaching, place, new(a.Before.Renewed(now))
	_, err = m.transfer(ctx, a, device, now, wanted.Interface)
	return err
}
