package bridge

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// HostPF tells how the eswitch of a DPU numbers a PF of its host, and the PF's VFs and SFs: the DPU's own sysfs knows
// nothing of the host's PCI addresses.
type HostPF struct {
	// Address is the PF's at the host.
	Address pci.Address
	// External says that phys_port_name has a controller ("c1pf0"), and Controller is its number.
	External   bool
	Controller uint32
	// Number is the PF's.
	Number uint16
	// Offset and Stride are those of the PF's SR-IOV capability: VF i has the PF's routing ID plus Offset plus i times
	// Stride. Both are 0 if they were not told; VFs are then not found.
	Offset, Stride int
	// Eswitch is the xPU's own PF that has the eswitch, "" if there is only one with such a PF.
	Eswitch pci.Address
}

// hostPFForm is what ParseHostPF says would be right.
const hostPFForm = "must be like 0000:3b:00.0=c1pf0,offset=2,stride=1"

// ParseHostPF reads "0000:3b:00.0=c1pf0,offset=2,stride=1": the PF's address at the host, the phys_port_name of its
// representor, and what the host's lspci -vv tells of its VFs. More keys: eswitch, the PCI address of the xPU's own PF.
func ParseHostPF(s string) (HostPF, error) {
	fail := func(err error) (HostPF, error) {
		return HostPF{}, fmt.Errorf("host PF %q: %w; it %s", s, err, hostPFForm)
	}
	address, rest, _ := strings.Cut(s, "=")
	options := strings.Split(rest, ",")
	var p HostPF
	var err error
	if p.Address, err = pci.Parse(address); err != nil {
		return fail(err)
	}
	if err := p.parseName(options[0]); err != nil {
		return fail(err)
	}
	told := map[string]bool{}
	for _, option := range options[1:] {
		key, value, _ := strings.Cut(option, "=")
		if told[key] {
			return fail(fmt.Errorf("%s is told twice", key))
		}
		told[key] = true
		if err := p.parseOption(key, value); err != nil {
			return fail(err)
		}
	}
	if told["offset"] != told["stride"] {
		return fail(errors.New("offset and stride go together"))
	}
	return p, nil
}

func (p *HostPF) parseName(name string) error {
	s, ok := parsePortName(name)
	if !ok || s.flavour != devlink.PCIPF {
		return fmt.Errorf("%q is not the phys_port_name of a PF's representor", name)
	}
	p.External, p.Controller, p.Number = s.external, s.controller, s.pf
	return nil
}

func (p *HostPF) parseOption(key, value string) (err error) {
	switch key {
	case "offset":
		p.Offset, err = parseDistance(value)
	case "stride":
		p.Stride, err = parseDistance(value)
	case "eswitch":
		p.Eswitch, err = pci.Parse(value)
	default:
		return fmt.Errorf("%q is none of offset, stride, eswitch", key)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// parseDistance reads an offset or stride, which have 16 bits (PCI Express 6.0, sections 9.3.3.9 and 9.3.3.10).
func parseDistance(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q: must be 1-65535", s)
	}
	return int(n), nil
}

// String is the form that [ParseHostPF] reads.
func (p HostPF) String() string {
	s := string(p.Address) + "=" + p.portName()
	if p.Stride != 0 {
		s += fmt.Sprintf(",offset=%d,stride=%d", p.Offset, p.Stride)
	}
	if p.Eswitch != "" {
		s += ",eswitch=" + string(p.Eswitch)
	}
	return s
}

func (p HostPF) portName() string {
	name := fmt.Sprintf("pf%d", p.Number)
	if p.External {
		name = fmt.Sprintf("c%d", p.Controller) + name
	}
	return name
}

// checkHostPFs says whether an address is told twice, as no rule could choose, or a PF of the eswitch: functions of two
// PFs would have the same representors.
func checkHostPFs(all []HostPF) error {
	for i, p := range all {
		for _, other := range all[:i] {
			if p.Address == other.Address {
				return fmt.Errorf("host PF %s is told twice", p.Address)
			}
			apart := p.Eswitch != "" && other.Eswitch != "" && p.Eswitch != other.Eswitch
			if p.portName() == other.portName() && !apart {
				return fmt.Errorf("host PFs %s and %s are both %s, of which an eswitch has one: say which with eswitch= of both",
					other.Address, p.Address, p.portName())
			}
		}
	}
	return nil
}

// vf is the index of the VF that has this address if it is one of the PF's, and how far its address is from the first
// VF's. That there are so many VFs is not said.
func (p HostPF) vf(address pci.Address) (index, distance int, ok bool) {
	domain, id := routingID(p.Address)
	ofDomain, of := routingID(address)
	distance = of - id - p.Offset
	if p.Stride == 0 || domain != ofDomain || distance < 0 || distance%p.Stride != 0 {
		return 0, 0, false
	}
	return distance / p.Stride, distance, true
}

// routingID is the number that an address without its domain is (PCI Express 6.0, section 2.2.4.2).
func routingID(a pci.Address) (domain string, id int) {
	var bus, device, function int
	domain, rest, _ := strings.Cut(string(a), ":")
	_, _ = fmt.Sscanf(rest, "%02x:%02x.%d", &bus, &device, &function) // the form of addresses is known
	return domain, bus<<8 | device<<3 | function
}
