package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
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

// nameOf returns the phys_port_name of the netdev of a devlink port, zero if the port is no Function's.
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
var portNameForm = regexp.MustCompile(`^((?:c(0|[1-9][0-9]*))?pf(0|[1-9][0-9]*))((?:vf|sf)(0|[1-9][0-9]*))?$`)

// parsePortName reads a phys_port_name. ok is false for that of an uplink, and of anything else that is no Function's.
func parsePortName(name string) (_ portName, ok bool) {
	parts := portNameForm.FindStringSubmatch(name)
	if parts == nil {
		return portName{}, false
	}
	for i, bits := range map[int]int{2: 32, 3: 16, 5: 32} { // of the numbers of controller, PF and Function
		if _, err := strconv.ParseUint(cmp.Or(parts[i], "0"), 10, bits); err != nil {
			return portName{}, false
		}
	}
	return portName{pf: parts[1], function: parts[4]}, true
}

// eswitchPort is the port of an eswitch that a Function is connected to. Its netdev is the Function's representor.
type eswitchPort struct {
	eswitch pci.Address // the PF on this machine that has the eswitch, "" for any
	// name has no pf if the eswitch has the Functions of one PF only: the driver may give that any number.
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

// portResolver finds the eswitch port of the Function whose PCI address is in a port's id, or which the id itself names.
type portResolver struct {
	sysfs sysfs.Root
	// hostPFs, if any, are the PFs of the host whose addresses are known, and may be in port ids. This machine's sysfs is not
	// asked then, since it may have other devices with the same addresses.
	hostPFs []HostPF
}

func (r portResolver) resolve(port string) (eswitchPort, error) {
	if name, ok := parsePortName(port); ok { // see opi.PortIDAt
		return eswitchPort{name: name}, nil
	}
	f, ok := opi.ParsePortID(port)
	if !ok {
		return eswitchPort{}, errors.New("its id tells no PCI address (vf-dddd-bb-dd-f or sf-bb-dd-f-sfnum), and no name of an eswitch " +
			"port (c1pf0vf3)")
	}
	if len(r.hostPFs) > 0 {
		return r.ofHost(f)
	}
	return r.ofThisMachine(f)
}

// ofHost resolves a PF or VF of the host by its address, or an SF by its PF's address and its sfnum.
func (r portResolver) ofHost(f function.ID) (eswitchPort, error) {
	// The VFs of several PFs may interleave, with different remainders by the stride. Of the PFs that could have the VF, it
	// belongs to the one whose first VF is the nearest below, however many VFs each PF has.
	found, nearest := eswitchPort{}, -1
	for _, pf := range r.hostPFs {
		if pf.Address == f.Address {
			return pf.eswitchPort(f.Subfunction), nil
		}
		if index, distance, ok := pf.vf(f.Address); ok && (nearest < 0 || distance < nearest) {
			found, nearest = pf.eswitchPort(vfName(index)), distance
		}
	}
	switch {
	case f.Subfunction != "":
		return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is no --host-pf", f.Address)
	case nearest < 0:
		return eswitchPort{}, fmt.Errorf("%s is no --host-pf and no VF of one by its offset and stride", f.Address)
	}
	return found, nil
}

// ofThisMachine resolves a VF by its address, or an SF by its PF's address and its sfnum.
func (r portResolver) ofThisMachine(f function.ID) (eswitchPort, error) {
	const hint = "; with addresses of another machine, give --host-pf"
	if f.Subfunction != "" {
		if !r.sysfs.PCI(f.Address).Has("vendor") {
			return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is not in sysfs%s", f.Address, hint)
		}
		return eswitchPort{eswitch: f.Address, name: portName{function: f.Subfunction}}, nil
	}
	physfn, _ := r.sysfs.PCI(f.Address).Link("physfn")
	vfs, _ := r.sysfs.PCI(pci.Address(physfn)).VFs() // none without the link
	for _, vf := range vfs {
		if vf.Address == f.Address {
			return eswitchPort{eswitch: pci.Address(physfn), name: portName{function: vfName(vf.Index)}}, nil
		}
	}
	// A driver may make representors before the VFs' devices (mlx5), so also look for the PF that will have the VF.
	devices, _ := r.sysfs.Dir(sysfs.PCIDevices).Sorted()
	for _, name := range devices {
		device := r.sysfs.PCI(pci.Address(name))
		total, err := device.Number("sriov_totalvfs")
		if err != nil {
			continue
		}
		offset, _ := device.Number("sriov_offset")
		stride, _ := device.Number("sriov_stride") // 0 if it cannot be read: the PF then has no VF
		pf := HostPF{Address: pci.Address(name), Eswitch: pci.Address(name), Offset: offset, Stride: stride}
		if index, _, ok := pf.vf(f.Address); ok && index < total {
			return pf.eswitchPort(vfName(index)), nil
		}
	}
	return eswitchPort{}, fmt.Errorf("no PF in sysfs has a VF %s, by virtfn links or by sriov_offset and sriov_stride%s",
		f.Address, hint)
}
