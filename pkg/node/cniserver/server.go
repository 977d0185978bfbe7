// SPDX-License-Identifier: Apache-2.0

// Package cniserver is the agent's side of the CNI plugin: it takes the requests that the shim
// passes on over a unix socket, or left in the spool while the agent was away, and has Functions
// provisioned, attached, checked and released as they ask.
//
// All state is in the journal. The next request repairs what an interrupted request left: a second
// ADD of the same container and interface goes on or returns the first result, and a DEL cleans up
// whatever there is.
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

// shortTimeout bounds a request other than ADD. It ends before the shim gives up, so that the
// runtime hears why.
const shortTimeout = 25 * time.Second

// Pools knows the pools of the node.
type Pools interface {
	Pools() (pools []pool.Pool, known bool)
	PoolOf(function.ID) (p pool.Pool, ok bool)
	// Considered says whether the Function was there when the pools were read. If not, it may still
	// belong to a pool.
	Considered(function.ID) bool
}

// Server serves the CNI plugin. Requests about different Functions run at the same time. All fields
// but Auxiliary and the times must be set.
type Server struct {
	BootID string // of the present boot
	// of the socket where the shim connects; its directory is made where it is missing, and closed
	// to other users
	Path string
	// where the shim leaves DELs and GCs while the agent is away; made where it is missing
	SpoolDir string

	Function func(function.ID) (f function.Function, exists bool) // of this node, as it is now
	// Auxiliary finds the SF that has an auxiliary device of this name now. It may be nil.
	Auxiliary func(name string) (id function.ID, exists bool)
	Pools     Pools
	Journal   *journal.Journal
	// decides who has a Function, and takes it there and back
	Lifecycle *lifecycle.Manager
	// has the xPU serve Functions for which a network is named
	Provisioner provisioning.Provisioner
	// of a Function on a network if nobody asks for one; the same every time
	MAC func(function.ID) function.MAC
	// why no ADD could succeed now, whichever Function it is about; nil if it could
	Ready func() error
	// is called for each attached Function; the claim is empty where it has none
	Report  func(journal.Claim)
	Metrics *Metrics
	Log     logr.Logger

	// Inherited is the listening socket at Path, if another agent handed it over: requests wait in
	// its queue. Succeeded says whether another agent takes the node over when the server ends: the
	// socket then stays, for [Server.Socket].
	Inherited *net.UnixListener
	Succeeded func() bool
	left      *os.File

	AllowKeys []string // unknown keys that network configurations may have
	// of an ADD, which waits for the xPU and for the last release; 0 is 90 s, less than runtimes
	// wait
	AddTimeout time.Duration
	// how long requests that run may go on when the server stops; 0 is 10 s
	StopTimeout time.Duration

	// adding has the container IDs of the ADDs that run, by [function.ID]. A Function has one ADD
	// at a time, so that the xPU is asked for one owner only.
	adding sync.Map
	adds   keylock.Locks[types.GCAttachment] // held by the ADDs that run
}

// answer does a request. A DEL leaves alone the attachments for which except, where set, is true.
func (s *Server) answer(
	ctx context.Context, r wire.Request, except func(journal.Attachment) bool,
) wire.Reply {
	begin := time.Now()
	log := s.Log.WithValues("command", short(string(r.Command)), "container", short(r.ContainerID),
		"interface", short(r.IfName))
	if pod, _, err := parseArgs(r.Args); err == nil && pod.Name != "" && checkPod(pod) == nil {
		log = log.WithValues("pod", klog.KRef(pod.Namespace, pod.Name))
	}

	reply, err := s.do(logr.NewContext(ctx, log), r, except)
	if err != nil {
		reply = failed(types.ErrInternal, err) // without a code it is a mistake of the agent
		log.Error(reply.Error, "CNI request failed", "code", reply.Error.Code, "took",
			time.Since(begin).String())
	} else {
		log.V(1).Info("CNI request done", "took", time.Since(begin).String())
	}

	s.Metrics.request(r.Command, begin, reply.Error)
	return reply
}

func (s *Server) do(
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
		return s.doInterface(ctx, r)
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

// doInterface does a request about the interface that its configuration describes.
func (s *Server) doInterface(ctx context.Context, r wire.Request) (wire.Reply, error) {
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
	if err := a.needsVF(); err != nil {
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
		// of an ADD that was done before; the shim asks when its IPAM plugin refuses a second ADD
		if record, err = s.attachedFor(a); err == nil {
			err = s.sameAsBefore(a, record)
		}
	}

	if err != nil {
		return wire.Reply{}, err
	}

	return s.added(ctx, a, record)
}

// checkEnvironment refuses a request in which something is missing that its command needs.
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
