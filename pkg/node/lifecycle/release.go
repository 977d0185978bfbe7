// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Detach brings the Function back from a sandbox that stops. The reservation stays, because the pod
// may get another sandbox, but a claim loses the CNI request of the sandbox. A Function in another
// sandbox is left alone.
func (m *Manager) Detach(ctx context.Context, id function.ID, sandbox string) error {
	return m.end(ctx, trigger{event: SandboxStops, sandbox: sandbox}, id)
}

// GiveUp makes a Function free that the kubelet allocated to a container by the resource, after the
// allocation failed.
func (m *Manager) GiveUp(ctx context.Context, id function.ID, resource string) error {
	return m.end(ctx, trigger{event: GiveUp, resource: resource}, id)
}

// Unprepare ends the reservations of a claim. Its Functions are brought back from wherever they
// are. They are free then, or once the post-delete hooks are done.
func (m *Manager) Unprepare(ctx context.Context, claim types.UID) error {
	return m.endAll(ctx, trigger{event: Unprepare, claim: claim})
}

// EndRequest ends a CNI request: a claim keeps its Function, and any other Function is released.
// Attachments for which except, if set, returns true are left alone, because a DEL may come late
// and they may have been made after it.
func (m *Manager) EndRequest(
	ctx context.Context, containerID, ifName string, except func(journal.Attachment) bool,
) error {
	return m.endAll(ctx, trigger{event: Del, sandbox: containerID, ifName: ifName, except: except})
}

// endAll carries out the event for all Functions that its subject owns.
func (m *Manager) endAll(ctx context.Context, t trigger) error {
	var errs []error
	for _, a := range m.journal.All() {
		if t.owns(a) {
			errs = append(errs, m.end(ctx, t, a.Function))
		}
	}
	return errors.Join(errs...)
}

// bringBack records the state, which is Detaching or Releasing, and continues to the next state.
func (m *Manager) bringBack(ctx context.Context, a journal.Attachment, state journal.State) error {
	if a.State != state {
		a.State, a.LostAt, a.StoppedAt = state, time.Time{}, cmp.Or(a.StoppedAt,
			m.options.Now().UTC())
		if err := m.put(a); err != nil {
			return err
		}
	}

	if err := m.options.Expose(a); err != nil {
		return err
	}

	return m.finish(ctx, a)
}

// finish goes from the state Detaching or Releasing to the next one. It also returns nil for a
// Function that could not be restored and is quarantined; see [Manager.quarantine].
func (m *Manager) finish(ctx context.Context, a journal.Attachment) error {
	hooks := m.options.Hooks
	switch {
	case a.Restored() && hooks == nil:
		return m.journal.Delete(a.Function)
	case a.Restored():
		hooks.Add(a.Function)
		return nil
	}

	start := time.Now()
	if err := m.undo(ctx, &a); err != nil {
		return m.quarantine(a, err)
	}

	return m.recordRestored(m.log.WithValues("took", time.Since(start)), a, "is as it was")
}

// undo undoes all changes to a Function, and checks the result. In state Detaching, the setup
// stays. undo updates the record along with the journal.
func (m *Manager) undo(ctx context.Context, record *journal.Attachment) error {
	leak := m.restore(ctx, record)
	a := *record
	switch {
	case leak != nil && !errors.Is(leak, netdev.ErrLeaks):
		return leak
	case leak != nil && endsWithRelease(a):
		m.log.Info("What the pod left ends with the SF, which was made for its owner and is "+
			"deleted",
			"function", a.Function.String(), "reason", leak.Error())
	case leak != nil:
		return &undoError{leak, journal.MayLeak, true}
	}

	if a.State == journal.Releasing && a.Setup != nil {
		if err := m.options.Setup.TearDown(ctx, a); err != nil {
			err = errors.Join(err, leak)
			return &undoError{err, journal.NotTornDown, errors.Is(err, netdev.ErrLeaks)}
		}
	}

	return m.checkDriver(a)
}

// endsWithRelease reports whether the release deletes the Function, along with everything that the
// pod left on it.
func endsWithRelease(a journal.Attachment) bool {
	return a.State == journal.Releasing && ownSF(a)
}

// recordRestored records that a Function is back, and ends its quarantine with the outcome, if it
// is quarantined. A reservation continues. Otherwise the hooks of the Function are queued, or the
// Function is free if there are no hooks.
func (m *Manager) recordRestored(log logr.Logger, a journal.Attachment, outcome string) error {
	before, hook := a, ""
	a.Quarantine, a.Rebinding = nil, ""
	if m.options.Hooks != nil && a.State == journal.Releasing {
		hook = m.options.Hooks.First(a)
	}

	var err error
	log = log.WithValues("function", a.Function.String())
	switch {
	case a.State == journal.Detaching:
		if err = m.put(a.BackToReserved()); err == nil {
			log.Info("Function detached", "sandbox", a.Sandbox)
		}
	case hook != "":
		a.RestoredAt, a.Hooks = m.options.Now().UTC(), nextHook(a, hook)
		if err = m.put(a); err == nil {
			log.Info("Function is back", "claim", a.Claim.Name, "hook", hook)
			m.options.Hooks.Add(a.Function)
		}
	default:
		if err = m.journal.Delete(a.Function); err == nil {
			log.Info("Function released", "claim", a.Claim.Name)
		}
	}

	if err != nil {
		return err
	}

	m.failures.end(a.Function)
	if before.Quarantined() {
		log.Info("The quarantine of the Function is over", "outcome", outcome, "since",
			before.Quarantine.Since,
			"message", before.Quarantine.Message)
		m.options.Unquarantined(before, outcome)
	}

	return nil
}

