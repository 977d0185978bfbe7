// SPDX-License-Identifier: Apache-2.0

// Package cniserver is the agent's side of the CNI plugin. It reads the requests that the shim
// sends over a unix socket, or left in the spool while the agent did not run. It provisions,
// attaches, checks and releases Functions as the requests ask.
//
// All state is in the journal. The next request repairs what an interrupted request left: a second
// ADD of the same container and interface continues or returns the first result, and a DEL cleans
// up whatever exists.
package cniserver

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// shortTimeout limits a request other than ADD. It ends before the shim gives up, so that the
// runtime gets the reason.
const shortTimeout = 25 * time.Second

// Pools has the pools of the node.
type Pools interface {
	// Pools returns the current pools. known is false until they have been read once.
	Pools() (pools []pool.Pool, known bool)
	// PoolOf returns the pool that has the Function. ok is false if no pool has it.
	PoolOf(function.ID) (p pool.Pool, ok bool)
	// Considered reports whether the Function existed when the pools were read. If it did not, it
	// may still belong to a pool.
	Considered(function.ID) bool
}

// Server serves the CNI plugin. Requests about different Functions run in parallel. All fields must
// be set, except Auxiliary, Inherited, Succeeded, AllowKeys and the timeouts.
type Server struct {
	// BootID is the ID of the current boot.
	BootID string
	// Path is the path of the socket to which the shim connects. Its directory is created if it is
	// missing, and closed to other users.
	Path string
	// SpoolDir is where the shim leaves DELs and GCs while the agent does not run. It is created if
	// it is missing.
	SpoolDir string

	// Function returns the current state of a Function of this node.
	Function func(function.ID) (f function.Function, exists bool)
	// Auxiliary finds the SF that currently has an auxiliary device of this name. It may be nil.
	Auxiliary func(name string) (id function.ID, exists bool)
	// Pools says which Functions the device plugin offers, and in which network.
	Pools Pools
	// Journal has the state of all requests.
	Journal *journal.Journal
	// Lifecycle decides who owns a Function, and moves it to its owner and back.
	Lifecycle *lifecycle.Manager
	// Provisioner makes the xPU serve Functions for which a network is named.
	Provisioner provisioning.Provisioner
	// MAC returns the address of a Function on a network if the request has none. It must always
	// return the same address for a Function.
	MAC func(function.ID) function.MAC
	// PortID returns the id of a Function's Port for the journal. It returns the recorded id if
	// there is one.
	PortID func(function.ID) string
	// Ready returns why no ADD can succeed at the moment, for any Function; nil if ADDs can
	// succeed.
	Ready func() error
	// Report is called for each attached Function. The claim is empty if the Function has none.
	Report  func(journal.Claim)
	Metrics *Metrics
	Log     logr.Logger

	// Inherited is the listening socket at Path, if another agent handed it over. Requests wait in
	// its queue. Succeeded reports whether a successor takes over the node when the server ends. In
	// this case the socket stays, for [Server.Socket].
	Inherited  *net.UnixListener
	Succeeded  func() bool
	handedOver *os.File

	// AllowKeys has unknown keys that network configurations may contain.
	AllowKeys []string
	// AddTimeout limits an ADD, which waits for the xPU and for the last release; 0 is 90 s, which
	// is less than runtimes wait.
	AddTimeout time.Duration
	// StopTimeout is how long running requests may continue when the server stops; 0 is 10 s.
	StopTimeout time.Duration

	// adding has the container IDs of the running ADDs, by [function.ID]. A Function has one ADD at
	// a time, so that the xPU is asked for one owner only.
	adding sync.Map
	// adds is held by the running ADDs.
	adds keylock.Locks[types.GCAttachment]
}

// handle handles a request. A DEL leaves alone the attachments for which except, if set, returns
// true.
func (s *Server) handle(
	ctx context.Context, r wire.Request, except func(journal.Attachment) bool,
) wire.Reply {
	begin := time.Now()
	log := s.Log.WithValues("command", short(string(r.Command)), "container", short(r.ContainerID),
		"interface", short(r.IfName))
	if pod, _, err := parseArgs(r.Args); err == nil && pod.Name != "" && checkPod(pod) == nil {
		log = log.WithValues("pod", klog.KRef(pod.Namespace, pod.Name))
	}

	reply, err := s.dispatch(logr.NewContext(ctx, log), r, except)
	if err != nil {
		// An error without a code is a fault of the agent.
		reply = errorReply(types.ErrInternal, err)
		log.Error(reply.Error, "CNI request failed", "code", reply.Error.Code, "took",
			time.Since(begin).String())
	} else {
		log.V(1).Info("CNI request done", "took", time.Since(begin).String())
	}

	s.Metrics.request(r.Command, begin, reply.Error)
	return reply
}

