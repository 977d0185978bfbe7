// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// trigger is an event with its subject. Fields that do not belong to the event are empty.
type trigger struct {
	event Event
	pod   journal.Pod
	// claim is set for Prepare and Unprepare, and for an Add of a claim's Function.
	claim types.UID
	// resource is set for Allocate and GiveUp.
	resource string
	// want is set for Allocate.
	want journal.Attachment
	// sandbox is the ID of the sandbox container of Add, Del, SandboxStarts and SandboxStops.
	sandbox string
	// ifName is set for Add and Del.
	ifName string
	// netNS is the path of the network namespace of SandboxStarts.
	netNS string
	// except, if set, excludes attachments from a Del: those that were made after the request.
	except func(journal.Attachment) bool
	// assigned, if set, replaces [Kubelet.Assigned], so that a Sweep asks the kubelet once for all
	// reservations.
	assigned func() (map[string]podresources.Assignment, error)
}

// triggerOf returns the event that asks for a reservation: a CNI request, a claim, or else the
// kubelet's Allocate.
func triggerOf(want journal.Attachment) trigger {
	switch {
	case want.CNI != nil:
		return trigger{
			event: Add, pod: want.Pod, claim: want.Claim.UID, sandbox: want.CNI.ContainerID,
			ifName: want.CNI.IfName,
		}
	case want.Claim.UID != "":
		return trigger{event: Prepare, pod: want.Pod, claim: want.Claim.UID}
	}
	return trigger{event: Allocate, resource: want.Resource, want: want}
}

// owns reports whether the record belongs to the subject of the event.
func (t trigger) owns(a journal.Attachment) bool {
	switch t.event {
	case Prepare, Unprepare:
		return t.isClaim(a)
	case Add, Del:
		return journal.ContainerIs(t.sandbox, t.ifName)(a) && (t.except == nil || !t.except(a))
	case SandboxStarts:
		return a.Sandbox == t.sandbox
	case SandboxStops:
		// A CNI request for a claim's Function ends with its sandbox, even if the Function was
		// never attached.
		return a.Sandbox == t.sandbox || a.Sandbox == "" && a.CNI != nil && a.CNI.Claimed != nil &&
			a.CNI.ContainerID == t.sandbox
	case Sweep, Resume, DeviceChanges:
		return true
	}
	return false
}

// isClaim reports whether the record belongs to the event's claim.
func (t trigger) isClaim(a journal.Attachment) bool {
	return t.claim != "" && a.Claim.UID == t.claim
}

// isPod reports whether the record belongs to the event's pod. It compares names if the UID is
// unknown, because old runtimes do not pass the UID.
func (t trigger) isPod(a journal.Attachment) bool {
	if t.pod.UID == "" {
		return a.Pod.Namespace == t.pod.Namespace && a.Pod.Name == t.pod.Name && a.Pod.Name != ""
	}
	return a.Pod.UID == t.pod.UID
}

// ownerOf returns the kind of owner that the record has, relative to the event.
func (t trigger) ownerOf(a journal.Attachment) Owner {
	switch {
	case a.State == Free:
		return None
	case t.owns(a):
		return Same
	case a.Claim.UID != "":
		sameContainer := a.CNI != nil && a.Sandbox != "" && a.Sandbox == t.sandbox
		switch {
		case t.event == Add && (t.isPod(a) || t.isClaim(a)) && !sameContainer,
			t.event == SandboxStarts && (a.Pod.UID == "" || t.isPod(a)):
			return PodClaim
		}
		return OtherClaim
	case a.CNI == nil && (t.event != GiveUp || a.Resource == t.resource):
		return UnknownPod
	case a.CNI != nil && t.event == Add && t.isPod(a) && a.CNI.ContainerID != t.sandbox:
		return PodRequest
	}
	return OtherRequest
}

