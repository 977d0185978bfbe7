// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// portName is the phys_port_name of a Function's representor (net/devlink/port.c), in two parts.
type portName struct {
	pf       string // "pf0", or "c1pf0" if the PF is another machine's: controller 1
	function string // "vf3", "sf88", "" for the PF itself
}

// nameOf returns the phys_port_name of the netdev of a devlink port, zero if the port is no
// Function's.
func nameOf(port devlink.Port) portName {
	name := portName{pf: fmt.Sprintf("pf%d", port.PF)}
	if port.External {
		name.pf = fmt.Sprintf("c%dpf%d", port.Controller, port.PF)
	}

	switch port.Flavour {
	case devlink.PCIPF:
	case devlink.PCIVF:
		name.function = vfName(int(port.VF))
	case devlink.PCISF:
		name.function = fmt.Sprintf("sf%d", port.SF)
	default:
		return portName{}
	}

	return name
}

func vfName(index int) string { return fmt.Sprintf("vf%d", index) }

// portNameForm is the form of a Function's phys_port_name. Kernels before 5.10 know no controllers.
var portNameForm = regexp.MustCompile(
	`^((?:c(0|[1-9][0-9]*))?pf(0|[1-9][0-9]*))((?:vf|sf)(0|[1-9][0-9]*))?$`,
)

// parsePortName reads a phys_port_name. ok is false for that of an uplink, and of anything else
// that is no Function's.
func parsePortName(name string) (_ portName, ok bool) {
	parts := portNameForm.FindStringSubmatch(name)
	if parts == nil {
		return portName{}, false
	}

	// of the numbers of controller, PF and Function
	for i, bits := range map[int]int{2: 32, 3: 16, 5: 32} {
		if _, err := strconv.ParseUint(cmp.Or(parts[i], "0"), 10, bits); err != nil {
			return portName{}, false
		}
	}

	return portName{pf: parts[1], function: parts[4]}, true
}

// eswitchPort is the port of an eswitch that a Function is connected to. Its netdev is the
// Function's representor.
type eswitchPort struct {
	eswitch pci.Address // the PF on this machine that has the eswitch, "" for any
	// name has no pf if the eswitch has the Functions of one PF only: the driver may give that any
	// number.
	name portName
}

