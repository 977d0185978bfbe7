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

// Recover continues what was interrupted or failed. What is attached to a namespace that lives is
// left alone, and nothing is set up: see [Manager.SetUp].
func (m *Manager) Recover(ctx context.Context) error {
	return m.resume(ctx, false)
}

// SetUp sets reserved Functions up again, as far as they are not: the agent may have ended in the
// middle, and a boot undoes SFs and drivers, while the kubelet starts pods on what it allocated
// before without another Allocate.
func (m *Manager) SetUp(ctx context.Context) error {
	return m.resume(ctx, true)
}

// resume carries out [Resume] for all Functions at once: for those that are to be set up, or for
// all others.
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

	// The queue has the Functions whose device may have gone or come back. One goroutine at a time
	// works on a Function.
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

// sweep releases reservations that nobody needs any more, as the kubelet says nothing when it takes
// an extended resource or a claim back from a pod that never ran. A reservation must be unneeded in
// two sweeps in a row, so that a pod which the kubelet is just starting is not taken for gone.
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

		if err := m.makeWay(ctx, t, d); err != nil {
			m.log.Error(err, "The Function is not back yet; trying again", "function",
				a.Function.String(),
				"after", m.options.SweepEvery.String())
		}

		m.healthChanged(a.Function)
	}
}

// recorded are the Functions that have a record.
func (m *Manager) recorded() map[function.ID]bool {
	ids := map[function.ID]bool{}
	for _, a := range m.journal.All() {
		ids[a.Function] = true
	}
	return ids
}

// queueDevices queues the Functions that pods have lost, or may have lost by what the inventory saw
// last, and those that are quarantined and whose device changed. The inventory may be wrong about a
// netdev that was just moved.
func (m *Manager) queueDevices(queue workqueue.TypedRateLimitingInterface[function.ID]) {
	for _, a := range m.journal.All() {
		if t, tried := m.troubles.get(a.Function); a.Quarantined() && tried &&
			m.look(a) != t.device {
			queue.AddAfter(a.Function, changePause-time.Since(t.last))
		}

		f, known := m.options.Seen(a.Function)
		changed := !known || f.Netdev != "" || f.Driver == ""
		if a.State == journal.Lost || a.State == journal.Attached && changed {
			queue.Add(a.Function)
		}
	}
}

// checkDevices carries out [DeviceChanges] for the Functions of the queue, for all at once, until
// it is shut down.
func (m *Manager) checkDevices(
	ctx context.Context, queue workqueue.TypedRateLimitingInterface[function.ID],
) {
	var checks sync.WaitGroup
	defer checks.Wait()

	for id, shutdown := queue.Get(); !shutdown; id, shutdown = queue.Get() {
		checks.Go(func() {
			defer queue.Done(id)
			switch _, err := m.settle(ctx, trigger{event: DeviceChanges}, id, nil); {
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

// lose records that the sandbox lost the Function, and withdraws it from containers that start
// meanwhile. What the PF enforces for the pod stays. The caller has the Function's lock.
func (m *Manager) lose(ctx context.Context, a journal.Attachment) error {
	again := a.State == journal.Reattaching
	if again { // the netdev may be in the sandbox
		if err := m.restore(ctx, &a); err != nil {
			return err
		}
		a.Rebinding = ""
	}

	a.State, a.LostAt = journal.Lost, cmp.Or(a.LostAt, m.options.Now().UTC())
	// Before the journal says Lost, as nothing tries it again after that.
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

// reattach makes the netdev in the sandbox what it was there. What is restored in the end is what
// the netdev was before the pod, not what it is after the device's reset. The caller has the
// Function's lock.
func (m *Manager) reattach(ctx context.Context, a journal.Attachment) error {
	if err := m.setUp(ctx, a); err != nil {
		return err
	}

	wanted := a // and what nobody asked for as it was in the sandbox
	wanted.Interface.Name = a.Observed.Name
	wanted.Interface.MTU = cmp.Or(a.Interface.MTU, a.Observed.MTU)
	wanted.Interface.MAC = cmp.Or(a.Interface.MAC, a.Observed.MAC)
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
