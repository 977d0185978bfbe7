// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Port is the xPU's side of a Function. OPI calls it a BridgePort.
type Port struct {
	ID       string           // 4-63 characters of a-z, 0-9, '-'; see [PortID]
	MAC      net.HardwareAddr // of the Function: 6 bytes, unicast, not zero
	Networks []string         // ids; exactly one unless Trunk, at most [MaxNetworks]
	Trunk    bool             // frames carry the VLAN tags of the networks

	// VLANs are the VLANs of the Networks, in the same order, each 1-4094. They are only for agents
	// without networks ([Traits.Networks]), and not set in a PortStatus.
	VLANs []uint16

	// Addresses are the IP addresses that the port may send from, if the source filter of its
	// networks checks them; none means any. They are only for agents with [Options], and not set in
	// a PortStatus.
	Addresses []netip.Addr
	// Shared is true if ports at other xPUs have the same Addresses, as the ports of a bond have.
	Shared bool

	// AddressesIn are what Addresses are, for each network of a trunk, by the network's id. A trunk
	// has no Addresses.
	AddressesIn map[string][]netip.Addr
}

// MaxNetworks is how many networks a port may have. It is the limit of XPUPort.spec.networks.
const MaxNetworks = 64

// Port returns the port of a Function in the installation's network with this name.
func (i Installation) Port(id string, mac function.MAC, network string) Port {
	return Port{ID: id, MAC: mac.HardwareAddr(), Networks: []string{i.NetworkID(network)}}
}

// Trunk returns the port of a Function whose frames carry the VLAN tags of the installation's
// networks with these names.
func (i Installation) Trunk(id string, mac function.MAC, networks []string) Port {
	p := Port{ID: id, MAC: mac.HardwareAddr(), Trunk: true}
	for _, name := range networks {
		p.Networks = append(p.Networks, i.NetworkID(name))
	}
	return p
}

// maxAddresses is how many addresses opi-bridge takes for a port, and for each network of a trunk.
const maxAddresses = 64

// AllAddresses returns the addresses that the port may send from in any of its networks, sorted. It
// returns none if the port may send from any address in one of them, and if a trunk has more than
// opi-bridge takes in one list.
func (p Port) AllAddresses() []netip.Addr {
	all := slices.Clone(p.Addresses)
	for _, id := range p.Networks {
		if p.Trunk && len(p.AddressesIn[id]) == 0 {
			return nil
		}
		all = append(all, p.AddressesIn[id]...)
	}

	slices.SortFunc(all, netip.Addr.Compare)
	if all = slices.Compact(all); p.Trunk && len(all) > maxAddresses {
		return nil
	}
	return all
}

// hasOptions reports whether the port restricts the addresses that it sends from.
func (p Port) hasOptions() bool { return len(p.Addresses) > 0 || len(p.AddressesIn) > 0 }

// Status is the status of a port or a network as reported by the agent.
type Status struct {
	State  State
	Detail string // about a failure; may be empty
}

// describe returns the status as a sentence. noun is "port" or "network".
func (s Status) describe(noun string) string {
	return "the " + noun + " is " + s.State.String() + ": " + s.Detail
}

// State is the operational state of a port or a network.
type State int

const (
	StatePending  State = iota // the agent is working on it
	StateUp                    // in service
	StateFailed                // the agent could not bring it into service
	StateDeleting              // deletion requested, not finished
	// StateUnknown is the state of an object that the agent lists without its properties. Its other
	// fields must not be used.
	StateUnknown
)

func (s State) String() string {
	return [...]string{"pending", "up", "failed", "being deleted", "unknown"}[s]
}

// PortStatus is a port as reported by the agent.
type PortStatus struct {
	Port
	Status
}

func (p Port) check(op string, owner Installation) error {
	if err := checkID(op, p.ID); err != nil {
		return err
	}

	// The reference agent accepts any number of bytes, so they are checked here.
	switch {
	case len(p.MAC) != 6:
		return invalid(op, p.ID, "MAC", "%q has %d bytes, want 6", p.MAC, len(p.MAC))
	case p.MAC[0]&1 != 0:
		return invalid(op, p.ID, "MAC", "%s is a group address, want a unicast one", p.MAC)
	case bytes.Equal(p.MAC, make([]byte, 6)):
		return invalid(op, p.ID, "MAC", "is all zero")
	}

	if len(p.Networks) == 0 || len(p.Networks) > MaxNetworks || !p.Trunk && len(p.Networks) > 1 {
		return invalid(op, p.ID, "Networks", "has %d networks, want 1-%d for a trunk, and one for "+
			"another port", len(p.Networks), MaxNetworks)
	}

	for i, id := range p.Networks {
		if !objectID.MatchString(id) || !owner.Owns(id) {
			return invalid(op, p.ID, "Networks", "%q is not the id of a network of installation %s",
				id, owner)
		}
		if slices.Contains(p.Networks[:i], id) {
			return invalid(op, p.ID, "Networks", "%s is in it twice", id)
		}
	}

	return nil
}