// rule returns the table's rule for the record. The table has a rule for every combination that can
// occur: see TestTableIsWhole.
func (t trigger) rule(a journal.Attachment) Rule { return Table[t.event][t.ownerOf(a)][phaseOf(a)] }

// wants reports whether the event asks for the Function.
func (t trigger) wants() bool {
	return t.event == Prepare || t.event == Allocate || t.event == Add || t.event == SandboxStarts
}

// TakenError is returned for a Function that another owner has.
type TakenError struct{ reason string }

func (e TakenError) Error() string { return e.reason }

func taken(format string, args ...any) error { return TakenError{fmt.Sprintf(format, args...)} }

// decision says what follows from an event for a Function.
type decision struct {
	id function.ID
	// record is the Function's record at the time of the decision. It is the zero value if the
	// Function was free.
	record journal.Attachment
	// resource is the extended resource by which the kubelet gave the Function to the pod of a CNI
	// request. It is empty if the kubelet does not say so.
	resource string
	step     Step
	// refusal is the error to return if the step is Refuse.
	refusal error
}

// found returns the record. If the record has no Resource, it gets the resource by which the
// kubelet gave the Function to the pod.
func (d decision) found() journal.Attachment {
	a := d.record
	a.Resource = cmp.Or(a.Resource, d.resource)
	return a
}

// wrap adds the Function's identity to a non-nil error that a method returns.
func wrap(err *error, id function.ID) {
	if *err != nil {
		*err = fmt.Errorf("Function %s: %w", id, *err)
	}
}

// Admit returns once the owner named by want may have the Function. The owner is the claim or the
// CNI request in want, or else any pod to which the kubelet allocates the Function. Admit waits for
// a release that is under way, and brings back a Function that an earlier owner left behind. It
// reserves nothing.
//
// Admit returns the Function's record, which is empty for a free Function. If the record has no
// Resource, it gets the resource by which the kubelet gave the Function to the pod. The error is a
// [TakenError] if another owner has the Function.
func (m *Manager) Admit(
	ctx context.Context, want journal.Attachment,
) (have journal.Attachment, err error) {
	defer wrap(&err, want.Function)
	d, err := m.reconcile(ctx, triggerOf(want), want.Function, nil)
	return d.found(), err
}

// reconcile decides about the event and carries out the step, repeatedly, until nothing more
// follows from the event. If the step is Reserve or Attach, it is the last one: reconcile calls
// last for it, if last is not nil. If the step is Refuse, reconcile returns the reason as an error.
func (m *Manager) reconcile(
	ctx context.Context, t trigger, id function.ID, last func(decision) error,
) (decision, error) {
	for {
		d, err := m.decide(ctx, t, id)
		if err != nil {
			return d, err
		}

		switch d.step {
		case Refuse:
			err = d.refusal
		case Wait:
			err = m.await(ctx, d.record)
		case BringBack, EndRequest, Release:
			if err = m.takeBack(ctx, t, d); err == nil && t.wants() {
				err = m.refuseQuarantined(id)
			}
		case Lose, Reattach:
			_, err = m.ifUnchanged(ctx, d, func(have journal.Attachment) error {
				return m.carryOut(ctx, have, d.step)
			})
		case Reserve, Attach:
			if last == nil {
				return d, nil
			}

			var done bool
			if done, err = m.ifUnchanged(ctx, d, func(journal.Attachment) error {
				return last(d)
			}); done {
				return d, err
			}
		default:
			return d, nil
		}

		if err != nil {
			return d, err
		}
	}
}

// decide looks up the step in the table and gathers the evidence for it.
func (m *Manager) decide(ctx context.Context, t trigger, id function.ID) (decision, error) {
	have, _ := m.journal.Get(id)
	if t.event == SandboxStarts && have.CNI != nil {
		return decideRequest(have, t.sandbox)
	}

	rule := t.rule(have)
	d := decision{record: have, id: id, step: rule.Step, refusal: refusal(t, have)}
	if rule.If == "" {
		return d, nil
	}

	shown, err := gather[rule.If](m, ctx, t, &d)
	if err == nil && !shown {
		d.step = rule.Else
	}

	return d, err
}

