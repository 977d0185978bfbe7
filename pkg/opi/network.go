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

// Network is an L2 segment on the xPU. In OPI it is a LogicalBridge.
type Network struct {
	ID   string  // 4-63 characters of a-z, 0-9, '-'; see [NetworkID]
	VLAN uint16  // 1-4094
	VNI  *uint32 // VXLAN network identifier, 1-16777215; nil keeps the network on this xPU

	// For agents that have [Options]; not in a NetworkStatus.
	MTU          int // of the interfaces in the network in bytes; 0 is unknown
	SourceFilter SourceFilter
}

// Network is the installation's network of this name, with VLAN and VNI as XPUNetworks and
// configurations declare them.
func (i Installation) Network(name string, vlan int32, vni *int32) Network {
	n := Network{ID: i.NetworkID(name), VLAN: uint16(vlan)}
	if vni != nil {
		n.VNI = new(uint32(*vni))
	}
	return n
}

// NetworkStatus is a network as the agent has it.
type NetworkStatus struct {
	Network
	Status
}

func (n Network) check(op string, owner Installation) error {
	if err := checkID(op, n.ID); err != nil {
		return err
	}
	if !owner.Owns(n.ID) {
		return invalid(op, n.ID, "ID", "is not that of a network of installation %s", owner)
	}
	if n.VLAN < 1 || n.VLAN > 4094 {
		return invalid(op, n.ID, "VLAN", "%d is not in 1-4094", n.VLAN)
	}
	if n.VNI != nil && (*n.VNI < 1 || *n.VNI > 1<<24-1) {
		return invalid(op, n.ID, "VNI", "%d is not in 1-16777215", *n.VNI)
	}

	return nil
}

// differs says how the agent's network differs from the one wanted; empty if it does not. Only what
// we set is compared: agents fill in the rest, such as a VTEP address.
func (n Network) differs(got Network) string {
	if got.VLAN != n.VLAN {
		return fmt.Sprintf("the agent has it with VLAN %d, not %d", got.VLAN, n.VLAN)
	}
	if has, wants := ptr.Deref(got.VNI, 0), ptr.Deref(n.VNI, 0); has != wants {
		return fmt.Sprintf("the agent has it with VNI %d, not %d (0 is none)", has, wants)
	}
	return ""
}

// same tells whether an agent has nothing to change if it has one network and another one is
// wanted.
func (n Network) same(wanted Network) bool {
	return wanted.differs(n) == "" && n.MTU == wanted.MTU && n.SourceFilter == wanted.SourceFilter
}

// EnsureNetwork returns nil once the agent says that the network is up with exactly this VLAN and
// VNI. A network of the same id with others is ErrConflict and stays as it is: ports may be using
// it. So is a network of another id with this VLAN or VNI, as agents may take two such networks and
// join them. A network of which the agent does not tell enough is ErrUnknown.
func (c *Client) EnsureNetwork(ctx context.Context, n Network) error {
	const op = "ensure network"
	if err := n.check(op, c.installation); err != nil {
		return err
	}

	o := c.networks.object(n.ID)
	var failed time.Time // since when the network is failed
	told := false        // its options
	tell := func(ctx context.Context) (again bool, err error) {
		told = true
		return c.setOptions(ctx, op, o, func(ctx context.Context) error {
			mtu, err := c.agent.SetNetworkOptions(ctx, n)
			if err == nil {
				c.mtus.Store(n.ID, mtu)
			}
			return err
		})
	}

	return await(ctx, op, n.ID, func(ctx context.Context) (done bool, said string, err error) {
		if said, err := c.answered(ctx, op, o); err != nil {
			return false, said, err
		}

		got, err := c.agent.Network(ctx, n.ID)
		err = c.failure(ctx, op, n.ID, err)
		if errors.Is(err, ErrNotFound) {
			c.changes.seen(o, false)
			if err := c.checkRivals(ctx, op, n); err != nil {
				return false, "", err
			}

			err := c.change(ctx, o, creation, func(ctx context.Context) error {
				return c.agent.CreateNetwork(ctx, n)
			})
			if err := c.created(ctx, c.networks, op, n.ID, err); err != nil {
				return false, "", err
			}

			_, err = tell(ctx)
			return false, "created, not up yet", err
		}

		if err != nil {
			return false, "", err
		}

		said = got.of("network")
		c.changes.seen(o, got.State != StateDeleting)
		if got.State == StateDeleting {
			return false, said, nil
		}
		if difference := n.differs(got.Network); difference != "" {
			return false, said, &Error{Kind: ErrConflict, Op: op, ID: n.ID, Detail: difference}
		}

		if !told {
			if again, err := tell(ctx); again || err != nil {
				return false, said, err
			}
		}

		if got.State == StateFailed {
			failed = cmp.Or(failed, time.Now())
			return false, said, c.failedFor(failed, op, n.ID, got.Status)
		}

		failed = time.Time{}
		if doubt := c.changes.doubt(o, deletion); doubt != "" {
			return false, doubt, nil
		}

		return got.State == StateUp, said, nil
	})
}

// checkRivals returns ErrConflict if the agent has the VLAN or VNI of the network in another one.
// An agent that cannot list its networks is trusted to refuse that itself.
func (c *Client) checkRivals(ctx context.Context, op string, n Network) error {
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

// ListNetworks gives all networks of the agent, as [Client.ListPorts] does ports.
func (c *Client) ListNetworks(ctx context.Context) ([]NetworkStatus, error) {
	all, err := c.agent.Networks(ctx)
	return all, c.failure(ctx, "list networks", "", err)
}

// DeleteNetwork returns nil once the agent says that there is no such network. It is ErrInUse while
// ports use it.
func (c *Client) DeleteNetwork(ctx context.Context, id string) error {
	err := c.delete(ctx, c.networks, "delete network", id)
	if err == nil {
		c.mtus.Delete(id)
	}
	return err
}
