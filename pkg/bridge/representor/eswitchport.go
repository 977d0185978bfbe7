// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// portName is the phys_port_name of a Function's representor (net/devlink/port.c), in two parts.
type portName struct {
	pf       string // "pf0", or "c1pf0" with the controller if the PF belongs to another machine
	function string // "vf3", "sf88", or "" for the PF itself
}

// nameOf returns the phys_port_name of a devlink port's netdev. It is zero if the port belongs to
// no Function.
func nameOf(port devlink.Port) portName {
	name := portName{pf: fmt.Sprintf("pf%d", port.PF)}
	if port.External {
		name.pf = fmt.Sprintf("c%dpf%d", port.Controller, port.PF)
	}

	switch port.Flavour {
	case devlink.PCIPF:
	case devlink.PCIVF:
		name.function = function.VFName(int(port.VF))
	case devlink.PCISF:
		name.function = fmt.Sprintf("sf%d", port.SF)
	default:
		return portName{}
	}

	return name
}

// PFName returns the phys_port_name of the PF that a Function's devlink port belongs to, such as
// "c1pf0".
func PFName(port devlink.Port) string { return nameOf(port).pf }

// portNameForm is the form of a Function's phys_port_name. Kernels before 5.10 name no controllers.
var portNameForm = regexp.MustCompile(
	`^((?:c(0|[1-9][0-9]*))?pf(0|[1-9][0-9]*))((?:vf|sf)(0|[1-9][0-9]*))?$`,
)

// parsePortName parses a phys_port_name. ok is false for the name of an uplink or of anything else
// that is not a Function's representor.
func parsePortName(name string) (_ portName, ok bool) {
	parts := portNameForm.FindStringSubmatch(name)
	if parts == nil {
		return portName{}, false
	}

	// The parts are the numbers of the controller, the PF and the Function.
	for i, bits := range map[int]int{2: 32, 3: 16, 5: 32} {
		if _, err := strconv.ParseUint(cmp.Or(parts[i], "0"), 10, bits); err != nil {
			return portName{}, false
		}
	}

	return portName{pf: parts[1], function: parts[4]}, true
}

// isExternal reports whether the Function belongs to another machine. The kernel names the
// controller then.
func (n portName) isExternal() bool { return strings.HasPrefix(n.pf, "c") }

// eswitchPort is the port of an eswitch that a Function is connected to. The netdev of the port is
// the Function's representor.
type eswitchPort struct {
	eswitch pci.Address // the PF on this machine that has the eswitch, "" for any eswitch
	// name has no pf if the eswitch has the Functions of only one PF, because the driver may give
	// that PF any number.
	name portName
}

// hasName reports whether the port may have this phys_port_name.
func (p eswitchPort) hasName(name portName) bool {
	samePF := name.pf == p.name.pf || p.name.pf == "" && strings.HasPrefix(name.pf, "pf")
	return samePF && name.function == p.name.function
}

func (p eswitchPort) String() string {
	name := p.name.pf + p.name.function
	if p.eswitch == "" {
		return name
	}
	return name + " of " + string(p.eswitch)
}