// decideRequest decides about the sandbox of a CNI request, which was admitted when it reserved the
// Function.
func decideRequest(have journal.Attachment, sandbox string) (decision, error) {
	d := decision{record: have, id: have.Function, step: Attach}
	switch {
	case have.CNI.ContainerID != sandbox:
		return d, taken("is reserved for %s, not for sandbox %s", describeOwner(have), sandbox)
	case have.Quarantined():
		return d, taken("%s", quarantined(have))
	case have.State == journal.Attached:
		d.step = Keep
	case have.State != journal.Reserved:
		return d, fmt.Errorf("is %s for sandbox %s; try again", have.State, have.Sandbox)
	}

	return d, nil
}

// refusal returns the error that says why the event cannot have the Function.
func refusal(t trigger, a journal.Attachment) error {
	switch {
	case a.State == Free:
		return errors.New("is not reserved")
	case t.event == SandboxStarts && a.Claim.UID == "" && a.CNI == nil:
		return errors.New("is allocated, but no CNI request has asked for an interface yet")
	case a.Quarantined():
		return taken("%s", quarantined(a))
	case a.State == journal.Releasing:
		return taken("is being released from %s", describeOwner(a))
	case a.Sandbox != "" && a.CNI != nil:
		return taken("is %s in pod %s/%s (sandbox %s) as %s", a.State, a.Pod.Namespace, a.Pod.Name,
			a.Sandbox, a.CNI.IfName)
	case a.Sandbox != "":
		return taken("is %s in pod %s/%s (sandbox %s) by claim %s", a.State, a.Pod.Namespace,
			a.Pod.Name, a.Sandbox, a.Claim.Name)
	case a.Claim.UID != "" && a.Pod.Name != "":
		return taken("belongs to %s and is for pod %s/%s (UID %s)", describeOwner(a),
			a.Pod.Namespace, a.Pod.Name, a.Pod.UID)
	}
	return taken("belongs to %s", describeOwner(a))
}

func describeOwner(a journal.Attachment) string {
	switch {
	case a.Claim.UID != "":
		return fmt.Sprintf("claim %s/%s (UID %s)", a.Claim.Namespace, a.Claim.Name, a.Claim.UID)
	case a.Pod.UID != "":
		return fmt.Sprintf("pod %s/%s (UID %s)", a.Pod.Namespace, a.Pod.Name, a.Pod.UID)
	case a.CNI != nil:
		return fmt.Sprintf("container %s as %s", a.CNI.ContainerID, a.CNI.IfName)
	}
	return "a pod by an extended resource"
}

// refuseQuarantined returns an error if the Function is quarantined, and nil otherwise.
func (m *Manager) refuseQuarantined(id function.ID) error {
	a, _ := m.journal.Get(id)
	if !a.Quarantined() {
		return nil
	}
	return taken("%s", quarantined(a))
}

// await returns when the record has changed. It continues a release that was interrupted, and waits
// until the Function is free, quarantined or has an owner. If ctx ends first, the error says what
// is missing.
func (m *Manager) await(ctx context.Context, have journal.Attachment) error {
	releasing := have.State == journal.Releasing
	var failed error
	if releasing {
		failed = m.withLock(ctx, have.Function, func(now journal.Attachment) error {
			if now.State != journal.Releasing || now.Quarantined() {
				return nil
			}
			return m.finish(ctx, now)
		})
	}

	var now journal.Attachment
	err := loop.Until(ctx, m.journal.Subscribe, func() bool {
		now, _ = m.journal.Get(have.Function)
		return releasing && (now.State != journal.Releasing || now.Quarantined()) ||
			!releasing && !reflect.DeepEqual(have, now)
	})

	switch {
	case err == nil:
		return nil
	case !releasing:
		return fmt.Errorf("is %s in pod %s/%s, whose CNI DEL has not come, and the kubelet gives "+
			"it to another pod: %w",
			have.State, have.Pod.Namespace, have.Pod.Name, err)
	case now.Restored():
		failed = nil
	}

	return errors.Join(fmt.Errorf("%s: %w", pending(now), err), failed)
}

