// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"maps"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Event is something that happens to a Function, or a request for the Function.
type Event string

const (
	// Prepare: the kubelet prepares a claim to which the Function is allocated.
	Prepare Event = "Prepare"
	// Unprepare: the kubelet ends a claim, which gives up its Functions.
	Unprepare Event = "Unprepare"
	// Allocate: the kubelet allocates the Function to a container. As far as the kubelet knows, no
	// other pod uses the Function.
	Allocate Event = "Allocate"
	// GiveUp: an Allocate failed, so that the pod fails too.
	GiveUp Event = "GiveUp"
	// Add: a CNI ADD asks for the Function.
	Add Event = "ADD"
	// Del: a CNI DEL or GC ends an interface of a container.
	Del Event = "DEL"
	// SandboxStarts: the runtime has made a network namespace for a pod with a claim.
	SandboxStarts Event = "sandbox starts"
	// SandboxStops: the runtime stops the sandbox of a pod.
	SandboxStops Event = "sandbox stops"
	// Sweep: the agent checks whether a reservation is still needed.
	Sweep Event = "sweep"
	// Resume: the agent starts, or a minute has passed. Interrupted work continues.
	Resume Event = "resume"
	// DeviceChanges: a device, netdev or Port appeared or disappeared, and a pod may have lost its
	// Function.
	DeviceChanges Event = "device changes"
)

// Events lists all events, in the order in which they occur in the life of a Function.
var Events = []Event{Prepare, Allocate, Add, SandboxStarts, SandboxStops, Del, DeviceChanges,
	Unprepare, GiveUp, Sweep, Resume}

// Phase is the stage of a Function in its life: the state of its record in the journal, together
// with whether the Function is quarantined; or [Free].
type Phase = journal.State

// The phases. A Free Function has no record. The quarantined phases combine a state of the journal
// with a quarantine. Every other phase is a state of the journal.
const (
	Free        Phase = ""
	Reserved          = journal.Reserved
	Attaching         = journal.Attaching
	Attached          = journal.Attached
	Lost              = journal.Lost
	Reattaching       = journal.Reattaching
	Detaching         = journal.Detaching
	Releasing         = journal.Releasing

	// DetachingQuarantined and ReleasingQuarantined are the states Detaching and Releasing of a
	// quarantined Function.
	DetachingQuarantined Phase = "Detaching, quarantined"
	ReleasingQuarantined Phase = "Releasing, quarantined"
)

// Phases lists all phases, in the order of a Function's life.
var Phases = []Phase{Free, Reserved, Attaching, Attached, Lost, Reattaching, Detaching, Releasing,
	DetachingQuarantined, ReleasingQuarantined}

// phaseOf returns the phase of a record.
func phaseOf(a journal.Attachment) Phase {
	switch {
	case !a.Quarantined():
		return a.State
	case a.State == journal.Detaching:
		return DetachingQuarantined
	}
	return ReleasingQuarantined
}

// Owner is the kind of owner that a Function has, relative to the event.
type Owner string

const (
	// None: the Function is free.
	None Owner = "none"
	// Same: the owner is the claim, CNI request or sandbox of the event.
	Same Owner = "same"
	// PodClaim: the owner is a claim of the event's pod.
	PodClaim Owner = "a claim of the same pod"
	// PodRequest: the owner is an earlier CNI request of the event's pod, from an older sandbox or
	// from an attempt that failed.
	PodRequest Owner = "an older request of the same pod"
	// UnknownPod: the Function is allocated to a pod that has not asked for it by CNI yet. The
	// kubelet does not say which pod this is.
	UnknownPod Owner = "an unknown pod"
	// OtherClaim: the owner is a claim that is not the event's, and not of the event's pod.
	OtherClaim Owner = "another claim"
	// OtherRequest: the owner is a CNI request of another pod, or for another interface.
	OtherRequest Owner = "another request"
)

// Owners lists all owners, in the order of the documentation.
var Owners = []Owner{None, Same, PodClaim, PodRequest, UnknownPod, OtherClaim, OtherRequest}

// Evidence is a condition that must be proven before a step is taken. A condition that cannot be
// checked counts as not proven.
type Evidence string

