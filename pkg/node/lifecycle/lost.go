package lifecycle

import (
	"cmp"
	"context"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// firstRetry and slowestRetry are the pauses before a netdev that could not go back to its pod is tried again.
const firstRetry, slowestRetry = 500 * time.Millisecond, 30 * time.Second

// deviceQueue has the Functions whose device may have gone or come back. One goroutine at a time works on a Function.
type deviceQueue = workqueue.TypedRateLimitingInterface[function.ID]

func newDeviceQueue() deviceQueue {
	return workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[function.ID](firstRetry, slowestRetry))
}

// queueDevices queues the Functions that pods have lost, or may have lost by what the inventory saw last. The inventory
// may be wrong about a netdev that was just moved.
func (m *Manager) queueDevices(queue deviceQueue) {
	for _, a := range m.journal.All() {
		suspect := a.State == journal.Lost || a.State == journal.Attached
		if a.State == journal.Attached && m.options.Functions != nil {
			f, known := m.options.Functions.Get(a.Function)
			suspect = !known || f.Netdev != "" || f.Driver == ""
		}
		if suspect {
			queue.Add(a.Function)
		}
	}
}

// checkDevices calls [Manager.deviceChanged] for the Functions of the queue, for all at once, until it is shut down.
func (m *Manager) checkDevices(ctx context.Context, queue deviceQueue) {
	var checks sync.WaitGroup
	defer checks.Wait()
	for {
		id, shutdown := queue.Get()
		if shutdown {
			return
		}
		checks.Go(func() {
			defer queue.Done(id)
			switch err := m.deviceChanged(ctx, id); {
			case err == nil:
				queue.Forget(id)
			case ctx.Err() == nil:
				m.log.Error(err, "A pod has not got back yet what it lost; trying again")
				queue.AddRateLimited(id)
			}
		})
	}
}

// deviceChanged carries out [DeviceChanges] for a Function until nothing follows from it.
func (m *Manager) deviceChanged(ctx context.Context, id function.ID) (err error) {
	defer wrap(&err, id)
	for ctx.Err() == nil {
		d, err := m.decide(ctx, trigger{event: DeviceChanges}, id)
		if err != nil || d.step != Lose && d.step != Reattach {
			return err
		}
		_, err = m.ifUnchanged(ctx, d, func(have journal.Attachment) error { return m.carryOut(ctx, have, d.step) })
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// lose records that the sandbox lost the Function, and withdraws it from containers that start meanwhile. What the PF
// enforces for the pod stays. After a reattachment that was interrupted, the netdev is first brought to the host. The
// caller has the Function's lock.
func (m *Manager) lose(ctx context.Context, a journal.Attachment) error {
	again := a.State == journal.Reattaching
	if again {
		if err := m.restore(ctx, a); err != nil {
			return err
		}
	}
	a.State = journal.Lost
	if a.LostAt.IsZero() {
		a.LostAt = time.Now().UTC()
	}
	if m.options.Devices != nil {
		// Before the journal says Lost, as nothing tries it again after that.
		if err := m.options.Devices.Withdraw(a); err != nil {
			return err
		}
	}
	if err := m.journal.Put(a); err != nil {
		return err
	}
	m.healthChanged(a.Function)
	if again {
		return nil
	}
	m.log.Info("A pod has lost its Function: the device went, or another driver has it", "function", a.Function.String(),
		"interface", a.Interface.Name, "pod", a.Pod.Namespace+"/"+a.Pod.Name, "sandbox", a.Sandbox)
	if m.options.Users != nil {
		m.options.Users.Lost(a)
	}
	return nil
}

// reattach makes the netdev in the sandbox what it was there before it was lost. The record keeps what the netdev was
// before the pod: that is restored in the end, and not what the device is after its reset. The caller has the Function's
// lock.
func (m *Manager) reattach(ctx context.Context, a journal.Attachment) error {
	if err := m.setUp(ctx, a); err != nil {
		return err
	}
	wanted := a
	wanted.Interface = asObserved(a.Interface, *a.Observed)
	device, now, place, err := m.plan(ctx, wanted, a.Place.NetNS)
	if err != nil {
		return err
	}
	if place.Cookie != a.Place.Cookie {
		return nil // the sandbox is gone
	}
	a.State, a.Place, a.Before = journal.Reattaching, place, new(a.Before.Renewed(now))
	if a, err = m.transfer(ctx, a, device, now, wanted.Interface); err != nil {
		return err
	}
	m.healthChanged(a.Function)
	if m.options.Users != nil {
		m.options.Users.Back(a)
	}
	return nil
}

// asObserved is what is wanted of an interface, with what it got where nothing was wanted.
func asObserved(want function.Interface, observed netdev.Observed) function.Interface {
	want.Name = observed.Name
	want.MTU = cmp.Or(want.MTU, observed.MTU)
	want.MAC = cmp.Or(want.MAC, observed.MAC)
	return want
}