// nextHook returns the progress of a record's hooks before the hook. The Port of a quarantined
// Function may have been deleted earlier, in which case its hook is done.
func nextHook(a journal.Attachment, hook string) *journal.Hooks {
	switch {
	case a.Hooks == nil:
		return &journal.Hooks{Next: hook}
	case a.Hooks.Next == hook:
		return a.Hooks
	}
	return &journal.Hooks{Done: a.Hooks.Done, Next: hook}
}

// restore brings the Function's netdev back to the host and restores its properties. If the netdev
// does not exist any more, restore undoes what the PF and the eswitch enforce for it. The error
// also names settings that the PF still enforces for the pod. If restore has to bind a driver
// again, the record names this driver.
func (m *Manager) restore(ctx context.Context, record *journal.Attachment) error {
	a := *record
	log := m.log.WithValues("function", a.Function.String())
	switch {
	case a.Before == nil:
		return nil
	case a.BootID != m.options.BootID:
		log.Info("The machine was booted since the Function was attached: there is nothing to " +
			"restore")
		return nil
	case ownSF(a) && m.removed(a.Function):
		log.V(1).Info("The SF, which was made for its owner, is deleted already: there is " +
			"nothing to restore")
		return nil
	}

	var restored netdev.Restored
	var device netdev.Device
	err := Retry(ctx, m.options.Patience, func(ctx context.Context) (done bool, err error) {
		// without a name, the engine finds the netdev by its identity
		device, _ = Device(m.netdevs, a)
		device.Rebinding = m.rebinding(record)
		restored, err = m.engine.Restore(ctx, device, *a.Before, a.Place)
		// A hardware netdev that is in no namespace is on its way back from a namespace that ended.
		return !errors.Is(err, netdev.ErrGone) || !a.Before.Identity.IsHardware(), err
	})

	if err != nil && ctx.Err() == nil && m.lost(*record, err) {
		log.Error(err, "The netdev of the Function is gone: it ended with its namespace or its "+
			"device, or lost its driver; "+
			"there is nothing to bring back", "netdev", a.Before.Name)
		restored, err = m.engine.Restore(ctx, device, a.Before.WithoutNetdev(), netdev.Place{})
	}

	if err != nil {
		return err
	}

	if !ownSF(a) { // the names of an SF end with the SF
		for _, note := range restored.Notes {
			log.Info("Something of the netdev stays different; its next owner is isolated all "+
				"the same", "netdev", restored.Name, "reason", note)
		}
	}

	// Without the PF's netdev, the PF's settings could not be restored. If the VF is gone, its
	// settings are gone too: the VFs of a PF mostly end with the PF's driver.
	changes := a.Before.VFChanges(a.Interface)
	if device.PF != nil || len(changes) == 0 || m.removed(a.Function) {
		return nil
	}

	return fmt.Errorf("its PF %s (%s) has no netdev on the host, so that what it enforces for "+
		"the pod cannot be "+
		"undone: %s; move the PF's netdev back to the host's network namespace, or bind the PF's "+
		"driver again",
		a.PF, a.PFName, strings.Join(changes, "; "))
}

// lost reports whether a netdev that was not found cannot come back.
func (m *Manager) lost(a journal.Attachment, notFound error) bool {
	name, err := m.netdevs.Netdev(a.Function)
	hardware := a.Before.Identity.IsHardware()
	ended := errors.Is(err, fs.ErrNotExist) || errors.Is(err, inventory.ErrNoNetdev)
	switch {
	case errors.Is(notFound, netdev.ErrGone):
		return ended && !m.reboundNow(a) || !hardware ||
			m.ages.of(a, sinceStopped) >= m.options.GoneAfter
	case errors.Is(notFound, netdev.ErrAway):
		// The pod's namespace exists. But a netdev ends with its device or its driver, and a
		// Function has only one netdev at a time.
		return name != "" || ended && hardware
	}

	return false
}

// rebinding returns a callback that writes the name of a driver to the record before the driver is
// unbound, so that the next agent binds it again if this one ends in between. The caller must hold
// the Function's lock.
func (m *Manager) rebinding(record *journal.Attachment) *netdev.Rebinding {
	return &netdev.Rebinding{Driver: record.Rebinding, Intend: func(driver string) error {
		intended := *record
		intended.Rebinding = driver
		if err := m.put(intended); err != nil {
			return err
		}
		*record = intended
		return nil
	}}
}

// reboundNow reports whether the driver that was unbound is bound to the Function again. It makes
// the netdev a moment later.
func (m *Manager) reboundNow(a journal.Attachment) bool {
	if a.Rebinding == "" || m.options.Driver == nil {
		return false
	}
	driver, err := m.options.Driver(a.Function)
	return err == nil && driver == a.Rebinding
}

// removed reports whether the device of a Function does not exist any more.
func (m *Manager) removed(id function.ID) bool {
	_, err := m.netdevs.Netdev(id)
	return errors.Is(err, fs.ErrNotExist)
}

// ownSF reports whether the Function is an SF that was made for its owner.
func ownSF(a journal.Attachment) bool { return a.Setup != nil && a.Setup.SF }
