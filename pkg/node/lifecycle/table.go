package lifecycle

import (
	"maps"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Event is something that happens to a Function, or that is requested for it.
type Event string

const (
	// Prepare: the kubelet prepares a claim that the Function is allocated to.
	Prepare Event = "Prepare"
	// Unprepare: the kubelet takes a claim's Functions back.
	Unprepare Event = "Unprepare"
	// Allocate: the kubelet gives the Function, which no pod has as far as it knows, to a container as an extended resource.
	Allocate Event = "Allocate"
	// GiveUp: an Allocate failed, and with it the pod.
	GiveUp Event = "GiveUp"
	// Add: a CNI ADD asks for the Function.
	Add Event = "ADD"
	// Del: a CNI DEL or GC says that the container's interface is to go.
	Del Event = "DEL"
	// SandboxStarts: the runtime has made a network namespace for a pod with a claim.
	SandboxStarts Event = "sandbox starts"
	// SandboxStops: the runtime ends a pod's sandbox.
	SandboxStops Event = "sandbox stops"
	// Sweep: the agent checks whether a reservation is still needed.
	Sweep Event = "sweep"
	// Resume: the agent starts, or a minute has passed. What is half done is continued.
	Resume Event = "resume"
	// DeviceChanges: a device, a netdev or a Port of the node came or went, and a pod may have lost its Function by it.
	DeviceChanges Event = "device changes"
)

// events are all events, in the order of a Function's life.
var events = []Event{Prepare, Allocate, Add, SandboxStarts, SandboxStops, Del, DeviceChanges, Unprepare, GiveUp, Sweep, Resume}

// Phase is how far a Function is: the state of its record in the journal, or [Free].
type Phase = journal.State

const (
	// Free: there is no record.
	Free Phase = ""
	// The states of the journal.
	Reserved    = journal.Reserved
	Attaching   = journal.Attaching
	Attached    = journal.Attached
	Lost        = journal.Lost
	Reattaching = journal.Reattaching
	Detaching   = journal.Detaching
	Releasing   = journal.Releasing
)

// phases are all phases, in the order of a Function's life.
var phases = []Phase{Free, Reserved, Attaching, Attached, Lost, Reattaching, Detaching, Releasing}

// Whose says whose Function it is, as the event sees it.
type Whose string

const (
	// Nobodys: it is free.
	Nobodys Whose = "nobody's"
	// Own: that of the claim, the CNI request or the sandbox that the event is about.
	Own Whose = "own"
	// PodsClaim: a claim's of the pod that the event is about.
	PodsClaim Whose = "a claim's of the same pod"
	// PodsRequest: that of another CNI request of the pod that the event is about: an older sandbox, or one that failed.
	PodsRequest Whose = "an older request's of the same pod"
	// NextPods: allocated to a pod that has not come for it yet. Which pod that is the kubelet does not tell.
	NextPods Whose = "allocated"
	// AnotherClaims: another claim's.
	AnotherClaims Whose = "another claim's"
	// AnotherRequests: a CNI request's of another pod, or of another interface.
	AnotherRequests Whose = "another request's"
)

// owners are all values of Whose, in the order of the documentation.
var owners = []Whose{Nobodys, Own, PodsClaim, PodsRequest, NextPods, AnotherClaims, AnotherRequests}

// Evidence is what must be shown before a step is taken. What cannot be found out is not shown.
type Evidence string

const (
	// NoOtherPod: the kubelet names no other pod that has the Function. A kubelet that does not answer names none.
	NoOtherPod Evidence = "the kubelet names no other pod"
	// Unneeded: the kubelet, in a complete answer and in its checkpoint, knows no pod that has the Function; a claim is,
	// by the API server, not allocated to it any more or reserved for no pod; and the reservation is not young.
	Unneeded Evidence = "kubelet and API server know nobody who needs it"
	// NamespaceGone: the network namespace of the sandbox that has the Function exists no more.
	NamespaceGone Evidence = "the sandbox's network namespace is gone"
	// ReservedForPod: the API server says that the claim is reserved for the pod.
	ReservedForPod Evidence = "the claim is reserved for the pod"
	// NetdevGone: the sandbox's network namespace lives without the netdev, and the device is gone or has another netdev on
	// the host. A Function without a netdev: its device is gone, or has lost the driver it had for the pod.
	NetdevGone Evidence = "the netdev is gone from the sandbox, which lives"
	// DeviceBack: the Function has a netdev on the host, the sandbox's network namespace lives, and the xPU serves the
	// Function's Port, if it has one. A program that had the Function without a netdev cannot get it back.
	DeviceBack Evidence = "the netdev is on the host, and the Port is up"
)

// Step is what is done.
type Step string

const (
	// Take records the reservation for the owner that asks, and sets the Function up.
	Take Step = "take"
	// Attach moves the netdev into the sandbox.
	Attach Step = "attach"
	// Lose records that the sandbox lost the netdev. One that is halfway back to the sandbox is first brought to the host.
	Lose Step = "lose"
	// Reattach moves the netdev into the sandbox that lost it, and makes it what it was there.
	Reattach Step = "reattach"
	// Keep leaves everything as it is: it is what is asked for.
	Keep Step = "keep"
	// SetUp does again what the reservation says is done to the Function.
	SetUp Step = "set up"
	// BringBack takes the netdev back from its sandbox; the reservation stays.
	BringBack Step = "bring back"
	// EndRequest ends a CNI request: a claim's Function is brought back, every other is released.
	EndRequest Step = "end request"
	// Release brings the Function back, runs the hooks, and makes it free.
	Release Step = "release"
	// Wait waits until the record changes, as long as whoever asks can.
	Wait Step = "wait"
	// Refuse is an error that says who has the Function.
	Refuse Step = "refuse"
	// Ignore does nothing: the event comes late, or is about somebody else.
	Ignore Step = "ignore"
)

// Rule is a step, and the evidence it needs. After a BringBack, EndRequest, Release or Wait that makes way for an owner,
// the next step is decided.
type Rule struct {
	Step Step
	// If is what must be shown; "" for nothing. Otherwise Else is done.
	If   Evidence
	Else Step
}

func always(s Step) Rule { return Rule{Step: s} }

func given(e Evidence, then, otherwise Step) Rule { return Rule{Step: then, If: e, Else: otherwise} }

// row is the rule of every phase.
type row map[Phase]Rule

// with is the row with another rule for a phase.
func (r row) with(p Phase, rule Rule) row {
	out := maps.Clone(r)
	out[p] = rule
	return out
}

// every is the row of an event that means the same in every phase but Free.
func every(r Rule) row {
	return row{Reserved: r, Attaching: r, Attached: r, Lost: r, Reattaching: r, Detaching: r, Releasing: r}
}

// held is the row of an event that waits for a release, and that needs one rule for a reservation and one for a Function
// in use.
func held(reserved, inUse Rule) row {
	return every(inUse).with(Reserved, reserved).with(Releasing, always(Wait))
}

// ends is the row of an event that takes the Function from its owner. A release goes on.
func ends(s Step) row {
	return every(always(s)).with(Releasing, always(Release))
}

// ignored is the row of an event that is not about the owner.
var ignored = every(always(Ignore))

// refused is the row of an event that cannot be for the owner.
var refused = every(always(Refuse))

// forOwner has the rules of an event that is ignored for every Function but the owner's.
func forOwner(own row) map[Whose]row {
	return map[Whose]row{
		Nobodys: {Free: always(Ignore)}, Own: own, AnotherClaims: ignored, NextPods: ignored, AnotherRequests: ignored,
	}
}

// table is the life of a Function.
var table = map[Event]map[Whose]row{
	Prepare: {
		Nobodys: {Free: given(NoOtherPod, Take, Refuse)},
		Own:     held(given(NoOtherPod, Take, Refuse), always(Keep)),
		// The scheduler allocates a device to one claim only: that the other one still has it is a leftover.
		AnotherClaims:   held(given(Unneeded, Release, Refuse), always(Refuse)),
		NextPods:        held(given(Unneeded, Release, Refuse), always(Refuse)),
		AnotherRequests: held(always(Refuse), always(Refuse)),
	},
	Allocate: {
		Nobodys: {Free: always(Take)},
		// The pod that it was allocated to never came for it by CNI, and is gone for the kubelet.
		NextPods: held(always(Release), always(Release)),
		// The DEL of what a pod still has is on its way.
		AnotherRequests: held(always(Release), always(Wait)),
		AnotherClaims:   held(given(Unneeded, Release, Refuse), always(Refuse)),
	},
	Add: {
		Nobodys:         {Free: given(NoOtherPod, Take, Refuse)},
		Own:             held(given(NoOtherPod, Take, Refuse), always(BringBack)).with(Attached, always(Keep)),
		NextPods:        held(given(NoOtherPod, Take, Refuse), always(Refuse)),
		PodsClaim:       held(always(Take), always(BringBack)),
		PodsRequest:     held(given(NoOtherPod, EndRequest, Refuse), given(NoOtherPod, EndRequest, Refuse)),
		AnotherRequests: held(given(NoOtherPod, EndRequest, Refuse), given(NamespaceGone, EndRequest, Refuse)),
		AnotherClaims:   held(always(Refuse), always(Refuse)),
	},
	SandboxStarts: {
		Nobodys: {Free: always(Refuse)},
		// What a sandbox lost it gets back without being asked for.
		Own:       refused.with(Attached, always(Keep)).with(Attaching, always(BringBack)).with(Detaching, always(BringBack)),
		PodsClaim: held(always(Attach), always(BringBack)).with(Releasing, always(Refuse)),
		// The kubelet prepares a claim once, for all pods that share it, and for one that follows another of its name.
		AnotherClaims: held(given(ReservedForPod, Attach, Refuse), given(NamespaceGone, BringBack, Refuse)).
			with(Releasing, always(Refuse)),
		NextPods:        refused,
		AnotherRequests: refused,
	},
	SandboxStops: forOwner(ends(BringBack)),
	Del:          forOwner(ends(EndRequest)),
	Unprepare:    forOwner(every(always(Release))),
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
			Attached: given(NamespaceGone, BringBack, Keep), Lost: given(NamespaceGone, BringBack, Keep),
			Detaching: always(BringBack), Releasing: always(Release),
		},
	},
	DeviceChanges: {
		Nobodys: {Free: always(Ignore)},
		Own:     ignored.with(Attached, given(NetdevGone, Lose, Keep)).with(Lost, given(DeviceBack, Reattach, Keep)),
	},
}

// Entry is a row of the table for the documentation.
type Entry struct {
	Event Event
	Whose Whose
	// Rules has none for a phase that cannot be.
	Rules map[Phase]Rule
}

// Phases are all phases, in the order of a Function's life.
func Phases() []Phase { return slices.Clone(phases) }

// Table is the whole table, in the order of a Function's life.
func Table() []Entry {
	var entries []Entry
	for _, event := range events {
		for _, whose := range owners {
			if row, ok := table[event][whose]; ok {
				entries = append(entries, Entry{Event: event, Whose: whose, Rules: maps.Clone(row)})
			}
		}
	}
	return entries
}
