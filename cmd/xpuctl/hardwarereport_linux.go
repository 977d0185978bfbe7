// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/probe"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// state returns the agent's state, or the kernel's if no agent has ever run here. If an agent has
// left a journal but does not answer, state returns an error, because pods may use its VFs.
func (o *reportOptions) state(ctx context.Context) (*nodestate.State, error) {
	client := nodestate.Client{Socket: o.socket}
	if client.Runs() {
		return client.State(ctx)
	}

	if _, err := os.Stat(o.journal); err == nil {
		return nil, fmt.Errorf(
			"xpu-agent does not answer at %s, and its journal %s says what pods have: start it first",
			o.socket, o.journal)
	}

	return kernelState(ctx, "/")
}

// inUseOnHost describes how the host uses a netdev, or returns "".
func inUseOnHost(name string) string {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Sprintf("has a netdev that cannot be read: %v", err)
	}
	if link.Attrs().RawFlags&unix.IFF_UP != 0 {
		return "is up on the host as " + name + ": set it down first, if nobody uses it"
	}

	addresses, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil || len(addresses) > 0 {
		return fmt.Sprintf("has addresses on the host: %v, %v", addresses, err)
	}

	return ""
}

// probe probes the VFs one after the other. It records an observation that two of them share only
// once.
func (o *reportOptions) probe(
	c *cobra.Command, state *nodestate.State, chosen []nodestate.Function,
) (personality.Personality, error) {
	engine, err := netdev.New(netdev.Options{})
	if err != nil {
		return personality.Personality{}, err
	}
	defer engine.Close()

	var observed []probe.Observation
	for _, f := range chosen {
		terminal.Line(c.ErrOrStderr(), "%s: VF %d of PF %s (%s), netdev %s",
			f.ID, f.Index, f.PFName, f.PF, f.Netdev)
		pf := &netdev.PF{Name: f.PFName, Address: string(f.PF), VF: f.Index}
		device := netdev.Device{Name: f.Netdev, PF: pf}
		got, notes, err := probe.VF(c.Context(), device, probe.Options{
			Engine: engine, Speed: speedOf(f.PFName),
			Trace: func(step string) { terminal.Line(c.ErrOrStderr(), "  asking for %s", step) },
		})
		if err != nil {
			return personality.Personality{}, fmt.Errorf("Function %s: %w", f.ID, err)
		}

		for _, note := range notes {
			terminal.Line(c.ErrOrStderr(), "  given back, but: %s", note)
		}

		for _, one := range got {
			same := func(o probe.Observation) bool { return o.Knob == one.Knob }
			if !slices.ContainsFunc(observed, same) {
				observed = append(observed, one)
			}
		}
	}

	card, err := cardOf(state, chosen[0])
	return probe.Report(card, observed, time.Now()), err
}

// cardOf describes the card of a VF.
func cardOf(state *nodestate.State, vf nodestate.Function) (probe.Card, error) {
	var release unix.Utsname
	if err := unix.Uname(&release); err != nil {
		return probe.Card{}, err
	}

	card := probe.Card{
		Vendor: vf.Vendor, Device: vf.Device, PF: vf.Driver, VF: vf.Driver,
		Kernel: unix.ByteSliceToString(release.Release[:]),
	}

	for _, f := range state.Functions {
		if f.Kind == function.PF && f.ID.Address == vf.PF {
			card.Vendor, card.Device, card.PF, card.Board = f.Vendor, f.Device, f.Driver, f.Board
		}
	}

	var err error
	card.Switchdev, err = inSwitchdev(vf.PF)
	return card, err
}

func inSwitchdev(pf pci.Address) (bool, error) {
	conn, err := devlink.Dial("")
	if err != nil {
		return false, err
	}
	defer conn.Close()

	mode, err := conn.EswitchMode(devlink.OfPCI(pf))
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) {
		return false, nil // a card without an eswitch
	}

	return mode == devlink.Switchdev, err
}

// speedOf returns the speed of a PF's link in Mbit/s, or 0 if unknown.
func speedOf(netdev string) int {
	content, err := os.ReadFile(filepath.Join("/sys/class/net", netdev, "speed"))
	if err != nil {
		return 0 // no link, or a driver that does not report it
	}
	speed, _ := strconv.Atoi(strings.TrimSpace(string(content)))
	return max(speed, 0)
}
