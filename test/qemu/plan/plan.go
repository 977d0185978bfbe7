// SPDX-License-Identifier: Apache-2.0

// Package plan defines the work of a guest, and the reports of the guest about it.
package plan

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Path is the file with the guest's Plan, as JSON.
const Path = "/etc/plan.json"

// GuestVariable is in the environment of commands in a guest, and nowhere else, so that tests know
// where they run.
const GuestVariable = "XPU_QEMU_GUEST"

// Modules is the guest's directory of kernel modules.
const Modules = "/usr/lib/modules"

// Programs is the guest's directory of the project's programs.
const Programs = "/usr/bin"

// SeededBridge is an opi-bridge in the guest that has any of the faults of test/conformance.
const SeededBridge = Programs + "/opi-bridge-seeded"

// The guest has these if its suites ask for an API server. The API server runs on the host, and
// serves this guest alone.
const (
	// AdminKubeconfig is the kubeconfig of a user who may do everything.
	AdminKubeconfig = "/etc/kubernetes/admin.conf"
	// AgentKubeconfig is the kubeconfig of the agent on the node NodeName, which has the rights in
	// deploy/agent.
	AgentKubeconfig = "/etc/kubernetes/agent.conf"
	// NodeName is the name of the guest's node. There is no Node object at first.
	NodeName = "guest"
	// HostNetdev is the NIC on the way to the API server, at HostDriver's only PCI function.
	HostNetdev = "host0"
	HostDriver = "virtio_net"
	// GuestAddress is the NIC's address, and APIAddress is the address of the API server, which is
	// the only address that can be reached.
	GuestAddress = "10.0.2.15/24"
	APIAddress   = "10.0.2.100:6443"
	// APIServerName is a name in the certificate of the API server.
	APIServerName = "localhost"
)

// Plan is all that a guest does from boot to end.
type Plan struct {
	// Guest is the guest's name, which its commands have in the environment as [GuestVariable].
	Guest string
	// Modules are kernel modules in the order to load them.
	Modules []Module
	// VFs is how many VFs to make at each PF before the first command.
	VFs int
	// API means that the guest has a NIC that leads to an API server; see [APIAddress].
	API bool
	// Commands run one after the other, whatever earlier commands returned. A command that changes
	// the guest's state, for example a PF's link, has failed: its status is not 0.
	Commands []Command
	// Shell asks for a shell on the console instead of commands. The guest ends with the shell.
	Shell bool
}

// Module is a kernel module.
type Module struct {
	File    string // name in [Modules]; the kernel decompresses it unless it ends in ".ko"
	Options string // as for insmod(8)
}

// Command is a program that the guest runs.
type Command struct {
	Name string   // name in reports, without spaces
	Args []string // the first is the program's absolute path
	Dir  string   // working directory
}

// Port and Offset let the guest end QEMU. The guest writes its exit status plus Offset to this I/O
// port, and isa-debug-exit makes QEMU exit with twice the value plus one. The offset distinguishes
// the status from QEMU's own failures.
const (
	Port      = 0x501
	Offset    = 0x10
	MaxStatus = 100 // larger statuses are cut to this
)

// Status returns the guest's exit status for QEMU's exit status; ok is false if the guest did not
// end by itself.
func Status(qemu int) (status int, ok bool) {
	status = (qemu-1)/2 - Offset
	return status, qemu%2 == 1 && status >= 0 && status <= MaxStatus
}

// Kind is the kind of an Event.
type Kind string

// The kinds of events, in the order of a guest's life.
const (
	Ready Kind = "ready" // the guest runs; Name is its kernel's release
	Begin Kind = "begin" // a command starts
	End   Kind = "end"   // a command ended, with Status
	Exit  Kind = "exit"  // the guest ends, with Status
)

// Event is a line of a guest's output that does not come from a command.
type Event struct {
	Kind   Kind
	Status int
	Uptime time.Duration // of the guest
	Name   string        // name of the command
}

const mark = "@@"

// String returns the event as a line, without its end.
func (e Event) String() string {
	return fmt.Sprintf("%s %s %d %d %s", mark, e.Kind, e.Status, e.Uptime.Milliseconds(), e.Name)
}

// ParseEvent reverses [Event.String]; ok is false for a line that is no event.
func ParseEvent(line string) (e Event, ok bool) {
	fields := strings.Split(line, " ")
	if len(fields) != 5 || fields[0] != mark {
		return Event{}, false
	}

	status, err := strconv.Atoi(fields[2])
	if err != nil {
		return Event{}, false
	}

	milliseconds, err := strconv.ParseInt(fields[3], 10, 32)
	if err != nil {
		return Event{}, false
	}

	uptime := time.Duration(milliseconds) * time.Millisecond
	e = Event{Kind: Kind(fields[1]), Status: status, Uptime: uptime, Name: fields[4]}
	switch e.Kind {
	case Ready, Begin, End, Exit:
		return e, true
	}

	return Event{}, false
}
