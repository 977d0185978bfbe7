// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// HostPF describes a PF that an xPU provides to its host, as seen from the xPU. The xPU does not
// know the PF's PCI address on the host.
type HostPF struct {
	// Name is the phys_port_name of the PF's representor: "c1pf0" for PF 0 of the host that is
	// controller 1, or "pf0" if the card does not number controllers (net/devlink/port.c in the
	// kernel).
	Name   string
	MAC    function.MAC // of the PF's netdev on the host; "" if unknown
	Serial string       // of the card, at most [MaxSerial] bytes of printable ASCII; "" if unknown
}

// MaxSerial bounds Serial in bytes, like the Vital Product Data of PCI.
const MaxSerial = 255

// HostPFPrefix is the prefix of [HostPF.String].
const HostPFPrefix = "host-pf "

// MaxHostPFs bounds the PFs that an xPU can report.
const MaxHostPFs = 64

// hostPFForm matches the result of String. The serial number comes last because it may contain
// spaces.
var hostPFForm = regexp.MustCompile(
	`^host-pf ((?:c[0-9]{1,10})?pf[0-9]{1,5})(?: hw_addr ([0-9a-f:]+))?(?: serial ([ -~]{1,255}))?$`,
)

// String returns the text that describes the PF in opi-bridge's inventory, in the style of
// devlink(8): "host-pf c1pf0 hw_addr 02:00:00:00:00:01 serial MT2334XZ0LTK".
func (p HostPF) String() string {
	text := HostPFPrefix + p.Name
	if p.MAC != "" {
		text += " hw_addr " + string(p.MAC)
	}
	if p.Serial != "" {
		text += " serial " + p.Serial
	}
	return text
}

// ParseHostPF reverses [HostPF.String].
func ParseHostPF(text string) (p HostPF, err error) {
	parts := hostPFForm.FindStringSubmatch(text)
	if parts == nil {
		return p, fmt.Errorf("%q is not of the form \"host-pf c1pf0 hw_addr 02:00:00:00:00:01 "+
			"serial MT2334XZ0LTK\"", Short(text))
	}

	p = HostPF{Name: parts[1], Serial: strings.TrimSpace(parts[3])}
	if parts[2] == "" {
		return p, nil
	}

	p.MAC, err = function.ParseMAC(parts[2])
	return p, err
}

// Is reports whether this is the PF with the PCI address on its host, and of this card. It compares
// the MAC addresses where both sides know them, because only one PF has a MAC address. Otherwise it
// compares the card's serial number and the number of the PCI function.
func (p HostPF) Is(address pci.Address, card function.Card) bool {
	if p.MAC != "" && card.MAC != "" {
		return p.MAC == card.MAC
	}
	_, number, _ := strings.Cut(p.Name, "pf")
	return p.Serial != "" && p.Serial == card.Serial &&
		strings.HasSuffix(string(address), "."+number)
}

// HostPFs returns the PFs that the xPU provides to its host. It returns none if the agent does not
// report them.
func (c *Client) HostPFs(ctx context.Context) ([]HostPF, error) {
	pfs, err := c.agent.HostPFs(ctx)
	return pfs, c.failure(ctx, "ask for the host's PFs", "", err)
}

// HostPFs is like [Client.HostPFs].
func (s *Session) HostPFs(ctx context.Context) ([]HostPF, error) {
	pfs, err := s.client.HostPFs(ctx)
	return pfs, s.countFailure("HostPFs", err)
}

// PortIDAt returns the id of a Function's Port on an xPU that numbers its host's Functions: the
// phys_port_name of the representor. hostPF is the name of the PF, and of is "vf3", "sf88", or ""
// for the PF itself. Unlike [PortID], this id needs no PCI address, so host and xPU agree on it
// without knowing each other's addresses.
func PortIDAt(hostPF, of string) string { return hostPF + of }
