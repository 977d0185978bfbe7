package bridge

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// HostPF tells how the eswitch of a DPU numbers a PF of its host, since the DPU's sysfs lacks the host's PCI addresses.
type HostPF struct {
	Address pci.Address // of the PF at the host
	Eswitch pci.Address // the xPU's own PF that has the eswitch; may be "" if only one eswitch has a PF of this name
	// Offset and Stride are those of the PF's SR-IOV capability: VF i has the PF's routing ID plus Offset plus i times
	// Stride. Without them both are 0, and no VF is found.
	Offset, Stride int

	name string // phys_port_name of the PF's representor: "c1pf0"
}

// ParseHostPF reads "0000:3b:00.0=c1pf0,offset=2,stride=1": the PF's address at the host, the phys_port_name of its
// representor, and the VF offset and stride of the host's lspci -vv. The key eswitch is the PCI address of the xPU's own PF.
func ParseHostPF(s string) (p HostPF, err error) {
	defer func() {
		if err != nil {
			p, err = HostPF{}, fmt.Errorf("host PF %q: %w; it must be like 0000:3b:00.0=c1pf0,offset=2,stride=1", s, err)
		}
	}()
	address, rest, _ := strings.Cut(s, "=")
	if p.Address, err = pci.Parse(address); err != nil {
		return p, err
	}
	options := strings.Split(rest, ",")
	p.name, options = options[0], options[1:]
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
		default:
			return p, fmt.Errorf("%q is none of offset, stride, eswitch", key)
		}
		if err != nil {
			return p, fmt.Errorf("%s: %w", key, err)
		}
	}
	if told["offset"] != told["stride"] {
		return p, errors.New("offset and stride go together")
	}
	return p, nil
}

// parseDistance reads an offset or stride, which have 16 bits (PCI Express 6.0, sections 9.3.3.9 and 9.3.3.10).
func parseDistance(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q: must be 1-65535", s)
	}
	return int(n), nil
}

// checkHostPFs refuses two PFs with one address, and two with one name at one eswitch: they would have the same representors.
func checkHostPFs(all []HostPF) error {
	for i, p := range all {
		for _, other := range all[:i] {
			if p.Address == other.Address {
				return fmt.Errorf("host PF %s is told twice", p.Address)
			}
			apart := p.Eswitch != "" && other.Eswitch != "" && p.Eswitch != other.Eswitch
			if p.name == other.name && !apart {
				return fmt.Errorf("host PFs %s and %s are both %s, of which an eswitch has one: say which with eswitch= of both",
					other.Address, p.Address, p.name)
			}
		}
	}
	return nil
}

// eswitchPort returns the port of one of the PF's Functions: "vf3", "sf88", or "" for the PF itself.
func (p HostPF) eswitchPort(function string) eswitchPort {
	return eswitchPort{eswitch: p.Eswitch, name: portName{p.name, function}}
}

// vf returns the index that a VF with this address would have, and its distance in routing IDs from the first VF.
func (p HostPF) vf(address pci.Address) (index, distance int, ok bool) {
	domain, id := routingID(p.Address)
	ofDomain, of := routingID(address)
	distance = of - id - p.Offset
	if p.Stride == 0 || domain != ofDomain || distance < 0 || distance%p.Stride != 0 {
		return 0, 0, false
	}
	return distance / p.Stride, distance, true
}

// routingID returns the bus, device and function of an address as one number (PCI Express 6.0, section 2.2.4.2).
func routingID(a pci.Address) (domain, id int) {
	var bus, device, function int
	_, _ = fmt.Sscanf(string(a), "%x:%x:%x.%d", &domain, &bus, &device, &function) // the form of addresses is known
	return domain, bus<<8 | device<<3 | function
}
