package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Detach brings the Function back from a sandbox that stops. The reservation stays: the pod may get another sandbox.
// That of a claim is then without the CNI request of the sandbox, also where that never had the Function attached.
// Nothing happens to a Function that another sandbox has.
func (m *Manager) Detach(ctx context.Context, id function.ID, sandbox string) error {
	return m.end(ctx, party{event: SandboxStops, sandbox: sandbox}, id)
}

// Unprepare takes a claim's Functions from it: they are brought back, wherever they are, and then free, at once or when
// the post-delete hooks are done; see [Manager.Free].
func (m *Manager) Unprepare(ctx context.Context, claim types.UID) error {
	var errs []error
	for _, a := range m.journal.ByClaim(claim) {
		errs = append(errs, m.end(ctx, party{event: Unprepare, claim: claim}, a.Function))
	}
	return errors.Join(errs...)
}

// GiveUp makes a Function free that was allocated to a container by the resource, when that cannot be after all.
func (m *Manager) GiveUp(ctx context.Context, id function.ID, resource string) error {
	return m.end(ctx, party{event: GiveUp, resource: resource}, id)
}

// EndRequest ends what a CNI request attached, or wanted to attach: a claim keeps its Function, every other is released.
// but, where set, keeps the event from what it is true for: what came after a DEL that comes late.
func (m *Manager) EndRequest(ctx context.Context, containerID, ifName string, but func(journal.Attachment) bool) error {
	var errs []error
	is := journal.ContainerIs(containerID, ifName)
	for _, a := range m.journal.All() {
		if is(a) {
			p := party{event: Del, containerID: containerID, ifName: ifName, but: but}
			errs = append(errs, m.end(ctx, p, a.Function))
		}
	}
	return errors.Join(errs...)
}

// Free waits until the Function is not on its way to being free any more: it is free, or belongs to somebody. A way back
// that was interrupted is continued. When ctx ends first, the error says what is still to be done.
func (m *Manager) Free(ctx context.Context, id function.ID) error {
	if err := m.waitFree(ctx, id); err != nil {
		return fmt.Errorf("Function %s: %w", id, err)
	}
	return nil
}

func (m *Manager) waitFree(ctx context.Context, id function.ID) error {
	if a, ok := m.journal.Get(id); !ok || a.State != journal.Releasing {
		return nil
	}
	failed := m.with(ctx, id, func(a journal.Attachment) error {
		if a.State != journal.Releasing {
			return nil
		}
		return m.finish(ctx, a)
	})
	var a journal.Attachment
	err := loop.Until(ctx, m.journal.Subscribe, func() (free bool) {
		var exists bool
		a, exists = m.journal.Get(id)
		return !exists || a.State != journal.Releasing
	})
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s: %w", Pending(a), err)
	if !a.Restored() {
		err = errors.Join(err, failed)
	}
	return err
}

// Pending says what a Function that is not back yet waits for. It changes only when that does.
func Pending(a journal.Attachment) string {
	owner := "its last pod"
	if a.Pod.Name != "" {
		owner = fmt.Sprintf("pod %s/%s", a.Pod.Namespace, a.Pod.Name)
	}
	stopped := a.StoppedAt.Format(time.RFC3339)
	switch {
	case !a.Restored():
		return fmt.Sprintf("is not back from %s, which ended at %s: the log of this node's xpu-agent says why", owner, stopped)
	case a.Hooks == nil || a.Hooks.Error == "":
		return fmt.Sprintf("is back from %s, which ended at %s, and waits for its post-delete hooks", owner, stopped)
	}
	return fmt.Sprintf("is back from %s, which ended at %s, and waits for post-delete hook %s, which is tried again: %s",
		owner, stopped, a.Hooks.Next, a.Hooks.Error)
}

// with calls f with the Function's attachment, if there is one, while nobody else works on the Function.
func (m *Manager) with(ctx context.Context, id function.ID, f func(journal.Attachment) error) error {
	unlock, err := m.journal.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	a, ok := m.journal.Get(id)
	if !ok {
		return nil
	}
	return f(a)
}

// bringBack writes down where the attachment goes, and goes there.
func (m *Manager) bringBack(ctx context.Context, a journal.Attachment, state journal.State) error {
	if a.State != state {
		a.State, a.LostAt = state, time.Time{}
		if a.StoppedAt.IsZero() {
			a.StoppedAt = time.Now().UTC()
		}
		if err := m.journal.Put(a); err != nil {
			return err
		}
	}
	if m.options.Devices != nil {
		if err := m.options.Devices.Withdraw(a); err != nil {
			return err
		}
	}
	return m.finish(ctx, a)
}