// Equal reports whether two ports are the same apart from options. The order of networks does not
// matter.
func (p Port) Equal(q Port) bool {
	return p.ID == q.ID && p.Trunk == q.Trunk && bytes.Equal(p.MAC, q.MAC) &&
		slices.Equal(slices.Sorted(slices.Values(p.Networks)),
			slices.Sorted(slices.Values(q.Networks)))
}

// maxCreations bounds how often EnsurePort creates a port that another client keeps changing.
const maxCreations = 3

// EnsurePort returns nil once the agent reports that the port is up with exactly this MAC address,
// type and networks.
//
// If the port exists with other properties or is being deleted, it is deleted and created anew,
// because changing a port in place leaves agents with ports and networks that cannot be deleted any
// more. If it is another owner's, it is left unchanged and the error is ErrConflict. A failed port
// is retried once; if it stays failed for [Config.FailedGrace], the error is ErrFailed. If one of
// the networks does not exist, the error is ErrNetworkMissing. If the agent reports too little
// about the port, it is left unchanged and the error is ErrUnknown. If the port is a trunk and the
// agent has none, the error is ErrNoTrunks; without [Traits.Trunks], nothing is sent.
//
// Without [Traits.Verifies], EnsurePort returns nil once the agent has accepted the port on the
// present connection.
func (c *Client) EnsurePort(ctx context.Context, p Port) error {
	if err := p.check(ensurePort, c.installation); err != nil {
		return err
	}
	if err := c.checkTrunk(p); err != nil {
		return err
	}
	if !c.traits.Verifies {
		return c.ensureUnverified(ctx, p)
	}

	e := portEnsurer{client: c, port: p, object: c.ports.object(p.ID), mayRetry: true}
	return await(ctx, ensurePort, p.ID, e.poll)
}

const ensurePort = "ensure port"

// checkTrunk returns an [ErrNoTrunks] if the port is a trunk, and agents of the dialect have none.
func (c *Client) checkTrunk(p Port) error {
	if !p.Trunk || c.traits.Trunks {
		return nil
	}
	return &Error{
		Kind: ErrNoTrunks, Op: ensurePort, ID: p.ID,
		Detail: "agents of this dialect have no ports with tagged networks; name one network, or " +
			"use an xPU whose agent has trunks",
	}
}

// portEnsurer is the state of one call of [Client.EnsurePort].
type portEnsurer struct {
	client *Client
	port   Port
	object object

	creations   int       // how often the port was created
	mayRetry    bool      // whether a failed port may be retried
	optionsSet  bool      // the agent has the port's options
	failedSince time.Time // since when the port has been failed
}

// poll is a step of [await].
func (e *portEnsurer) poll(ctx context.Context) (done bool, progress string, err error) {
	c, id := e.client, e.port.ID
	if progress, err := c.waitForChange(ctx, ensurePort, e.object); err != nil {
		return false, progress, err
	}

	got, err := c.agent.Port(ctx, id)
	err = c.failure(ctx, ensurePort, id, err)
	missing := errors.Is(err, ErrNotFound)
	if err != nil && !missing {
		return false, "", err
	}

	c.changes.observe(e.object, !missing && got.State != StateDeleting)
	// a port that is being deleted is waited for, whoever owns it
	if !missing && got.State != StateDeleting {
		if owner := c.ownerOf(got); owner != "" {
			return false, "", &Error{
				Kind: ErrConflict, Op: ensurePort, ID: id, Detail: "it belongs to " + owner,
			}
		}
	}

	if missing || got.State == StateDeleting || !got.Equal(e.port) {
		progress, err = e.recreate(ctx, got, missing)
		return false, progress, err
	}

	progress = got.describe("port")
	if !e.optionsSet {
		if again, err := e.setPortOptions(ctx); again || err != nil {
			return false, progress, err
		}
	}

	if got.State == StateFailed {
		return false, progress, e.retry(ctx, got)
	}

	e.failedSince = time.Time{}
	if doubt := c.changes.doubt(e.object, deletion); doubt != "" {
		return false, doubt, nil
	}

	return got.State == StateUp, progress, nil
}

