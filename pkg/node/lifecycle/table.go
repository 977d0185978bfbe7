// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"maps"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Event is something that happens to a Function, or that is requested for it.
type Event string

const (
	// the kubelet prepares a claim that the Function is allocated to
	Prepare   Event = "Prepare"
	Unprepare Event = "Unprepare" // the kubelet takes a claim's Functions back
	// the kubelet gives a container the Function, which no other pod has as far as the kubelet
	// knows
	Allocate Event = "Allocate"
	GiveUp   Event = "GiveUp" // an Allocate failed, and with it the pod
	Add      Event = "ADD"    // a CNI ADD asks for the Function
	Del      Event = "DEL"    // a CNI DEL or GC ends a container's interface
	// the runtime has made a network namespace for a pod with a claim
	SandboxStarts Event = "sandbox starts"
	SandboxStops  Event = "sandbox stops" // the runtime ends a pod's sandbox
	Sweep         Event = "sweep"         // the agent checks whether a reservation is still needed
	// the agent starts, or a minute has passed: what is half done is continued
	Resume Event = "resume"
	// a device, netdev or Port came or went, and a pod may have lost its Function
	DeviceChanges Event = "device changes"
)

// Events are all events, in the order of a Function's life.
var Events = []Event{Prepare, Allocate, Add, SandboxStarts, SandboxStops, Del, DeviceChanges,
	Unprepare, GiveUp, Sweep, Resume}

// Phase is how far a Function is: the state of its record in the journal, with whether it is
// quarantined, or [Free].
type Phase = journal.State

// The phases. All but Free, in which there is no record, and the quarantined ones are states of the
// journal.
const (
	Free        Phase = ""
	Reserved          = journal.Reserved
	Attaching         = journal.Attaching
	Attached          = journal.Attached
	Lost              = journal.Lost
	Reattaching       = journal.Reattaching
	Detaching         = journal.Detaching
	Releasing         = journal.Releasing

	// DetachingKept and ReleasingKept are the states Detaching and Releasing of a quarantined
	// Function.
	DetachingKept Phase = "Detaching, quarantined"
	ReleasingKept Phase = "Releasing, quarantined"
)

// Phases are all phases, in the order of a Function's life.
var Phases = []Phase{Free, Reserved, Attaching, Attached, Lost, Reattaching, Detaching, Releasing,
	DetachingKept, ReleasingKept}

// phaseOf is the phase of a record.
func phaseOf(a journal.Attachment) Phase {
	switch {
	case !a.Quarantined():
		return a.State
	case a.State == journal.Detaching:
		return DetachingKept
	}
	return ReleasingKept
}

// Whose says whose Function it is, as the event sees it.
type Whose string

const (
	Nobodys Whose = "nobody's" // the Function is free
	// the claim, CNI request or sandbox that the event is about has it
	Own Whose = "own"
	// a claim of the pod that the event is about has it
	PodsClaim Whose = "a claim's of the same pod"
	// an older sandbox of the event's pod has it, or one that failed
	PodsRequest Whose = "an older request's of the same pod"
	// it is allocated to a pod that has not come yet, and which one the kubelet does not tell
	NextPods      Whose = "allocated"
	AnotherClaims Whose = "another claim's"
	// a CNI request of another pod, or for another interface, has it
	AnotherRequests Whose = "another request's"
)

// Owners are all values of Whose, in the order of the documentation.
var Owners = []Whose{Nobodys, Own, PodsClaim, PodsRequest, NextPods, AnotherClaims, AnotherRequests}

// Evidence is what must be shown before a step is taken. What cannot be found out is not shown.
type Evidence string

