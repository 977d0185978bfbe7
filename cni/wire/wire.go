// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between the CNI shim and the node's agent: one [Request] and one
// [Reply], each a JSON object, over a connection to the agent's unix socket. The shim closes its
// direction after the request, the agent closes the connection after the reply. The package imports
// nothing that a small program should not have.
package wire

import (
	"encoding/json"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
)

const (
	// Version of this protocol. A side that is told another one says so and does nothing.
	Version = 1

	// DefaultSocket is where the agent listens, mode 0600.
	DefaultSocket = "/run/xpu-agent/cni.sock"

	// DefaultSpoolDir, mode 0700, is where the shim leaves a DEL or GC that the agent was not there
	// to take, as a file "<name>.json" with a [Request], mode 0600. A file appears whole, by a
	// rename, and may be replaced by a later request for the same thing. The agent removes it once
	// the request is done. A file whose name begins with a dot is no request.
	DefaultSpoolDir = "/var/lib/xpu-agent/spool"

	// IPAM is the ipam.type of a network configuration that leaves the addresses to the network's
	// address book. There is no such plugin: the agent has them.
	IPAM = "xpu"

	// MaxMessage is the most bytes that a request or a reply may have.
	MaxMessage = 1 << 20
)

// Command is a CNI command.
type Command string

// The commands that the agent is asked for. VERSION is answered by the shim.
const (
	Add    Command = "ADD"
	Del    Command = "DEL"
	Check  Command = "CHECK"
	GC     Command = "GC"
	Status Command = "STATUS"

	// Address is no command of CNI. It gives an interface that ADD attached the addresses of an
	// IPAM plugin that needs the interface first, as dhcp does.
	Address Command = "ADDRESS"

	// Result is no command of CNI. It asks for the result of an earlier ADD of this container and
	// interface; the error has code 3 where nothing is attached. The shim asks when an IPAM plugin
	// refuses a second ADD, as host-local does.
	Result Command = "RESULT"
)

// Request is what the runtime asked for. The fields of CNI_ variables are empty for GC and STATUS.
type Request struct {
	Version     int     `json:"version"`
	Command     Command `json:"command"`
	ContainerID string  `json:"containerID,omitempty"` // CNI_CONTAINERID
	// CNI_NETNS, a path; may be empty for DEL
	NetNS  string `json:"netns,omitempty"`
	IfName string `json:"ifName,omitempty"` // CNI_IFNAME
	Args   string `json:"args,omitempty"`   // CNI_ARGS
	// network configuration, as it came on standard input
	Config json.RawMessage `json:"config"`
	// result of the IPAM plugin, in the version of Config
	IPAM json.RawMessage `json:"ipam,omitempty"`
	// At is when the runtime asked. A request that was spooled does not touch what was attached
	// later.
	At time.Time `json:"at"`
	// Asked is the same by the time since the boot, which no change of the clock moves. Older shims
	// leave it out.
	Asked uptime.Moment `json:"asked,omitzero"`
}

// Reply is the answer to a [Request].
type Reply struct {
	Version int `json:"version"`
	// Result is the CNI result of ADD, ADDRESS and RESULT, in the version of the configuration. It
	// includes prevResult.
	Result json.RawMessage `json:"result,omitempty"`
	// DeviceInfo is for the file that runtimeConfig.CNIDeviceInfoFile names (k8snetworkplumbingwg
	// device-info-spec 1.1.0).
	DeviceInfo json.RawMessage `json:"deviceInfo,omitempty"`
	// Error is absent where the request was done. Codes below 100 are those of the CNI
	// specification, the others are in the reference of xpu-cni. The code is never 0.
	Error *types.Error `json:"error,omitempty"`
}