func (s *Server) dispatch(
	ctx context.Context, r wire.Request, except func(journal.Attachment) bool,
) (wire.Reply, error) {
	if r.Version != wire.Version {
		return wire.Reply{}, fail(CodeVersion,
			"this agent speaks version %d of the contract, not %d: "+
				"the CNI plugin is of another release", wire.Version, r.Version)
	}

	if err := cmp.Or(checkLengths(r), checkEnvironment(r)); err != nil {
		return wire.Reply{}, err
	}

	timeout := shortTimeout
	if r.Command == wire.Add {
		timeout = cmp.Or(s.AddTimeout, 90*time.Second)
	}

	ctx, cancel := context.WithTimeoutCause(ctx, timeout,
		fmt.Errorf("the agent waited %s", timeout))
	defer cancel()

	switch r.Command {
	case wire.Add, wire.Address, wire.Result, wire.Check:
		return s.handleInterface(ctx, r)
	case wire.Del:
		return wire.Reply{}, s.del(ctx, r, except)
	case wire.GC:
		return wire.Reply{}, s.gc(ctx, r)
	case wire.Status:
		return wire.Reply{}, s.status()
	}

	return wire.Reply{}, fail(types.ErrInvalidEnvironmentVariables, "CNI_COMMAND %q: is unknown",
		short(string(r.Command)))
}

// handleInterface handles a request about the interface that its configuration describes.
func (s *Server) handleInterface(ctx context.Context, r wire.Request) (wire.Reply, error) {
	a, err := parser{s.AllowKeys, s.Auxiliary}.parse(r)
	if err != nil {
		return wire.Reply{}, err
	}
	if r.Command == wire.Check {
		return wire.Reply{}, s.check(ctx, a)
	}
	if a.function, err = s.find(a.device); err != nil {
		return wire.Reply{}, err
	}
	if err := a.checkVF(); err != nil {
		return wire.Reply{}, err
	}
	if err := a.checkLinkType(a.mac, a.conf.Network); err != nil {
		return wire.Reply{}, err
	}

	ctx = logr.NewContext(ctx,
		logr.FromContextOrDiscard(ctx).WithValues("function", a.device.String()))
	var record journal.Attachment
	switch r.Command {
	case wire.Add:
		record, err = s.add(ctx, a)
	case wire.Address:
		record, err = s.address(ctx, a)
	case wire.Result:
		// The shim asks for the result of an earlier ADD when its IPAM plugin refuses a second ADD.
		if record, err = s.attachedFor(a); err == nil {
			err = s.checkRepeated(a, record)
		}
	}

	if err != nil {
		return wire.Reply{}, err
	}

	return s.addReply(ctx, a, record)
}

// checkEnvironment refuses a request that lacks something that its command needs.
func checkEnvironment(r wire.Request) error {
	switch {
	case r.Command == wire.GC || r.Command == wire.Status:
		return nil
	case r.ContainerID == "":
		return fail(types.ErrInvalidEnvironmentVariables, "CNI_CONTAINERID: is missing")
	case r.IfName == "":
		return fail(types.ErrInvalidEnvironmentVariables, "CNI_IFNAME: is missing")
	case r.Command == wire.Del:
		return nil
	case r.NetNS == "":
		return fail(types.ErrInvalidEnvironmentVariables, "CNI_NETNS: is missing")
	}

	if err := function.ValidateInterfaceName(r.IfName); err != nil {
		return fail(types.ErrInvalidEnvironmentVariables, "CNI_IFNAME: %w", err)
	}

	return nil
}

func (s *Server) status() error {
	if _, known := s.Pools.Pools(); !known {
		return fail(types.ErrPluginNotAvailable,
			"xpu-agent: pools and Functions have not been read yet")
	}
	if err := s.Ready(); err != nil {
		return fail(types.ErrPluginNotAvailable, "xpu-agent: %w", err)
	}
	return nil
}
