// SPDX-License-Identifier: Apache-2.0

// Package plan is what the host tells a guest to do, and how the guest tells what came of it.
package plan

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Path is where the guest finds its Plan, as JSON.
const Path = "/etc/plan.json"

// GuestVariable is in the environment of commands, and nowhere else, so that tests know where they
// run.
const GuestVariable = "XPU_QEMU_GUEST"

// Modules is the directory of the guest that kernel modules lie in.
const Modules = "/usr/lib/modules"

// Programs is the directory of the guest that the project's own programs lie in.
const Programs = "/usr/bin"

// What a guest has whose suites ask for an API server. It runs on the host, and is that of this
// guest alone.
const (
	// AdminKubeconfig is the kubeconfig of one who may do everything.
	AdminKubeconfig = "/etc/kubernetes/admin.conf"
	// AgentKubeconfig is that of the agent on the node NodeName, which may do what deploy/agent
	// lets it.
	AgentKubeconfig = "/etc/kubernetes/agent.conf"
	// NodeName is the node that the guest is. There is no Node object of it at first.
	NodeName = "guest"
	// HostNetdev is the NIC on the way to the API server, at HostDriver's only PCI function.
	HostNetdev = "host0"
	HostDriver = "virtio_net"
	// GuestAddress is the NIC's own, and APIAddress where the API server is, which is all that can
	// be reached.
	GuestAddress = "10.0.2.15/24"
	APIAddress   = "10.0.2.100:6443"
	// APIServerName is a name that the certificate of the API server has.
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
	// API says that the guest has a NIC that leads to an API server; see [APIAddress].
	API bool
	// Commands run one after the other, whatever the earlier ones returned. One that leaves
	// something behind, such as a PF without link, has failed: it ends with a status other than 0.
	Commands []Command
	// Shell asks for a shell on the console instead of commands. The guest ends with it.
	Shell bool
}

// Module is a kernel module.
type Module struct {
	File    string // its name in [Modules]; the kernel decompresses it unless it ends in ".ko"
	Options string // as for insmod(8)
}

// Command is a program that the guest runs.
type Command struct {
	Name string   // in what is told of it; without spaces
	Args []string // the first is the program's absolute path
	Dir  string   // to run it in
}

// Port and Offset are how the guest ends QEMU: it writes its exit status plus Offset to this I/O
// port, where isa-debug-exit makes QEMU exit with twice that plus one. The offset tells it from
// QEMU's own failures.
const (
	Port      = 0x501
	Offset    = 0x10
	MaxStatus = 100 // larger ones are cut to this
)

// Status returns the guest's exit status from QEMU's; ok is false where the guest did not end by
// itself.
func Status(qemu int) (status int, ok bool) {
	status = (qemu-1)/2 - Offset
	return status, qemu%2 == 1 && status >= 0 && status <= MaxStatus
}

// Kind is what an Event is about.
type Kind string

// The kinds of events, in the order of a guest's life.
const (
	Ready Kind = "ready" // the guest runs; Name is its kernel's release
	Begin Kind = "begin" // a command starts
	End   Kind = "end"   // a command ended, with Status
	Exit  Kind = "exit"  // the guest ends, with Status
)

// Event is one line in a guest's output that is not a command's.
type Event struct {
	Kind   Kind
	Status int
	Uptime time.Duration // of the guest
	Name   string        // the command's
}

const mark = "@@"

// String is the event as a line, without its end.
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
