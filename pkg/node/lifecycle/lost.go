package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

const (
	// serveTimeout is how long a netdev that is back waits at a time for its Port. Then the log says what is missing, and
	// it is tried again.
	serveTimeout = 30 * time.Second
	// firstRetry and slowestRetry are the pauses before a netdev that could not go back to its pod is tried again.
	firstRetry, slowestRetry = 500 * time.Millisecond, 30 * time.Second
)

// devices is the queue of Functions of which it is to be looked whether their device went or came back. Each is looked at
// by one goroutine at a time.
type devices = workqueue.TypedRateLimitingInterface[function.ID]

func newDevices() devices {
	return workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[function.ID](firstRetry, slowestRetry))
}

// lookAtDevices queues the Functions of pods that seem to have lost them, and all that are lost.
func (m *Manager) lookAtDevices(queue devices) {
	for _, a := range m.journal.All() {
		if a.State == journal.Lost || a.State == journal.Attached && m.seemsGone(a) {
			queue.Add(a.Function)
		}
	}
}

// seemsGone is the quick look, at what the inventory saw last. It may be wrong about a netdev that was just moved.
func (m *Manager) seemsGone(a journal.Attachment) bool {
	if m.options.Functions == nil {
		return true
	}
	f, known := m.options.Functions.Get(a.Function)
	return !known || f.Netdev != "" || f.Driver == ""
}

// follow looks at the Functions of the queue until it is shut down.
func (m *Manager) follow(ctx context.Context, queue devices) {
	for {
		id, ended := queue.Get()
		if ended {
			return
		}
		m.following.Go(func() {
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

// deviceChanged looks what the Function's device is now to the pod that has it, until nothing follows from that.
func (m *Manager) deviceChanged(ctx context.Context, id function.ID) error {
	for ctx.Err() == nil {
		a, exists := m.journal.Get(id)
		if !exists {
			return nil
		}
		step, _, err := m.decide(ctx, party{event: DeviceChanges}, id, &Settled{Record: a, Exists: true})
		switch {
		case err != nil:
		case step == Lose:
			err = m.ifStill(ctx, a, func() error { return m.lose(ctx, a) })
		case step == Reattach:
			err = m.ifStill(ctx, a, func() error { return m.reattach(ctx, a) })
		default:
			return nil
		}
		if err != nil {
			return fmt.Errorf("Function %s: %w", id, err)
		}
	}
	return ctx.Err()
}

// netdevGone says whether a sandbox that lives has lost what was attached to it.
func (m *Manager) netdevGone(a journal.Attachment) (bool, error) {
	name, err := m.netdevs.Netdev(a.Function)
	gone := errors.Is(err, fs.ErrNotExist)
	if a.Interface.Userspace {
		// A driver that makes netdevs is not the one that was bound for the pod.
		gone = gone || err == nil && a.Setup != nil && a.Setup.Driver != ""
	} else {
		gone = gone || name != "" || errors.Is(err, inventory.ErrNoNetdev)
	}
	if !gone || a.BootID != m.options.BootID {
		return false, nil
	}
	alive, err := m.engine.Alive(a.Place)
	if !alive || err != nil || a.Interface.Userspace {
		return alive, err
	}
	holds, err := m.engine.Holds(a.Place, a.Before.Identity)
	return !holds, err
}

// deviceBack says whether the Function can go back to the sandbox that lost it, and waits for its Port. That the Port is
// not there in time is an error.
func (m *Manager) deviceBack(ctx context.Context, a journal.Attachment) (bool, error) {
	if a.Interface.Userspace || a.BootID != m.options.BootID {
		return false, nil
	}
	id := a.Function
	if ownSF(a) {
		id = function.ID{Address: a.PF} // by which the SF is made again
	}
	if name, err := m.netdevs.Netdev(id); name == "" || err != nil {
		return false, nil
	}
	if m.options.Functions != nil {
		// The kernel may be ahead of what is known of the Function, and what containers get of it is not known then.
		if _, known := m.options.Functions.Get(id); !known {
			return false, nil
		}
	}
	if alive, err := m.engine.Alive(a.Place); !alive || err != nil {
		return false, err
	}
	if m.options.Ports == nil {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	err := m.options.Ports.Serve(ctx, a)
	return err == nil, err
}

// lose writes down that the sandbox lost the Function. Containers that start meanwhile do not get it. What the PF enforces
// for the pod stays; the netdev of a reattachment that was interrupted goes to the host. The caller has the Function's
// lock.
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
		// Before the journal says Lost: nothing would try it again after that.
		if err := m.options.Devices.Withdraw(a); err != nil {
			return err
		}
	}
	if err := m.journal.Put(a); err != nil {
		return err
	}
	m.tell(a.Function)
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

// reattach makes the netdev in the sandbox what it was there before it was lost. What is given back one day is what the
// netdev was before the pod, and not what the device is after its reset. The caller has the Function's lock.
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
	a, touched, err := m.carry(ctx, a, device, now, wanted.Interface)
	if err != nil && touched {
		return errors.Join(err, m.loseAgain(context.WithoutCancel(ctx), a.Function))
	}
	if err != nil {
		return err
	}
	m.tell(a.Function)
	if m.options.Users != nil {
		m.options.Users.Back(a)
	}
	return nil
}

// loseAgain ends a reattachment that failed. The caller has the Function's lock.
func (m *Manager) loseAgain(ctx context.Context, id function.ID) error {
	a, _ := m.journal.Get(id)
	a.State = journal.Reattaching // also where it failed after the netdev was attached
	return m.lose(ctx, a)
}

// asObserved is what is wanted of an interface, with what it got where nothing was wanted.
func asObserved(want function.Interface, observed netdev.Observed) function.Interface {
	want.Name = observed.Name
	want.MTU = cmp.Or(want.MTU, observed.MTU)
	want.MAC = cmp.Or(want.MAC, observed.MAC)
	return want
}

// ownSF says whether the Function is an SF that exists for its owner only.
func ownSF(a journal.Attachment) bool { return a.Setup != nil && a.Setup.SF }