// takeBack takes the Function from its owner, unless the record has changed since the decision.
func (m *Manager) takeBack(ctx context.Context, t trigger, d decision) error {
	if t.netNS != "" {
		// The start of a sandbox may be reported after the sandbox is gone. It must not take the
		// Function from the next sandbox.
		if _, err := os.Stat(t.netNS); err != nil {
			return fmt.Errorf("network namespace of sandbox %s: %w", t.sandbox, err)
		}
	}

	m.log.Info("Function is taken back from before", "function", d.id.String(),
		"for", string(t.event), "from", describeOwner(d.record), "sandbox", d.record.Sandbox,
		"state", d.record.State, "step", string(d.step))

	_, err := m.ifUnchanged(ctx, d, func(have journal.Attachment) error {
		return m.carryOut(ctx, have, d.step)
	})
	return err
}

// ifUnchanged holds the Function's lock and calls f with the record, if the record has not changed
// since the decision. Otherwise unchanged is false, and the caller must decide again.
func (m *Manager) ifUnchanged(
	ctx context.Context, d decision, f func(journal.Attachment) error,
) (unchanged bool, err error) {
	err = m.withLock(ctx, d.id, func(now journal.Attachment) error {
		if unchanged = reflect.DeepEqual(d.record, now); !unchanged {
			return nil
		}
		return f(now)
	})
	return unchanged, err
}

// withLock holds the Function's lock and calls f with the record, which is the zero value if the
// Function is free.
func (m *Manager) withLock(
	ctx context.Context, id function.ID, f func(journal.Attachment) error,
) error {
	unlock, err := m.journal.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	a, _ := m.journal.Get(id)
	return f(a)
}

// end carries out an event that takes a Function back and needs no evidence.
func (m *Manager) end(ctx context.Context, t trigger, id function.ID) (err error) {
	defer wrap(&err, id)
	defer m.healthChanged(id)

	return m.withLock(ctx, id, func(a journal.Attachment) error {
		step := t.rule(a).Step
		if step == Ignore && !t.owns(a) {
			m.log.V(1).Info("Late event ignored", "function", id.String(), "event", string(t.event),
				"claim", a.Claim.Name, "sandbox", a.Sandbox)
		}
		return m.carryOut(ctx, a, step)
	})
}

// carryOut carries out a step that needs nothing but the record. The caller must hold the
// Function's lock.
func (m *Manager) carryOut(ctx context.Context, a journal.Attachment, step Step) error {
	switch {
	case step == SetUp:
		return m.setUp(ctx, a)
	case step == Lose:
		return m.lose(ctx, a)
	case step == Reattach:
		return m.reattach(ctx, a)
	case step == Disown, step == EndRequest && a.Quarantined() && a.Claim.UID == "":
		// The SF can be deleted, whatever keeps its netdev from coming back.
		if ownSF(a) {
			return m.bringBack(ctx, a, journal.Releasing)
		}
		return m.disown(a)
	case step == EndRequest && a.Quarantined():
		return nil // the request ends with the quarantine
	case step == Release, step == EndRequest && a.Claim.UID == "":
		return m.bringBack(ctx, a, journal.Releasing)
	case step != BringBack && step != EndRequest:
		return nil
	case a.State != journal.Reserved:
		return m.bringBack(ctx, a, journal.Detaching)
	case a.CNI != nil && a.CNI.Claimed != nil:
		return m.put(a.BackToReserved())
	}
	return nil
}