const (
	// a kubelet that does not answer names none
	NoOtherPod     Evidence = "the kubelet names no other pod"
	NamespaceGone  Evidence = "the sandbox's network namespace is gone"
	ReservedForPod Evidence = "the claim is reserved for the pod" // by the API server
	// Unneeded: the kubelet, in a complete answer and in its checkpoint, knows no pod that has the
	// Function; a claim is, by the API server, not allocated to it any more or reserved for no pod;
	// and the reservation is not young.
	Unneeded Evidence = "kubelet and API server know nobody who needs it"
	// Untouched: the Function was allocated a moment ago, in the same way, and no pod can have used
	// it since. That is so when the kubelet allocates the Function of an init container to a
	// container of the same pod: it does so before any container of the pod is made, and does not
	// name the pod. If containers get device nodes of the Function, it is not shown, because a
	// container may have used it: to release a Function that no container has yet costs time, and
	// to give the next pod what the last one left may harm.
	Untouched Evidence = "it was allocated a moment ago, and no pod can have used it"
	// NetdevGone: the sandbox's network namespace lives without the netdev, and the device is gone
	// or has another netdev on the host; one that the pod moved there itself is not another one. A
	// Function without a netdev: its device is gone, or has lost the driver it had for the pod.
	NetdevGone Evidence = "the netdev is gone from the sandbox, which lives"
	// DeviceBack: the Function has a netdev on the host, the sandbox's network namespace lives, and
	// the xPU serves the Function's Port, if it has one. A program that had the Function without a
	// netdev cannot get it back.
	DeviceBack Evidence = "the netdev is on the host, and the Port is up"
	// RetryDue: of a quarantined Function the pause after its last try is over; or its device or PF
	// came, went, or has another driver, netdev or link since.
	RetryDue Evidence = "the pause after the last try is over, or the device has changed since"
)

// Step is what is done.
type Step string

const (
	// record the reservation for the owner that asks, and set the Function up
	Take   Step = "take"
	Attach Step = "attach" // move the netdev into the sandbox
	// record that the sandbox lost the netdev; one halfway back to it goes to the host first
	Lose Step = "lose"
	// move the netdev into the sandbox that lost it, and make it what it was there
	Reattach  Step = "reattach"
	Keep      Step = "keep"       // leave everything as it is: it is what is asked for
	SetUp     Step = "set up"     // do again what the reservation says is done to the Function
	BringBack Step = "bring back" // take the netdev back from its sandbox; the reservation stays
	// end a CNI request: bring a claim's Function back, and release every other
	EndRequest Step = "end request"
	Release    Step = "release" // bring the Function back, run the hooks, and make it free
	// end the reservation of a quarantined Function, and delete its Port; it stays quarantined
	Disown Step = "disown"
	Wait   Step = "wait"   // wait until the record changes, as long as whoever asks can
	Refuse Step = "refuse" // return an error that says who has the Function
	Ignore Step = "ignore" // do nothing: the event comes late, or is about somebody else
)

// Rule is a step, and the evidence it needs. After a BringBack, EndRequest, Release or Wait that
// makes way for an owner, the next step is decided.
type Rule struct {
	Step Step
	// If is what must be shown; "" for nothing. Otherwise Else is done.
	If   Evidence
	Else Step
}

func always(s Step) Rule { return Rule{Step: s} }

func given(e Evidence, then, otherwise Step) Rule {
	return Rule{Step: then, If: e, Else: otherwise}
}

// Row is the rule of every phase that can be.
type Row map[Phase]Rule

// with is the row with another rule for a phase.
func (r Row) with(p Phase, rule Rule) Row {
	out := maps.Clone(r)
	out[p] = rule
	return out
}

// kept is the row with rules for a Function that is quarantined while its reservation stays, and
// after that.
func (r Row) kept(detaching, releasing Rule) Row {
	return r.with(DetachingKept, detaching).with(ReleasingKept, releasing)
}

// every is the row of an event that means the same in every phase but Free.
func every(r Rule) Row {
	return Row{
		Reserved: r, Attaching: r, Attached: r, Lost: r, Reattaching: r, Detaching: r, Releasing: r,
		DetachingKept: r, ReleasingKept: r,
	}
}

// held is the row of an event that waits for a release, with a rule for a reservation and one for a
// Function in use. A quarantined Function is refused at once.
func held(reserved, inUse Rule) Row {
	return every(inUse).with(Reserved, reserved).with(Releasing, always(Wait)).kept(always(Refuse),
		always(Refuse))
}

// again are the rules by which a pod that had a quarantined Function before gets it after all, if
// it comes back now.
func (r Row) again() Row { return r.kept(always(BringBack), always(Release)) }

// ignored is the row of an event that is not about the owner.
var ignored = every(always(Ignore))

// refused is the row of an event that cannot be for the owner.
var refused = every(always(Refuse))

// forOwner has the rules of an event that is ignored for every Function but the owner's.
func forOwner(own Row) map[Whose]Row {
	return map[Whose]Row{
		Nobodys: {Free: always(Ignore)}, Own: own, AnotherClaims: ignored, NextPods: ignored,
		AnotherRequests: ignored,
	}
}

