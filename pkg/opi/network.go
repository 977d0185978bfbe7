// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/utils/ptr"
)

// Network is an L2 segment on the xPU. OPI calls it a LogicalBridge.
type Network struct {
	ID   string  // 4-63 characters of a-z, 0-9, '-'; see [NetworkID]
	VLAN uint16  // 1-4094
	VNI  *uint32 // VXLAN network identifier, 1-16777215; nil keeps the network on this xPU

	// Only for agents with [Options]; not set in a NetworkStatus.
	MTU          int // of interfaces in the network, in bytes; 0 if unknown
	SourceFilter SourceFilter

	// Gateway is the network's gateway on the xPU; nil for a network without. It is only for agents
	// with [Traits.Gateways], and not set in a NetworkStatus.
	Gateway *Gateway
}

// Network returns the installation's network with this name. VLAN and VNI are as in an XPUNetwork
// or a configuration.
func (i Installation) Network(name string, vlan int32, vni *int32) Network {
	n := Network{ID: i.NetworkID(name), VLAN: uint16(vlan)}
	if vni != nil {
		n.VNI = new(uint32(*vni))
	}
	return n
}

// NetworkStatus is a network as reported by the agent.
type NetworkStatus struct {
	Network
	Status
}

func (n Network) check(op string, owner Installation) error {
	if err := checkID(op, n.ID); err != nil {
		return err
	}
	if !owner.Owns(n.ID) {
		return invalid(op, n.ID, "ID", "must begin with %s-, the mark of the installation", owner)
	}
	if n.VLAN < 1 || n.VLAN > 4094 {
		return invalid(op, n.ID, "VLAN", "%d is not in 1-4094", n.VLAN)
	}
	if n.VNI != nil && (*n.VNI < 1 || *n.VNI > 1<<24-1) {
		return invalid(op, n.ID, "VNI", "%d is not in 1-16777215", *n.VNI)
	}

	return nil
}

// difference describes how the agent's network differs from the wanted network n, or returns "". It
// compares only what n sets, because agents fill in the rest, such as a VTEP address.
func (n Network) difference(got Network) string {
	if got.VLAN != n.VLAN {
		return fmt.Sprintf("the agent has it with VLAN %d, not %d", got.VLAN, n.VLAN)
	}
	if has, wants := ptr.Deref(got.VNI, 0), ptr.Deref(n.VNI, 0); has != wants {
		return fmt.Sprintf("the agent has it with VNI %d, not %d (0 is none)", has, wants)
	}
	return ""
}

// sameAs reports whether an agent that has n need change nothing to have the wanted network.
func (n Network) sameAs(wanted Network) bool {
	if (n.Gateway == nil) != (wanted.Gateway == nil) ||
		n.Gateway != nil && !n.Gateway.Equal(*wanted.Gateway) {
		return false
	}
	return wanted.difference(n) == "" && n.MTU == wanted.MTU &&
		n.SourceFilter == wanted.SourceFilter
}

// EnsureNetwork returns nil once the agent reports that the network is up with exactly this VLAN
// and VNI.
//
// The error is ErrConflict if the network has another VLAN or VNI; it is left unchanged, because
// ports may use it. The error is also ErrConflict if another network has this VLAN or VNI, because
// agents may accept two such networks and connect them. The error is ErrUnknown if the agent
// reports too little about the network. Without [Traits.Networks], the network is only checked.
//
// If the network has a gateway, EnsureNetwork returns nil once the agent reports that the network's
// VRF and its gateway are up too. The error is ErrUnsupported if the agent makes no gateways.
func (c *Client) EnsureNetwork(ctx context.Context, n Network) error {
	const op = "ensure network"
	if err := n.check(op, c.installation); err != nil {
		return err
	}
	if n.Gateway != nil {
		return c.ensureRouted(ctx, op, n)
	}
	return c.ensureBridge(ctx, op, n)
}

