package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// portAttrs are the attributes by which an eswitch numbers a Function: devlink tells them for each port, and
// phys_port_name in a netdev's name of its port.
type portAttrs struct {
	external   bool // of another machine, and controller is the number of that one's
	controller uint32
	pf         uint16
	flavour    devlink.Flavour // PCIPF, PCIVF or PCISF
	number     uint32          // of the VF or SF
}

func attrsOf(port devlink.Port) portAttrs {
	a := portAttrs{external: port.External, pf: port.PF, flavour: port.Flavour}
	if port.External {
		a.controller = port.Controller
	}
	switch port.Flavour {
	case devlink.PCIVF:
		a.number = uint32(port.VF)
	case devlink.PCISF:
		a.number = port.SF
	}
	return a
}

// String is the phys_port_name that the kernel gives to the representor (net/devlink/port.c).
func (a portAttrs) String() string {
	name := fmt.Sprintf("pf%d", a.pf)
	if a.external {
		name = fmt.Sprintf("c%d", a.controller) + name
	}
	switch a.flavour {
	case devlink.PCIVF:
		name += fmt.Sprintf("vf%d", a.number)
	case devlink.PCISF:
		name += fmt.Sprintf("sf%d", a.number)
	}
	return name
}

// portNameForm is the form of representors' phys_port_name. Kernels before 5.10 know no controllers.
var portNameForm = regexp.MustCompile(`^(?:c([0-9]{1,10}))?pf([0-9]{1,5})(?:(vf|sf)([0-9]{1,10}))?$`)

var portNameFlavours = map[string]devlink.Flavour{"": devlink.PCIPF, "vf": devlink.PCIVF, "sf": devlink.PCISF}

// parsePortName reads a phys_port_name; ok is false for that of an uplink, and of anything else that is no Function's.
func parsePortName(name string) (_ portAttrs, ok bool) {
	parts := portNameForm.FindStringSubmatch(name)
	if parts == nil {
		return portAttrs{}, false
	}
	controller, noController := strconv.ParseUint(cmp.Or(parts[1], "0"), 10, 32)
	pf, noPF := strconv.ParseUint(parts[2], 10, 16)
	number, noNumber := strconv.ParseUint(cmp.Or(parts[4], "0"), 10, 32)
	if errors.Join(noController, noPF, noNumber) != nil {
		return portAttrs{}, false
	}
	return portAttrs{parts[1] != "", uint32(controller), uint16(pf), portNameFlavours[parts[3]], uint32(number)}, true
}
