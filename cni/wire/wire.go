// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between the CNI shim and the node's agent: one [Request] and one
// [Reply], each a JSON object, over a connection to the agent's unix socket. The shim closes its
// direction after the request, and the agent closes the connection after the reply. The package has
// no large imports, because the shim must stay small.
package wire

import (
	"encoding/json"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
)

const (
	// Version is the version of this protocol. A side that receives another version returns an
	// error and does nothing else.
	Version = 1

	// DefaultSocket is where the agent listens, mode 0600.
	DefaultSocket = "/run/xpu-agent/cni.sock"

	// DefaultSpoolDir, mode 0700, is where the shim leaves a DEL or GC if the agent does not run: a
	// file "<name>.json" with a [Request], mode 0600. A file is complete when it appears, because
	// it is renamed. A later request for the same thing may replace it. The agent removes it once
	// the request is done. A file whose name begins with a dot is no request.
	DefaultSpoolDir = "/var/lib/xpu-agent/spool"

	// IPAM is the ipam.type of a network configuration whose addresses come from the network's
	// address book. There is no IPAM plugin of this name, because the agent does it.
	IPAM = "xpu"

	// MaxMessage is the size limit of a request or a reply, in bytes.
	MaxMessage = 1 << 20
)

// Command is a CNI command.
type Command string

// The commands that the shim sends to the agent. The shim answers VERSION itself.
const (
	Add    Command = "ADD"
	Del    Command = "DEL"
	Check  Command = "CHECK"
	GC     Command = "GC"
	Status Command = "STATUS"

	// Address is no command of CNI. It gives an attached interface the addresses of an IPAM plugin
	// that needs the interface first, such as dhcp.
	Address Command = "ADDRESS"

	// Result is no command of CNI. It asks for the result of an earlier ADD of this container and
	// interface. The error has code 3 if nothing is attached. The shim sends it when an IPAM plugin
	// refuses a second ADD, as host-local does.
	Result Command = "RESULT"
)

// Request is a request of the runtime. The fields of CNI_ variables are empty for GC and STATUS.
type Request struct {
	Version     int     `json:"version"`
	Command     Command `json:"command"`
	ContainerID string  `json:"containerID,omitempty"` // CNI_CONTAINERID
	// CNI_NETNS, a path; may be empty for DEL
	NetNS  string `json:"netns,omitempty"`
	IfName string `json:"ifName,omitempty"` // CNI_IFNAME
	Args   string `json:"args,omitempty"`   // CNI_ARGS
	// the network configuration from standard input
	Config json.RawMessage `json:"config"`
	// the result of the IPAM plugin, in the version of Config
	IPAM json.RawMessage `json:"ipam,omitempty"`
	// At is the time of the runtime's request. A spooled request does not concern later
	// attachments.
	At time.Time `json:"at"`
	// Asked is the same time as time since the boot, which does not depend on the clock. Older
	// shims leave it out.
	Asked uptime.Moment `json:"asked,omitzero"`
}

// Reply is the answer to a [Request].
type Reply struct {
	Version int `json:"version"`
	// Result is the CNI result of ADD, ADDRESS and RESULT, in the version of the configuration. It
	// includes prevResult.
	Result json.RawMessage `json:"result,omitempty"`
	// DeviceInfo is the content for the file that runtimeConfig.CNIDeviceInfoFile names
	// (k8snetworkplumbingwg device-info-spec 1.1.0).
	DeviceInfo json.RawMessage `json:"deviceInfo,omitempty"`
	// Error is missing if the request was done. Codes below 100 are defined by the CNI
	// specification, and the others by the reference of xpu-cni. The code is never 0.
	Error *types.Error `json:"error,omitempty"`
}
