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

// Detach brings the Function back from a sandbox that stops. The reservation stays, as the pod may
// get another sandbox, but that of a claim loses the sandbox's CNI request. Nothing happens to a
// Function that another sandbox has.
func (m *Manager) Detach(ctx context.Context, id function.ID, sandbox string) error {
	return m.end(ctx, trigger{event: SandboxStops, sandbox: sandbox}, id)
}

// GiveUp makes a Function free that was allocated to a container by the resource, when that cannot
// be after all.
func (m *Manager) GiveUp(ctx context.Context, id function.ID, resource string) error {
	return m.end(ctx, trigger{event: GiveUp, resource: resource}, id)
}

// Unprepare takes a claim's Functions from it: they are brought back, wherever they are, and then
// free, at once or when the post-delete hooks are done.
func (m *Manager) Unprepare(ctx context.Context, claim types.UID) error {
	return m.endOwn(ctx, trigger{event: Unprepare, claim: claim})
}

// EndRequest ends what a CNI request attached, or wanted to attach: a claim keeps its Function,
// every other is released. Attachments for which but, where set, is true are left alone: a DEL may
// come late, and those were made after it.
func (m *Manager) EndRequest(
	ctx context.Context, containerID, ifName string, but func(journal.Attachment) bool,
) error {
	return m.endOwn(ctx, trigger{event: Del, sandbox: containerID, ifName: ifName, but: but})
}

// endOwn carries the event out for all Functions of its owner.
func (m *Manager) endOwn(ctx context.Context, t trigger) error {
	var errs []error
	for _, a := range m.journal.All() {
		if t.owns(a) {
			errs = append(errs, m.end(ctx, t, a.Function))
		}
	}
	return errors.Join(errs...)
}

// bringBack records the state, Detaching or Releasing, and goes on to the next.
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

// finish goes from the state Detaching or Releasing to the next. It returns nil also for a Function
// that did not come back and is quarantined; see [Manager.failed].
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
	if err := m.wayBack(ctx, &a); err != nil {
		return m.failed(a, err)
	}

	return m.letGo(m.log.WithValues("took", time.Since(start)), a, "is as it was")
}

// wayBack undoes whatever was done to a Function, and checks that it is undone. After Detaching the
// setup stays. wayBack changes the record along with the journal.
func (m *Manager) wayBack(ctx context.Context, record *journal.Attachment) error {
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
		return &wayBackError{leak, journal.MayLeak, true}
	}

	if a.State == journal.Releasing && a.Setup != nil {
		if err := m.options.Setup.TearDown(ctx, a); err != nil {
			err = errors.Join(err, leak)
			return &wayBackError{err, journal.NotTornDown, errors.Is(err, netdev.ErrLeaks)}
		}
	}

	return m.checkDriver(a)
}

// endsWithRelease says whether the Function is deleted by its release, and with it all that the pod
// left on it.
func endsWithRelease(a journal.Attachment) bool {
	return a.State == journal.Releasing && ownSF(a)
}

// letGo records that a Function is back, which ends its quarantine with this outcome: a reservation
// goes on, and every other Function is free, or has its hooks run first.
func (m *Manager) letGo(log logr.Logger, a journal.Attachment, outcome string) error {
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

	m.troubles.end(a.Function)
	if before.Quarantined() {
		log.Info("The quarantine of the Function is over", "outcome", outcome, "since",
			before.Quarantine.Since,
			"message", before.Quarantine.Message)
		m.options.Unquarantined(before, outcome)
	}

	return nil
}

// nextHook is how far the hooks of a record are before this one. The Port of a quarantined Function
// may have gone before.
func nextHook(a journal.Attachment, hook string) *journal.Hooks {
	switch {
	case a.Hooks == nil:
		return &journal.Hooks{Next: hook}
	case a.Hooks.Next == hook:
		return a.Hooks
	}
	return &journal.Hooks{Done: a.Hooks.Done, Next: hook}
}

// restore brings the Function back. If its netdev exists no more, what the PF and the eswitch
// enforced for it is undone. The error also says what the PF still enforces for the pod. If a
// driver is to be bound again for that, the record has it.
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
		device, _ = Device(m.netdevs, a) // without a name, the engine looks itself
		device.Rebinding = m.rebinding(record)
		restored, err = m.engine.Restore(ctx, device, *a.Before, a.Place)
		// A hardware netdev that is nowhere is on its way back from a namespace that ended.
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

	if !ownSF(a) { // its names end with it
		for _, note := range restored.Notes {
			log.Info("Something of the netdev stays different; its next owner is isolated all "+
				"the same", "netdev", restored.Name, "reason", note)
		}
	}

	// Without a netdev, the PF could not be told. The VFs of a PF mostly end with its driver, and
	// what was enforced with them.
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

// lost says whether a netdev that was not found cannot come back.
func (m *Manager) lost(a journal.Attachment, notFound error) bool {
	name, err := m.netdevs.Netdev(a.Function)
	hardware := a.Before.Identity.IsHardware()
	switch {
	case errors.Is(notFound, netdev.ErrGone):
		ended := err != nil && !m.reboundNow(a)
		return ended || !hardware || m.ages.of(a, sinceStopped) >= m.options.GoneAfter
	case errors.Is(notFound, netdev.ErrAway):
		// The pod's namespace lives, but a netdev does not survive its device, nor its driver; and
		// a Function has no two.
		ended := errors.Is(err, fs.ErrNotExist) || errors.Is(err, inventory.ErrNoNetdev)
		return name != "" || ended && hardware
	}

	return false
}

// rebinding has the record keep, before a driver is unbound to be bound again, which one it is. So
// an agent that ends in between does not leave the Function without one. The caller has the
// Function's lock.
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

// reboundNow says whether the Function has the driver that was bound again, which makes the netdev
// a moment later.
func (m *Manager) reboundNow(a journal.Attachment) bool {
	if a.Rebinding == "" || m.options.Driver == nil {
		return false
	}
	driver, err := m.options.Driver(a.Function)
	return err == nil && driver == a.Rebinding
}

// removed says whether the device of a Function exists no more.
func (m *Manager) removed(id function.ID) bool {
	_, err := m.netdevs.Netdev(id)
	return errors.Is(err, fs.ErrNotExist)
}

// ownSF says whether the Function is an SF that exists for its owner only.
func ownSF(a journal.Attachment) bool { return a.Setup != nil && a.Setup.SF }