// Table is the life of a Function. The documentation is made from it, and nobody changes it.
var Table = map[Event]map[Whose]Row{
	Prepare: {
		Nobodys: {Free: given(NoOtherPod, Take, Refuse)},
		Own: held(given(NoOtherPod, Take, Refuse), always(Keep)).with(DetachingKept,
			always(BringBack)),
		// The scheduler allocates a device to one claim only: that the other one still has it is a
		// leftover.
		AnotherClaims:   held(given(Unneeded, Release, Refuse), always(Refuse)),
		NextPods:        held(given(Unneeded, Release, Refuse), always(Refuse)),
		AnotherRequests: held(always(Refuse), always(Refuse)),
	},
	Allocate: {
		Nobodys: {Free: always(Take)},
		// The pod that it was allocated to never came for it by CNI, and is gone for the kubelet;
		// or it is the same pod.
		NextPods: held(given(Untouched, Take, Release), always(Release)),
		// The DEL of what a pod still has is on its way.
		AnotherRequests: held(always(Release), always(Wait)),
		AnotherClaims:   held(given(Unneeded, Release, Refuse), always(Refuse)),
	},
	Add: {
		Nobodys: {Free: given(NoOtherPod, Take, Refuse)},
		Own: held(given(NoOtherPod, Take, Refuse), always(BringBack)).with(Attached,
			always(Keep)).again(),
		NextPods: held(given(NoOtherPod, Take, Refuse), always(Refuse)),
		PodsClaim: held(always(Take), always(BringBack)).with(DetachingKept,
			always(BringBack)),
		PodsRequest: held(given(NoOtherPod, EndRequest, Refuse),
			given(NoOtherPod, EndRequest, Refuse)).again(),
		AnotherRequests: held(given(NoOtherPod, EndRequest, Refuse),
			given(NamespaceGone, EndRequest, Refuse)),
		AnotherClaims: held(always(Refuse), always(Refuse)),
	},
	SandboxStarts: {
		Nobodys: {Free: always(Refuse)},
		// What a sandbox lost it gets back without being asked for.
		Own: refused.with(Attached, always(Keep)).with(Attaching, always(BringBack)).with(Detaching,
			always(BringBack)).
			with(DetachingKept, always(BringBack)),
		PodsClaim: held(always(Attach), always(BringBack)).with(Releasing,
			always(Refuse)).with(DetachingKept, always(BringBack)),
		// The kubelet prepares a claim once, for all pods that share it, and for one that follows
		// another of its name.
		AnotherClaims: held(given(ReservedForPod, Attach, Refuse),
			given(NamespaceGone, BringBack, Refuse)).
			with(Releasing, always(Refuse)).with(DetachingKept,
			given(NamespaceGone, BringBack, Refuse)),
		NextPods:        refused,
		AnotherRequests: refused,
	},
	// A release goes on. The pod of a quarantined Function goes, and the Function is tried again
	// later.
	SandboxStops: forOwner(every(always(BringBack)).with(Releasing,
		always(Release)).kept(always(Keep), always(Keep))),
	Del: forOwner(every(always(EndRequest)).with(Releasing,
		always(Release)).with(ReleasingKept, always(Keep))),
	Unprepare: forOwner(every(always(Release)).kept(always(Disown), always(Keep))),
	GiveUp: {
		Nobodys:       {Free: always(Ignore)},
		NextPods:      ignored.with(Reserved, always(Release)),
		AnotherClaims: ignored, AnotherRequests: ignored,
	},
	Sweep: {
		Nobodys: {Free: always(Ignore)},
		Own:     ignored.with(Reserved, given(Unneeded, Release, Keep)),
	},
	Resume: {
		Nobodys: {Free: always(Ignore)},
		Own: {
			Reserved: always(SetUp), Attaching: always(BringBack), Reattaching: always(Lose),
			Attached:  given(NamespaceGone, BringBack, Keep),
			Lost:      given(NamespaceGone, BringBack, Keep),
			Detaching: always(BringBack), Releasing: always(Release),
			DetachingKept: given(RetryDue, BringBack, Keep),
			ReleasingKept: given(RetryDue, Release, Keep),
		},
	},
	DeviceChanges: {
		Nobodys: {Free: always(Ignore)},
		Own: ignored.with(Attached, given(NetdevGone, Lose, Keep)).with(Lost,
			given(DeviceBack, Reattach, Keep)).
			kept(given(RetryDue, BringBack, Keep), given(RetryDue, Release, Keep)),
	},
}