const (
	// NoOtherPod: the kubelet names no other pod that has the Function. A kubelet that does not
	// answer names no pod.
	NoOtherPod Evidence = "the kubelet names no other pod"
	// NamespaceGone: the network namespace of the sandbox that has the Function does not exist any
	// more.
	NamespaceGone Evidence = "the sandbox's network namespace is gone"
	// ReservedForPod: the API server says that the claim is reserved for the pod.
	ReservedForPod Evidence = "the claim is reserved for the pod"
	// Unneeded: the kubelet's complete answer and its checkpoint name no pod that has the Function.
	// If the owner is a claim, the API server says that the claim is not allocated to the Function
	// any more, or is reserved for no pod. Otherwise the reservation must be old enough.
	Unneeded Evidence = "kubelet and API server know no pod that needs it"
	// Untouched: the Function was allocated a moment ago with the same settings, and no pod can
	// have used it since. This happens when the kubelet allocates the Function of an init container
	// to a container of the same pod: the kubelet does so before any container of the pod exists,
	// and does not name the pod. A release would only cost time then.
	//
	// A Function with device nodes in containers never counts as untouched, because a container may
	// have used it, and the next pod could be harmed by what the container left.
	Untouched Evidence = "it was allocated a moment ago, and no pod can have used it"
	// NetdevGone: the sandbox's network namespace exists without the netdev, and the device is gone
	// or has another netdev on the host. A netdev that the pod itself moved to the host is not
	// another netdev. For a Function without a netdev: the device is gone, or another device has its
	// address, or it has lost the driver that was bound for the pod.
	NetdevGone Evidence = "the netdev is gone from the sandbox, which still exists"
	// DeviceBack: the Function has a netdev on the host, the sandbox's network namespace exists,
	// and the xPU serves the Function's Port, if it has one. A program that used the Function
	// without a netdev cannot get it back.
	DeviceBack Evidence = "the netdev is on the host, and the Port is up"
	// RetryDue: the pause after the last attempt to restore a quarantined Function is over; or
	// since then its device or PF appeared, disappeared, or got another driver, netdev or link
	// state.
	RetryDue Evidence = "the pause after the last try is over, or the device has changed since"
)

// Step is the action that follows from an event.
type Step string

const (
	// Reserve records the reservation for the owner that asks, and sets the Function up.
	Reserve Step = "reserve"
	// Attach moves the netdev into the sandbox.
	Attach Step = "attach"
	// Lose records that the sandbox lost the netdev. A netdev that is only partly back in the
	// sandbox is moved to the host first.
	Lose Step = "lose"
	// Reattach moves the netdev into the sandbox that lost it, and gives it the properties that it
	// had there.
	Reattach Step = "reattach"
	// Keep changes nothing, because everything is as the caller asks.
	Keep Step = "keep"
	// SetUp completes the setup that the reservation names.
	SetUp Step = "set up"
	// BringBack moves the netdev from its sandbox to the host; the reservation stays.
	BringBack Step = "bring back"
	// EndRequest ends a CNI request: a claim keeps its Function, which is brought back, and any
	// other Function is released.
	EndRequest Step = "end request"
	// Release brings the Function back, runs the hooks, and makes the Function free.
	Release Step = "release"
	// Disown ends the reservation of a quarantined Function, and deletes its Port. The Function
	// stays quarantined.
	Disown Step = "disown"
	// Wait waits until the record changes, as long as the caller can wait.
	Wait Step = "wait"
	// Refuse returns an error that names the owner of the Function.
	Refuse Step = "refuse"
	// Ignore does nothing, because the event is late, or concerns another owner.
	Ignore Step = "ignore"
)

// Rule is a step and the evidence that it needs. If the step is BringBack, EndRequest, Release or
// Wait, and the caller asks for the Function, the table is used again afterwards.
type Rule struct {
	Step Step
	// If is the evidence that Step needs; "" if it needs none. Without the evidence, Else is taken.
	If   Evidence
	Else Step
}

func always(s Step) Rule { return Rule{Step: s} }

func given(e Evidence, then, otherwise Step) Rule {
	return Rule{Step: then, If: e, Else: otherwise}
}

// Row has a rule for every phase that can occur.
type Row map[Phase]Rule

// with returns a copy of the row with another rule for the phase.
func (r Row) with(p Phase, rule Rule) Row {
	out := maps.Clone(r)
	out[p] = rule
	return out
}

// quarantined returns a copy of the row with other rules for a quarantined Function: detaching
// while its reservation stays, and releasing after the reservation ended.
func (r Row) quarantined(detaching, releasing Rule) Row {
	return r.with(DetachingQuarantined, detaching).with(ReleasingQuarantined, releasing)
}

// inEveryPhase returns a row with the same rule for every phase except Free.
func inEveryPhase(r Rule) Row {
	return Row{
		Reserved: r, Attaching: r, Attached: r, Lost: r, Reattaching: r, Detaching: r, Releasing: r,
		DetachingQuarantined: r, ReleasingQuarantined: r,
	}
}

// afterRelease returns the row of an event that waits for a release that is under way. A reserved
// Function gets the rule reserved, and a Function in use gets the rule inUse. A quarantined
// Function is refused at once.
func afterRelease(reserved, inUse Rule) Row {
	return inEveryPhase(inUse).
		with(Reserved, reserved).
		with(Releasing, always(Wait)).
		quarantined(always(Refuse), always(Refuse))
}

// retried returns a copy of the row for a pod that had the Function when it was quarantined: the
// Function is restored again, and the pod gets it if that succeeds.
func (r Row) retried() Row { return r.quarantined(always(BringBack), always(Release)) }

// ignored is the row of an event that does not concern the owner.
var ignored = inEveryPhase(always(Ignore))

// refused is the row of an event that cannot be for the owner.
var refused = inEveryPhase(always(Refuse))

