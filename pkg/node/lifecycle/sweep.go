package lifecycle

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// Recover continues what was interrupted or failed, at agent start and whenever it is called. What is attached to a
// namespace that lives is left alone. Functions are not set up by it: see [Manager.SetUp].
func (m *Manager) Recover(ctx context.Context) error {
	return m.resume(ctx, func(step Step) bool { return step != SetUp })
}

// SetUp sets reserved Functions up again: the agent may have ended in the middle, and a boot undoes SFs and drivers, while
// the kubelet, which remembers what it allocated, starts pods on them without another Allocate. One that fails keeps no
// other from being set up. What is done already is not done again.
func (m *Manager) SetUp(ctx context.Context) error {
	return m.resume(ctx, func(step Step) bool { return step == SetUp })
}

// resume carries out [Resume] for all Functions at once, where the step is one of those selected.
func (m *Manager) resume(ctx context.Context, selected func(Step) bool) error {
	all := m.journal.All()
	errs := make([]error, len(all))
	var group sync.WaitGroup
	t := trigger{event: Resume}
	for i, a := range all {
		if !selected(t.rule(a).Step) {
			continue
		}
		group.Go(func() {
			defer wrap(&errs[i], a.Function)
			errs[i] = m.withLock(ctx, a.Function, func(a journal.Attachment) error {
				d, err := m.decide(ctx, t, a.Function)
				if err != nil || !selected(d.step) {
					return err
				}
				return m.carryOut(ctx, a, d.step)
			})
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// Run continues what is half done until ctx ends, once in a while, though nobody asks: a release of an earlier run, or
// one that the kubelet gave up. Values from changes are about devices and netdevs: for each, it is checked whether a pod
// has lost a Function, or can have it again.
func (m *Manager) Run(ctx context.Context, changes <-chan struct{}) error {
	defer m.announcing.Wait()
	defer m.stop()
	queue := newDeviceQueue()
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
			m.log.Error(err, "Functions are not what they should be yet; trying again", "after", m.options.SweepEvery.String())
		}
		m.sweep(ctx)
		m.options.Changed()
	}
}

// sweep releases reservations that nobody needs any more. The kubelet says nothing when it takes an extended resource
// back from a pod that never ran, and forgets the claims of its checkpoint with it. A reservation must be unneeded in two
// sweeps in a row, so that a pod which the kubelet is just starting is not taken for gone.
func (m *Manager) sweep(ctx context.Context) {
	before := m.abandoned
	m.abandoned = map[function.ID]time.Time{}
	asking, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	t := trigger{event: Sweep, assigned: sync.OnceValues(func() (map[string]podresources.Assignment, error) {
		return m.options.Kubelet.Assigned(asking)
	})}
	for _, a := range m.journal.All() {
		if a.State != journal.Reserved || time.Since(a.ReservedAt) < m.options.AbandonedAfter {
			continue
		}
		d, err := m.decide(ctx, t, a.Function)
		if err != nil || d.step != Release {
			continue
		}
		reservedAt := d.Record.ReservedAt
		m.abandoned[a.Function] = reservedAt
		if seen, twice := before[a.Function]; !twice || !seen.Equal(reservedAt) {
			continue
		}
		if err := m.makeWay(ctx, t, d); err != nil {
			m.log.Error(err, "The Function is not back yet; trying again", "function", a.Function.String(),
				"after", m.options.SweepEvery.String())
		}
		m.healthChanged(a.Function)
	}
}
