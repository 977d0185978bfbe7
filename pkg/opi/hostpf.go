// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// HostPF is a PF that an xPU gives its host, as the xPU sees it: it does not know the PF's PCI
// address there.
type HostPF struct {
	// Name is the phys_port_name of the PF's representor: "c1pf0" for PF 0 of the host that is
	// controller 1, "pf0" where the card names no controllers (net/devlink/port.c of the kernel).
	Name   string
	MAC    function.MAC // of the PF's netdev at the host; "" if unknown
	Serial string       // of the card, at most [MaxSerial] bytes of printable ASCII; "" if unknown
}

// MaxSerial bounds a HostPF's Serial, as the Vital Product Data of PCI do.
const MaxSerial = 255

// HostPFPrefix is what [HostPF.String] begins with.
const HostPFPrefix = "host-pf "

// MaxHostPFs bounds how many PFs an xPU can say that it has.
const MaxHostPFs = 64

// hostPFForm is what String returns. The serial number, which may have spaces, is its end.
var hostPFForm = regexp.MustCompile(
	`^host-pf ((?:c[0-9]{1,10})?pf[0-9]{1,5})(?: hw_addr ([0-9a-f:]+))?(?: serial ([ -~]{1,255}))?$`,
)

// String is the form in which opi-bridge tells of the PF in its inventory, in the words of
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

// HostPFs returns the PFs that the xPU gives its host; none for an agent that does not tell.
func (c *Client) HostPFs(ctx context.Context) ([]HostPF, error) {
	pfs, err := c.agent.HostPFs(ctx)
	return pfs, c.failure(ctx, "ask for the host's PFs", "", err)
}

// HostPFs is [Client.HostPFs].
func (s *Session) HostPFs(ctx context.Context) ([]HostPF, error) {
	pfs, err := s.client.HostPFs(ctx)
	return pfs, s.counted("HostPFs", err)
}

// PortIDAt is the id under which a Function's Port is kept on an xPU that numbers its host's
// Functions: the phys_port_name of its representor. hostPF is the name of its PF, and of is "vf3",
// "sf88", or "" for the PF itself. Unlike [PortID] it means the same to host and xPU without either
// knowing the other's PCI addresses.
func PortIDAt(hostPF, of string) string { return hostPF + of }