// forOwner returns the rows of an event that is ignored for every Function of another owner.
func forOwner(own Row) map[Owner]Row {
	return map[Owner]Row{
		None: {Free: always(Ignore)}, Same: own, OtherClaim: ignored, UnknownPod: ignored,
		OtherRequest: ignored,
	}
}

// Table says which step follows from an event, by the owner and the phase of the Function. The
// documentation is generated from it. It must not be changed at run time.
var Table = map[Event]map[Owner]Row{
	Prepare: {
		None: {Free: given(NoOtherPod, Reserve, Refuse)},
		Same: afterRelease(given(NoOtherPod, Reserve, Refuse), always(Keep)).
			with(DetachingQuarantined, always(BringBack)),
		// The scheduler allocates a device to one claim only, so that another claim which still
		// owns the Function is left over.
		OtherClaim:   afterRelease(given(Unneeded, Release, Refuse), always(Refuse)),
		UnknownPod:   afterRelease(given(Unneeded, Release, Refuse), always(Refuse)),
		OtherRequest: afterRelease(always(Refuse), always(Refuse)),
	},
	Allocate: {
		None: {Free: always(Reserve)},
		// The pod to which the Function was allocated never asked for it by CNI, and the kubelet
		// does not know this pod any more; or it is the pod of the event.
		UnknownPod: afterRelease(given(Untouched, Reserve, Release), always(Release)),
		// The kubelet allocates only what no pod uses, so that the DEL of the last pod must be on
		// its way.
		OtherRequest: afterRelease(always(Release), always(Wait)),
		OtherClaim:   afterRelease(given(Unneeded, Release, Refuse), always(Refuse)),
	},
	Add: {
		None: {Free: given(NoOtherPod, Reserve, Refuse)},
		Same: afterRelease(given(NoOtherPod, Reserve, Refuse), always(BringBack)).
			with(Attached, always(Keep)).
			retried(),
		UnknownPod: afterRelease(given(NoOtherPod, Reserve, Refuse), always(Refuse)),
		PodClaim: afterRelease(always(Reserve), always(BringBack)).
			with(DetachingQuarantined, always(BringBack)),
		PodRequest: afterRelease(given(NoOtherPod, EndRequest, Refuse),
			given(NoOtherPod, EndRequest, Refuse)).
			retried(),
		OtherRequest: afterRelease(given(NoOtherPod, EndRequest, Refuse),
			given(NamespaceGone, EndRequest, Refuse)),
		OtherClaim: afterRelease(always(Refuse), always(Refuse)),
	},
	SandboxStarts: {
		None: {Free: always(Refuse)},
		// A sandbox gets back what it lost when the device returns, without another request.
		Same: refused.
			with(Attached, always(Keep)).
			with(Attaching, always(BringBack)).
			with(Detaching, always(BringBack)).
			with(DetachingQuarantined, always(BringBack)),
		PodClaim: afterRelease(always(Attach), always(BringBack)).
			with(Releasing, always(Refuse)).
			with(DetachingQuarantined, always(BringBack)),
		// The kubelet prepares a claim once for all pods that share it, and also once for a pod
		// that replaces another one of the same name.
		OtherClaim: afterRelease(given(ReservedForPod, Attach, Refuse),
			given(NamespaceGone, BringBack, Refuse)).
			with(Releasing, always(Refuse)).
			with(DetachingQuarantined, given(NamespaceGone, BringBack, Refuse)),
		UnknownPod:   refused,
		OtherRequest: refused,
	},
	// A release continues. The sandbox of a quarantined Function may stop, and the Function is
	// retried later.
	SandboxStops: forOwner(inEveryPhase(always(BringBack)).
		with(Releasing, always(Release)).
		quarantined(always(Keep), always(Keep))),
	Del: forOwner(inEveryPhase(always(EndRequest)).
		with(Releasing, always(Release)).
		with(ReleasingQuarantined, always(Keep))),
	Unprepare: forOwner(inEveryPhase(always(Release)).quarantined(always(Disown), always(Keep))),
	GiveUp: {
		None:       {Free: always(Ignore)},
		UnknownPod: ignored.with(Reserved, always(Release)),
		OtherClaim: ignored, OtherRequest: ignored,
	},
	Sweep: {
		None: {Free: always(Ignore)},
		Same: ignored.with(Reserved, given(Unneeded, Release, Keep)),
	},
	Resume: {
		None: {Free: always(Ignore)},
		Same: {
			Reserved: always(SetUp), Attaching: always(BringBack), Reattaching: always(Lose),
			Attached:  given(NamespaceGone, BringBack, Keep),
			Lost:      given(NamespaceGone, BringBack, Keep),
			Detaching: always(BringBack), Releasing: always(Release),
			DetachingQuarantined: given(RetryDue, BringBack, Keep),
			ReleasingQuarantined: given(RetryDue, Release, Keep),
		},
	},
	DeviceChanges: {
		None: {Free: always(Ignore)},
		Same: ignored.
			with(Attached, given(NetdevGone, Lose, Keep)).
			with(Lost, given(DeviceBack, Reattach, Keep)).
			quarantined(given(RetryDue, BringBack, Keep), given(RetryDue, Release, Keep)),
	},
}
