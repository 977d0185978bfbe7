// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// A hostile pod gives its interface so many alternative names of the maximum length (ALTIFNAMSIZ)
// that the kernel's answer about it is larger than the buffers of libraries.
const (
	manyNames  = 300
	nameLength = 127
)

// harm does to the pod's interface what a container with NET_ADMIN can do. It renames the
// interface, reads all frames, gives it names, and puts a macvlan on it into the namespace of an
// accomplice.
func (l *life) harm(s sandbox) error {
	h := s.Handle()
	net1, err := h.LinkByName("net1")
	if err != nil {
		if l.cards.justReset() {
			return nil
		}
		return fmt.Errorf("net1: %w", err)
	}

	if l.accomplice, err = netns.Make(l.path("ns-accomplice-" + s.id)); err != nil {
		return err
	}

	spy := netlink.NewLinkAttrs()
	spy.Name, spy.ParentIndex = "spy", net1.Attrs().Index
	spy.Namespace = netlink.NsFd(l.accomplice.Fd())
	steps := []error{
		h.SetPromiscOn(net1),
		h.LinkSetAllmulticastOn(net1),
		h.LinkSetMTU(net1, 1000+l.random.IntN(400)),
		h.LinkAdd(&netlink.Macvlan{LinkAttrs: spy, Mode: netlink.MACVLAN_MODE_PRIVATE}),
	}

	for n := range manyNames {
		name := fmt.Sprintf("%s-%d-", l.name, n)
		steps = append(steps,
			h.LinkAddAltName(net1, name+strings.Repeat("x", nameLength-len(name))))
	}

	steps = append(steps, h.LinkSetDown(net1), h.LinkSetName(net1, "eth7"), h.LinkSetUp(net1))
	if link, err := l.accomplice.Handle().LinkByName("spy"); err == nil {
		steps = append(steps, l.accomplice.Handle().LinkSetUp(link))
	}
	if err := errors.Join(steps...); err != nil && !l.cards.justReset() {
		return fmt.Errorf("harm: %w", err)
	}

	return nil
}

// betray returns an error if the pod's macvlan has outlived the pod although the Function is
// offered to other pods.
func (l *life) betray() error {
	if l.accomplice == nil {
		return nil
	}
	defer l.accomplice.Close()

	return await(l.t.Context(), "nothing is left on the interface of "+l.name, func() error {
		if _, err := l.accomplice.Handle().LinkByName("spy"); err != nil {
			return nil
		}

		kept, err := l.quarantined()
		if err == nil && kept[l.function] == "" {
			err = fmt.Errorf("Function %s still has a macvlan in another namespace, and is not "+
				"in quarantine", l.function)
		}

		return err
	})
}

// quarantined returns the Functions that the agent keeps from all pods, with the reasons.
func (n *node) quarantined() (map[function.ID]string, error) {
	client := nodestate.Client{Socket: n.path("state/admin.sock")}
	ctx, cancel := context.WithTimeout(n.t.Context(), 5*time.Second)
	defer cancel()

	state, err := client.State(ctx)
	if err != nil {
		return nil, err
	}

	kept := map[function.ID]string{}
	for _, f := range state.Functions {
		if f.Attachment != nil && f.Attachment.Quarantine != nil {
			kept[f.ID] = f.Attachment.Quarantine.Message
		}
	}

	return kept, nil
}
