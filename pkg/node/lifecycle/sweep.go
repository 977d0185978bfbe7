package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// Recover continues, at agent start and whenever it is called, what was interrupted or failed. What is attached to a
// namespace that lives is left alone. Functions are not set up by it: see [Manager.SetUp].
func (m *Manager) Recover(ctx context.Context) error {
	return m.resume(ctx, func(step Step) bool { return step != SetUp })
}

// SetUp has reserved Functions set up again: the agent may have ended in the middle, and a boot undoes SFs and
// drivers, while the kubelet, which remembers what it allocated, starts pods on them without asking again. One that fails
// keeps no other from being set up. What is done already is not done again.
func (m *Manager) SetUp(ctx context.Context) error {
	return m.resume(ctx, func(step Step) bool { return step == SetUp })
}

// resume takes the steps that are meant, for all Functions at once.
func (m *Manager) resume(ctx context.Context, means func(Step) bool) error {
	all := m.journal.All()
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, a := range all {
		if p := (party{event: Resume}); !means(p.rule(a, true).Step) {
			continue
		}
		group.Go(func() {
			err := m.with(ctx, a.Function, func(a journal.Attachment) error { return m.resumeOne(ctx, a, means) })
			if err != nil {
				errs[i] = fmt.Errorf("Function %s: %w", a.Function, err)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

func (m *Manager) resumeOne(ctx context.Context, a journal.Attachment, means func(Step) bool) error {
	step, _, err := m.decide(ctx, party{event: Resume}, a.Function, &Settled{Record: a, Exists: true})
	switch {
	case err != nil || !means(step):
		return err
	case step == SetUp:
		return m.setUp(ctx, a)
	}
	return m.carryOut(ctx, a, step)
}

// Run continues every now and then what is half done, until ctx ends: a release of an earlier run, or one that the
// kubelet gave up. Everything else is driven by events: for every value from changes, which is about devices and netdevs,
// it is looked whether a pod has lost a Function, or can have it again.
func (m *Manager) Run(ctx context.Context, changes <-chan struct{}) error {
	defer m.announcing.Wait()
	defer m.stop()
	queue := newDevices()
	defer m.following.Wait()
	defer queue.ShutDown()
	m.following.Go(func() { m.follow(ctx, queue) })
	m.lookAtDevices(queue)
	tick := time.NewTicker(m.options.SweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changes:
			m.lookAtDevices(queue)
			continue
		case <-tick.C:
		}
		if err := errors.Join(m.Recover(ctx), m.SetUp(ctx)); err != nil && ctx.Err() == nil {
			m.log.Error(err, "Functions are not what they should be yet; trying again", "after", m.options.SweepEvery.String())
		}
		m.sweep(ctx)
		m.lookAtDevices(queue)
		m.options.Changed()
	}
}

// sweep releases what is reserved and nobody needs any more. The kubelet says nothing when it takes an extended resource
// back from a pod that never ran, and forgets the claims of its checkpoint with it. It is looked twice, so that a pod which
// the kubelet is just starting is not taken for gone.
func (m *Manager) sweep(ctx context.Context) {
	before := m.abandoned
	m.abandoned = map[function.ID]time.Time{}
	p := party{event: Sweep, assigned: m.askOnce()}
	for _, a := range m.journal.All() {
		if a.State != journal.Reserved || time.Since(a.ReservedAt) < m.options.AbandonedAfter {
			continue
		}
		step, _, err := m.decide(ctx, p, a.Function, &Settled{Record: a, Exists: true})
		if err != nil || step != Release {
			continue
		}
		m.abandoned[a.Function] = a.ReservedAt
		if seen, twice := before[a.Function]; !twice || !seen.Equal(a.ReservedAt) {
			continue
		}
		if err := m.makeWay(ctx, p, a, step); err != nil {
			m.log.Error(err, "The Function is not back yet; trying again", "function", a.Function.String(),
				"after", m.options.SweepEvery.String())
		}
		m.tell(a.Function)
	}
}

// askOnce asks the kubelet when its answer is wanted first, and remembers it.
func (m *Manager) askOnce() func(context.Context) (map[string]podresources.Assignment, error) {
	var assigned map[string]podresources.Assignment
	var err error
	var once sync.Once
	return func(ctx context.Context) (map[string]podresources.Assignment, error) {
		once.Do(func() { assigned, err = m.options.Kubelet.Assigned(ctx) })
		return assigned, err
	}
}