// ensureBridge is [Client.EnsureNetwork] without the gateway.
func (c *Client) ensureBridge(ctx context.Context, op string, n Network) error {
	if !c.traits.Networks {
		return c.failure(ctx, op, n.ID, c.agent.CreateNetwork(ctx, n, c.vtep))
	}

	o := c.networks.object(n.ID)
	var failedSince time.Time // since when the network has been failed
	optionsSet := false       // the agent has the network's options
	setOptions := func(ctx context.Context) (again bool, err error) {
		optionsSet = true
		return c.setOptions(ctx, op, o, func(ctx context.Context) error {
			mtu, err := c.agent.SetNetworkOptions(ctx, n)
			if err == nil {
				c.mtus.Store(n.ID, mtu)
			}
			return err
		})
	}

	return await(ctx, op, n.ID, func(ctx context.Context) (done bool, progress string, err error) {
		if progress, err := c.waitForChange(ctx, op, o); err != nil {
			return false, progress, err
		}

		got, err := c.agent.Network(ctx, n.ID)
		err = c.failure(ctx, op, n.ID, err)
		if errors.Is(err, ErrNotFound) {
			c.changes.observe(o, false)
			if err := c.checkConflicts(ctx, op, n); err != nil {
				return false, "", err
			}

			err := c.change(ctx, o, creation, func(ctx context.Context) error {
				return c.agent.CreateNetwork(ctx, n, c.vtep)
			})
			if err := c.verifyCreated(ctx, c.networks, op, n.ID, err); err != nil {
				return false, "", err
			}

			_, err = setOptions(ctx)
			return false, "created, not up yet", err
		}

		if err != nil {
			return false, "", err
		}

		progress = got.describe("network")
		c.changes.observe(o, got.State != StateDeleting)
		if got.State == StateDeleting {
			return false, progress, nil
		}
		if difference := n.difference(got.Network); difference != "" {
			return false, progress, &Error{Kind: ErrConflict, Op: op, ID: n.ID, Detail: difference}
		}

		if !optionsSet {
			if again, err := setOptions(ctx); again || err != nil {
				return false, progress, err
			}
		}

		if got.State == StateFailed {
			failedSince = cmp.Or(failedSince, time.Now())
			return false, progress, c.failedFor(failedSince, op, n.ID, got.Status)
		}

		failedSince = time.Time{}
		if doubt := c.changes.doubt(o, deletion); doubt != "" {
			return false, doubt, nil
		}

		return got.State == StateUp, progress, nil
	})
}

// checkConflicts returns ErrConflict if another network at the agent has the VLAN or VNI of the
// network. An agent that cannot list networks is trusted to reject that itself.
func (c *Client) checkConflicts(ctx context.Context, op string, n Network) error {
	all, err := c.agent.Networks(ctx)
	if err := c.failure(ctx, op, n.ID, err); errors.Is(err, ErrUnsupported) {
		return nil
	} else if err != nil {
		return err
	}

	for _, other := range all {
		sameVNI := n.VNI != nil && other.VNI != nil && *n.VNI == *other.VNI
		if other.ID == n.ID || other.VLAN != n.VLAN && !sameVNI {
			continue
		}

		owner := "somebody else's"
		if c.installation.Owns(other.ID) {
			owner = "one of this installation that is to go"
		}

		detail := fmt.Sprintf("the agent has VLAN %d, VNI %d already in network %s, %s", other.VLAN,
			ptr.Deref(other.VNI, 0), other.ID, owner)
		return &Error{Kind: ErrConflict, Op: op, ID: n.ID, Detail: detail}
	}

	return nil
}

// ListNetworks returns all networks of the agent, like [Client.ListPorts] does for ports.
func (c *Client) ListNetworks(ctx context.Context) ([]NetworkStatus, error) {
	all, err := c.agent.Networks(ctx)
	return all, c.failure(ctx, "list networks", "", err)
}

// DeleteNetwork returns nil once the agent reports that the network does not exist, nor its gateway
// and the VRFs of the installation that have no gateway left. VRFs stay at an agent that does not
// allow this client to list or to delete them. The error is ErrInUse while ports use the network.
// Without [Traits.Networks], it does nothing.
func (c *Client) DeleteNetwork(ctx context.Context, id string) error {
	if !c.traits.Networks {
		return nil
	}

	const op = "delete network"
	if err := checkID(op, id); err != nil {
		return err
	}
	if err := c.deleteGatewayOf(ctx, op, id); err != nil {
		return err
	}
	if err := c.delete(ctx, c.networks, op, id); err != nil {
		return err
	}
	c.mtus.Delete(id)

	return c.deleteUnusedVRFs(ctx)
}