// finish does what the states Detaching and Releasing stand for.
func (m *Manager) finish(ctx context.Context, a journal.Attachment) error {
	if a.Restored() {
		return m.handOver(a)
	}
	start := time.Now()
	if err := m.restore(ctx, a); err != nil {
		return err
	}
	log := m.log.WithValues("function", a.Function.String(), "took", time.Since(start))
	if a.State == journal.Detaching {
		if err := m.journal.Put(a.Untouched()); err != nil {
			return err
		}
		log.Info("Function detached", "sandbox", a.Sandbox)
		return nil
	}
	if a.Setup != nil {
		if err := m.options.Setup.TearDown(ctx, a); err != nil {
			return err
		}
	}
	first := m.firstHook(a)
	if first == "" {
		if err := m.journal.Delete(a.Function); err != nil {
			return err
		}
		log.Info("Function released", "claim", a.Claim.Name)
		return nil
	}
	a.RestoredAt, a.Hooks = time.Now().UTC(), &journal.Hooks{Next: first}
	if err := m.journal.Put(a); err != nil {
		return err
	}
	log.Info("Function is back", "claim", a.Claim.Name, "hook", first)
	return m.handOver(a)
}

// firstHook is [Queue.First], "" without a queue.
func (m *Manager) firstHook(a journal.Attachment) string {
	if m.options.Hooks == nil {
		return ""
	}
	return m.options.Hooks.First(a)
}

// handOver leaves what is left of a release to the hooks.
func (m *Manager) handOver(a journal.Attachment) error {
	if m.options.Hooks == nil {
		return m.journal.Delete(a.Function)
	}
	m.options.Hooks.Add(a.Function)
	return nil
}

// lost says whether a netdev that was not found can never be found again.
func (m *Manager) lost(a journal.Attachment, err error) bool {
	switch {
	case errors.Is(err, netdev.ErrGone):
		return !m.mayReturn(a)
	case errors.Is(err, netdev.ErrAway):
		// The pod's namespace lives, but a netdev does not survive its device, nor its driver; and a Function has no two.
		name, err := m.netdevs.Netdev(a.Function)
		ended := errors.Is(err, fs.ErrNotExist) || errors.Is(err, inventory.ErrNoNetdev)
		return name != "" || ended && a.Before.Identity.IsHardware()
	}
	return false
}

// mayReturn says whether a netdev that is nowhere is still expected. A stop that is long to come yet was written down
// before the clock was set back.
func (m *Manager) mayReturn(a journal.Attachment) bool {
	_, err := m.netdevs.Netdev(a.Function)
	return err == nil && a.Before.Identity.IsHardware() && time.Since(a.StoppedAt).Abs() < m.options.GoneAfter
}

// removed says whether the device of a Function exists no more.
func (m *Manager) removed(id function.ID) bool {
	_, err := m.netdevs.Netdev(id)
	return errors.Is(err, fs.ErrNotExist)
}

// restore brings the Function back. A netdev that exists no more is back as far as that is possible: what the PF and
// the eswitch enforced with it is undone.
func (m *Manager) restore(ctx context.Context, a journal.Attachment) error {
	log := m.log.WithValues("function", a.Function.String())
	switch {
	case a.Before == nil:
		return nil
	case a.BootID != m.options.BootID:
		log.Info("The machine was booted since the Function was attached: there is nothing to restore")
		return nil
	case ownSF(a) && m.removed(a.Function):
		log.V(1).Info("The SF, which was made for its owner, is deleted already: there is nothing to restore")
		return nil
	}
	restored, device, err := m.restoreNetdev(ctx, a)
	if err != nil && ctx.Err() == nil && m.lost(a, err) {
		log.Error(err, "The netdev of the Function is gone: it ended with its namespace or its device, or lost its driver; "+
			"there is nothing to bring back", "netdev", a.Before.Name)
		restored, err = m.engine.Restore(ctx, device, a.Before.WithoutNetdev(), netdev.Place{})
	}
	if err != nil {
		return err
	}
	if !ownSF(a) { // of which nobody knows names
		for _, note := range restored.Notes {
			log.Info("The netdev could not get all its names back", "netdev", restored.Name, "reason", note)
		}
	}
	return m.stillEnforced(a, device)
}

// restoreNetdev has the engine look for the netdev until it is not nowhere any more, if it is one that comes back from a
// namespace that ended, and returns the host's side of the Function as the engine had it last.
func (m *Manager) restoreNetdev(ctx context.Context, a journal.Attachment) (
	restored netdev.Restored, device netdev.Device, err error,
) {
	waitErr := wait.ExponentialBackoffWithContext(ctx, m.options.Patience, func(ctx context.Context) (bool, error) {
		device, _ = Device(m.netdevs, a) // without a name, the engine looks itself
		restored, err = m.engine.Restore(ctx, device, *a.Before, a.Place)
		return !errors.Is(err, netdev.ErrGone) || !a.Before.Identity.IsHardware(), nil
	})
	if err == nil {
		err = waitErr // not tried even once
	}
	return restored, device, err
}

// stillEnforced is an error where the PF enforces something for the pod still, as it had no netdev by which it could be
// told otherwise. The VFs of a PF mostly end with its driver, and what was enforced for them with it.
func (m *Manager) stillEnforced(a journal.Attachment, device netdev.Device) error {
	changes := a.Before.VFChanges(a.Interface)
	if device.PF != nil || len(changes) == 0 || m.removed(a.Function) {
		return nil
	}
	return fmt.Errorf("its PF %s (%s) has no netdev on the host, so that what it enforces for the pod cannot be "+
		"undone: %s; move the PF's netdev back to the host's network namespace, or bind the PF's driver again",
		a.PF, a.PFName, strings.Join(changes, "; "))
}