// recreate deletes the port that exists, if any, and creates the wanted one.
func (e *portEnsurer) recreate(
	ctx context.Context, got PortStatus, missing bool,
) (progress string, err error) {
	c, id := e.client, e.port.ID
	if e.creations == maxCreations {
		const detail = "somebody else changes it: it was made %d times and is again MAC %s, " +
			"networks %s, %s"
		return "", &Error{
			Kind: ErrConflict, Op: ensurePort, ID: id,
			Detail: fmt.Sprintf(detail, e.creations, got.MAC, got.Networks, got.State),
		}
	}

	e.creations, e.mayRetry, e.failedSince = e.creations+1, false, time.Time{}
	if !missing {
		if err := c.delete(ctx, c.ports, ensurePort, id); err != nil {
			if stuck, ok := errors.AsType[*Error](err); ok {
				progress = stuck.Detail
			}
			return progress, err
		}
	}

	err = c.change(ctx, e.object, creation, func(ctx context.Context) error {
		return c.agent.CreatePort(ctx, e.port)
	})
	e.optionsSet = err == nil && !e.port.hasOptions() // a new port has no options
	if err := c.verifyCreated(ctx, c.ports, ensurePort, id, err); err != nil {
		return "", err
	}
	if !e.optionsSet {
		_, err = e.setPortOptions(ctx)
		return "created, not up yet", err
	}

	return "created, not up yet", nil
}

// setPortOptions sends the port's options to the agent. again reports that the port must be read
// again, because it may have been replaced meanwhile.
func (e *portEnsurer) setPortOptions(ctx context.Context) (again bool, err error) {
	e.optionsSet = true
	return e.client.setOptions(ctx, ensurePort, e.object, func(ctx context.Context) error {
		return e.client.agent.SetPortOptions(ctx, e.port)
	})
}

// retry asks the agent once to bring the failed port into service. Later it returns an error if the
// port stays failed.
func (e *portEnsurer) retry(ctx context.Context, got PortStatus) error {
	e.failedSince = cmp.Or(e.failedSince, time.Now())
	if !e.mayRetry {
		return e.client.failedFor(e.failedSince, ensurePort, e.port.ID, got.Status)
	}

	e.mayRetry = false
	err := e.client.change(ctx, e.object, update, func(ctx context.Context) error {
		return e.client.agent.RetryPort(ctx, e.port)
	})
	return e.client.failure(ctx, ensurePort, e.port.ID, err)
}

// failedFor returns ErrFailed if the object has been failed for longer than the grace period, and
// nil otherwise.
func (c *Client) failedFor(since time.Time, op, id string, got Status) error {
	if time.Since(since) < c.failedGrace {
		return nil
	}
	return &Error{Kind: ErrFailed, Op: op, ID: id, Detail: got.Detail}
}

// DeletePort returns nil once the agent reports that the port does not exist, or that another owner
// has it. Until then its Function must not be given to another pod, because the xPU may still
// forward frames for its last owner. The error is [ErrUnknown] if the agent does not report the
// port's owner; the port is left unchanged then.
//
// Without [Traits.Verifies], DeletePort always calls the agent, and returns nil once the agent has
// accepted the deletion.
func (c *Client) DeletePort(ctx context.Context, id string) error {
	const op = "delete port"
	if !c.traits.Verifies {
		return c.deleteUnverified(ctx, op, id)
	}
	return c.delete(ctx, c.ports, op, id)
}

// GetPort returns the agent's port with this id. The error is ErrNotFound if there is none, and
// ErrUnknown if the agent reports too little about it. It is ErrUnsupported without
// [Traits.Verifies].
func (c *Client) GetPort(ctx context.Context, id string) (PortStatus, error) {
	const op = "get port"
	if err := checkID(op, id); err != nil {
		return PortStatus{}, err
	}

	o := c.ports.object(id)
	if _, err := c.waitForChange(ctx, op, o); err != nil {
		return PortStatus{}, err
	}

	got, err := c.agent.Port(ctx, id)
	err = c.failure(ctx, op, id, err)
	if doubt := c.changes.doubt(o, creation); errors.Is(err, ErrNotFound) && doubt != "" {
		return PortStatus{}, &Error{Kind: ErrUnavailable, Op: op, ID: id, Detail: doubt, Err: err}
	}

	return got, err
}

// ListPorts returns all ports in the agent's order, including other clients'. The result is not a
// snapshot: a port created or deleted during the call may be missing or present. A port about which
// the list reports too little has [StateUnknown].
func (c *Client) ListPorts(ctx context.Context) ([]PortStatus, error) {
	all, err := c.agent.Ports(ctx)
	return all, c.failure(ctx, "list ports", "", err)
}
