// SPDX-License-Identifier: Apache-2.0

package bridge

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

// HostPF is what an administrator tells of a PF whose Functions are for clients: one of the host,
// which the DPU's sysfs lacks, or one of this machine, if the clients' pods run here too.
type HostPF struct {
	// of the PF at the host; "" if clients name Functions as the eswitch numbers them, by
	// opi.PortIDAt
	Address pci.Address
	// the xPU's own PF that has the eswitch; may be "" if only one eswitch has a PF of this name
	Eswitch pci.Address
	// Offset and Stride are those of the PF's SR-IOV capability: VF i has the PF's routing ID plus
	// Offset plus i times Stride. Without them both are 0, and no VF is found.
	Offset, Stride int
	// MAC and Serial are what the card tells the host, for an xPU whose devlink does not tell them;
	// "" otherwise.
	MAC    function.MAC
	Serial string

	// phys_port_name of the PF's representor: "c1pf0"; "" if the PF is this machine's own
	name string
}

// ownPF takes the place of a name in the text of a PF of this machine.
const ownPF = "own"

// isOwn reports whether the PF is this machine's own: sysfs tells of its VFs.
func (p HostPF) isOwn() bool { return p.name == "" }

// ParseHostPF reads "0000:3b:00.0=c1pf0,offset=2,stride=1": the PF's address at the host, the
// phys_port_name of its representor, and the VF offset and stride of the host's lspci -vv. The key
// eswitch is the PCI address of the xPU's own PF. Without an address,
// "c1pf0,mac=02:00:00:00:00:01,serial=MT2334XZ0LTK" tells what joins the PF to the host's.
// "0000:01:00.0=own" is a PF of this machine, of which sysfs tells the rest.
func ParseHostPF(s string) (p HostPF, err error) {
	defer func() {
		if err != nil {
			p, err = HostPF{}, fmt.Errorf("host PF %q: %w; it must be like "+
				"0000:3b:00.0=c1pf0,offset=2,stride=1, "+
				"or 0000:01:00.0=own for a PF of this machine", s, err)
		}
	}()

	options := strings.Split(s, ",")
	p.name, options = options[0], options[1:]
	if address, name, hasAddress := strings.Cut(p.name, "="); hasAddress {
		p.name = name
		if p.Address, err = pci.Parse(address); err != nil {
			return p, err
		}
	}

	if p.name == ownPF && p.Address != "" {
		if len(options) > 0 {
			return p, fmt.Errorf("nothing may follow %s: sysfs tells the rest", ownPF)
		}
		return HostPF{Address: p.Address}, nil
	}

	if name, ok := parsePortName(p.name); !ok || name.function != "" {
		return p, fmt.Errorf("%q is not the phys_port_name of a PF's representor", p.name)
	}

	told := map[string]bool{}
	for _, option := range options {
		key, value, _ := strings.Cut(option, "=")
		if told[key] {
			return p, fmt.Errorf("%s is told twice", key)
		}

		told[key] = true
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
			return p, fmt.Errorf("%q is none of offset, stride, eswitch, mac, serial", key)
		}

		if err != nil {
			return p, fmt.Errorf("%s: %w", key, err)
		}
	}

	if told["offset"] != told["stride"] {
		return p, errors.New("offset and stride go together")
	}
	if told["offset"] && p.Address == "" {
		return p, errors.New("offset and stride need the PF's address")
	}

	return p, nil
}

// ReadHostPFs reads a file with a host PF in each line. It returns none if there is no such file.
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

// parseDistance reads an offset or stride, which have 16 bits (PCI Express 6.0, sections 9.3.3.9
// and 9.3.3.10).
func parseDistance(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q: must be 1-65535", s)
	}
	return int(n), nil
}

func parseSerial(s string) (string, error) {
	again, err := opi.ParseHostPF(opi.HostPF{Name: "pf0", Serial: s}.String())
	if err != nil || again.Serial != s || s == "" {
		return "", fmt.Errorf("%q: must be 1-%d characters of printable ASCII", s, opi.MaxSerial)
	}
	return s, nil
}

// checkHostPFs refuses two PFs with one address, and two with one name at one eswitch: they would
// have the same representors.
func checkHostPFs(all []HostPF) error {
	for i, p := range all {
		for _, other := range all[:i] {
			if p.Address == other.Address && p.Address != "" {
				return fmt.Errorf("host PF %s is told twice", p.Address)
			}

			apart := p.isOwn() || p.Eswitch != "" && other.Eswitch != "" &&
				p.Eswitch != other.Eswitch
			if p.name == other.name && !apart {
				return fmt.Errorf("host PFs %s and %s are both %s, of which an eswitch has one: "+
					"say which with eswitch= of both",
					cmp.Or(other.Address, "without address"),
					cmp.Or(p.Address, "without address"), p.name)
			}
		}
	}
	return nil
}

// withAddress returns those whose addresses are told.
func withAddress(all []HostPF) (told []HostPF) {
	for _, pf := range all {
		if pf.Address != "" {
			told = append(told, pf)
		}
	}
	return told
}

// eswitchPort returns the port of one of the PF's Functions: "vf3", "sf88", or "" for the PF
// itself.
func (p HostPF) eswitchPort(function string) eswitchPort {
	if p.isOwn() {
		return eswitchPort{eswitch: p.Address, name: portName{function: function}}
	}
	return eswitchPort{eswitch: p.Eswitch, name: portName{p.name, function}}
}

// resolve returns the port of an SF of the PF, or of the PF itself if function is "".
func (p HostPF) resolve(function string) (eswitchPort, error) {
	if p.isOwn() && function == "" {
		return eswitchPort{},
			fmt.Errorf("%s is a PF of this machine, which keeps it: only its VFs and "+
				"SFs have representors", p.Address)
	}
	return p.eswitchPort(function), nil
}