// has tells whether a name is this port's.
func (p eswitchPort) has(name portName) bool {
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

// external reports whether the Function is another machine's: the kernel names its controller then.
func (n portName) external() bool { return strings.HasPrefix(n.pf, "c") }

// portResolver finds the eswitch port for the id of a port, which is the PCI address of a Function
// or the eswitch's name for it. It resolves only Functions that clients may have: external ones,
// which belong to another machine, and those of PFs that the configuration names. The others are
// refused, because clients choose ids, and this machine's own Functions must not end in their
// networks.
type portResolver struct {
	sysfs   sysfs.Root // describes the hostPFs that are this machine's own
	hostPFs []HostPF   // from the configuration
	// representors are patterns of path.Match: names of netdevs that may be ports although no
	// eswitch says that they represent a Function for clients.
	representors []string
}

func (r portResolver) resolve(port string) (eswitchPort, error) {
	if name, ok := parsePortName(port); ok { // see opi.PortIDAt
		return r.ofEswitch(name)
	}

	f, ok := opi.ParsePortID(port)
	if !ok {
		return eswitchPort{}, errors.New("its id tells no PCI address (vf-dddd-bb-dd-f or " +
			"sf-bb-dd-f-sfnum), and no name of an eswitch port (c1pf0vf3)")
	}
	return r.byAddress(f)
}

// ofEswitch resolves the eswitch's name for a Function. A name without a controller belongs to a
// Function of this machine, unless a --host-pf says that the kernel does not name controllers.
func (r portResolver) ofEswitch(name portName) (eswitchPort, error) {
	at := eswitchPort{name: name}
	if r.serves(at) {
		return at, nil
	}
	return eswitchPort{}, fmt.Errorf("%s is a function of this machine, and no --host-pf is %s: "+
		"functions of the host are named with their controller, such as c1%s",
		at, name.pf, at)
}

// serves reports whether a Function at an eswitch of this machine is for clients.
func (r portResolver) serves(at eswitchPort) bool {
	return at.name.external() || slices.ContainsFunc(r.hostPFs, func(pf HostPF) bool {
		if pf.isOwn() {
			return at.eswitch == pf.Address && at.name.function != ""
		}
		return pf.name == at.name.pf &&
			(at.eswitch == "" || pf.Eswitch == "" || at.eswitch == pf.Eswitch)
	})
}

// mayBePort reports whether any netdev of this name may be a port. An id with a PCI address is a
// name that neither the kernel nor udev gives, so an administrator did. The name of a Function for
// clients, such as c1pf0vf3, is not given to one of this machine either.
func (r portResolver) mayBePort(name string) bool {
	if _, isID := opi.ParsePortID(name); isID {
		return true
	}
	numbered, isNumbered := parsePortName(name)
	return isNumbered && r.serves(eswitchPort{name: numbered}) || matches(r.representors, name)
}

// byAddress resolves a PF or VF by its address, or an SF by its PF's address and its sfnum. It
// knows the addresses that were told, and no others: this machine may have other devices with the
// addresses that clients mean.
func (r portResolver) byAddress(f function.ID) (eswitchPort, error) {
	// The VFs of several PFs may interleave, with different remainders by the stride. Of the PFs
	// that could have the VF, it belongs to the one whose first VF is the nearest below, however
	// many VFs each PF has.
	found, nearest := eswitchPort{}, -1
	for _, pf := range withAddress(r.hostPFs) {
		if pf.Address == f.Address {
			return pf.resolve(f.Subfunction)
		}
		index, distance, ok := r.vf(pf, f.Address)
		if ok && (nearest < 0 || distance < nearest) {
			found, nearest = pf.eswitchPort(vfName(index)), distance
		}
	}

	switch {
	case f.Subfunction != "":
		return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is no --host-pf%s",
			f.Address, r.hint(f.Subfunction))
	case nearest < 0:
		return eswitchPort{}, fmt.Errorf("%s is no --host-pf and no VF of one by its offset and "+
			"stride%s", f.Address, r.hint(vfName(0)))
	}

	return found, nil
}

// hint says how a Function is asked for where PFs are told without their addresses.
func (r portResolver) hint(function string) string {
	for _, pf := range r.hostPFs {
		if pf.Address == "" {
			return fmt.Sprintf(": the host's functions are named as this xPU numbers them, such as %s",
				pf.name+function)
		}
	}
	return fmt.Sprintf(": name the function as the eswitch does, such as c1pf0%s, or tell the PF's "+
		"address by --host-pf", function)
}

// vf returns the index that a VF with this address has at a PF, or would have, and its distance in
// routing IDs from the PF's first VF.
func (r portResolver) vf(pf HostPF, address pci.Address) (index, distance int, ok bool) {
	if !pf.isOwn() {
		return pci.VFIndex(pf.Address, address, pf.Offset, pf.Stride)
	}

	device := r.sysfs.PCI(pf.Address)
	vfs, _ := device.VFs() // none without the PF
	for _, vf := range vfs {
		if vf.Address == address {
			return vf.Index, 0, true
		}
	}

	// A driver may make representors before the VFs' devices (mlx5).
	total, err := device.Number("sriov_totalvfs")
	if err != nil {
		return 0, 0, false
	}

	offset, _ := device.Number("sriov_offset")
	stride, _ := device.Number("sriov_stride") // 0 if it cannot be read: the PF then has no VF
	index, distance, ok = pci.VFIndex(pf.Address, address, offset, stride)

	return index, distance, ok && index < total
}
