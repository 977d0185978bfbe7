// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// HostPF is a PF whose Functions are for clients, as an administrator describes it. It is a PF of
// the host, which the DPU's sysfs lacks, or a PF of this machine, if the clients' pods run here.
type HostPF struct {
	// Address is the PF's PCI address at the host. It is "" if clients name Functions as the
	// eswitch numbers them, see opi.PortIDAt.
	Address pci.Address
	// Name is the phys_port_name of the PF's representor, such as "c1pf0". It is "" if the PF
	// belongs to this machine.
	Name string
	// Eswitch is the xPU's own PF that has the eswitch. It may be "" if only one eswitch has a PF
	// of this name.
	Eswitch pci.Address
	// Offset and Stride come from the PF's SR-IOV capability: VF i has the PF's routing ID plus
	// Offset plus i times Stride. If both are 0, no VF of the PF is found by its address.
	Offset, Stride int
	// MAC and Serial are what the card shows to the host. They are "" unless the xPU's devlink does
	// not know them.
	MAC    function.MAC
	Serial string
}

// ownPF takes the place of a name in the description of a PF of this machine.
const ownPF = "own"

// isOwn reports whether the PF belongs to this machine, so that sysfs describes its VFs.
func (p HostPF) isOwn() bool { return p.Name == "" }

// ParseHostPF parses one of these forms:
//
//   - "0000:3b:00.0=c1pf0,offset=2,stride=1" has the PF's address at the host, the phys_port_name
//     of its representor, and the VF offset and stride that the host's lspci -vv shows. The
//     optional key eswitch is the PCI address of the xPU's own PF.
//   - "c1pf0,mac=02:00:00:00:00:01,serial=MT2334XZ0LTK" has no address. The MAC address and the
//     serial number join the PF to a PF of the host.
//   - "0000:01:00.0=own" is a PF of this machine, and sysfs has the rest.
func ParseHostPF(s string) (p HostPF, err error) {
	defer func() {
		if err != nil {
			p, err = HostPF{}, fmt.Errorf("host PF %q: %w; it must be like "+
				"0000:3b:00.0=c1pf0,offset=2,stride=1, "+
				"or 0000:01:00.0=own for a PF of this machine", s, err)
		}
	}()

	options := strings.Split(s, ",")
	p.Name, options = options[0], options[1:]
	if address, name, hasAddress := strings.Cut(p.Name, "="); hasAddress {
		p.Name = name
		if p.Address, err = pci.Parse(address); err != nil {
			return p, err
		}
	}

	if p.Name == ownPF && p.Address != "" {
		if len(options) > 0 {
			return p, fmt.Errorf("nothing may follow %s: sysfs tells the rest", ownPF)
		}
		return HostPF{Address: p.Address}, nil
	}

	if name, ok := parsePortName(p.Name); !ok || name.function != "" {
		return p, fmt.Errorf("%q is not the phys_port_name of a PF's representor", p.Name)
	}

	return p, p.parseOptions(options)
}

// parseOptions sets the fields that the options "key=value" name.
func (p *HostPF) parseOptions(options []string) (err error) {
	seen := map[string]bool{}
	for _, option := range options {
		key, value, _ := strings.Cut(option, "=")
		if seen[key] {
			return fmt.Errorf("%s is given twice", key)
		}

		seen[key] = true
		switch key {
		case "offset":
			p.Offset, err = parseDistance(value)
		case "stride":
			p.Stride, err = parseDistance(value)
		case "eswitch":
			p.Eswitch, err = pci.Parse(value)
		case "mac":
			p.MAC, err = function.ParseMAC(value)
		case "serial":
			p.Serial, err = parseSerial(value)
		default:
			return fmt.Errorf("%q must be one of offset, stride, eswitch, mac, serial", key)
		}

		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}

	if seen["offset"] != seen["stride"] {
		return errors.New("offset and stride go together")
	}
	if seen["offset"] && p.Address == "" {
		return errors.New("offset and stride need the PF's address")
	}

	return nil
}

// ReadHostPFs reads a file with one host PF in each line. It returns no PFs and no error if the
// file does not exist.
func ReadHostPFs(path string) (all []HostPF, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	for n, line := range strings.Split(string(text), "\n") {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}

		pf, err := ParseHostPF(line)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, n+1, err)
		}
		all = append(all, pf)
	}

	return all, nil
}

// parseDistance parses an offset or stride. Both have 16 bits (PCI Express 6.0, sections 9.3.3.9
// and 9.3.3.10).
func parseDistance(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q: must be 1-65535", s)
	}
	return int(n), nil
}

// parseSerial accepts the serial numbers that opi.HostPF can carry.
func parseSerial(s string) (string, error) {
	again, err := opi.ParseHostPF(opi.HostPF{Name: "pf0", Serial: s}.String())
	if err != nil || again.Serial != s || s == "" {
		return "", fmt.Errorf("%q: must be 1-%d characters of printable ASCII", s, opi.MaxSerial)
	}
	return s, nil
}

// checkHostPFs refuses two PFs with one address, and two PFs with one name at one eswitch, because
// they would have the same representors.
func checkHostPFs(all []HostPF) error {
	for i, p := range all {
		for _, other := range all[:i] {
			if p.Address == other.Address && p.Address != "" {
				return fmt.Errorf("host PF %s is given twice", p.Address)
			}

			apart := p.isOwn() || p.Eswitch != "" && other.Eswitch != "" &&
				p.Eswitch != other.Eswitch
			if p.Name == other.Name && !apart {
				return fmt.Errorf("host PFs %s and %s are both %s, of which an eswitch has one: "+
					"say which with eswitch= of both",
					cmp.Or(other.Address, "without address"),
					cmp.Or(p.Address, "without address"), p.Name)
			}
		}
	}
	return nil
}

// eswitchPort returns the port of one of the PF's Functions: "vf3", "sf88", or "" for the PF
// itself. A PF of this machine has no representor itself.
func (p HostPF) eswitchPort(function string) (eswitchPort, error) {
	switch {
	case !p.isOwn():
		return eswitchPort{eswitch: p.Eswitch, name: portName{p.Name, function}}, nil
	case function == "":
		return eswitchPort{},
			fmt.Errorf("%s is a PF of this machine, which keeps it: only its VFs and "+
				"SFs have representors", p.Address)
	}
	return eswitchPort{eswitch: p.Address, name: portName{function: function}}, nil
}
