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

// eswitchPort is the port of an eswitch that a Function is connected to. Its netdev is the Function's representor.
type eswitchPort struct {
	// eswitch is the PF on this machine that has the eswitch, "" for any.
	eswitch pci.Address
	portAttrs
	// anyPF says that the eswitch has the Functions of one PF, whatever number the driver gives that.
	anyPF bool
}

// has says whether the attributes are this port's.
func (p eswitchPort) has(attrs portAttrs) bool {
	if p.anyPF {
		attrs.pf = p.pf
	}
	return attrs == p.portAttrs
}

func (p eswitchPort) String() string {
	name := p.portAttrs.String()
	if p.anyPF {
		name = strings.TrimPrefix(name, "pf0")
	}
	if p.eswitch == "" {
		return name
	}
	return name + " of " + string(p.eswitch)
}

// portResolver tells which eswitch port the Function has that a port's id is derived from.
type portResolver struct {
	sysfs sysfs.Root
	// hostPFs, if any, are the PFs of the host. The addresses in ports' ids are the host's then and may be this machine's
	// too, for other devices, so that its own sysfs is not asked.
	hostPFs []HostPF
}

func (r portResolver) resolve(port string) (eswitchPort, error) {
	f, ok := opi.ParsePortID(port)
	if !ok {
		return eswitchPort{}, errors.New("its id tells no PCI address (vf-dddd-bb-dd-f or sf-bb-dd-f-sfnum)")
	}
	if len(r.hostPFs) > 0 {
		return r.ofHost(f)
	}
	return r.ofThisMachine(f)
}

// ofHost resolves a PF or VF of the host by its address, or an SF by its PF's address and its sfnum.
func (r portResolver) ofHost(f function.ID) (eswitchPort, error) {
	address := f.Address
	sfnum, isSF := f.SFNum()
	known := slices.IndexFunc(r.hostPFs, func(pf HostPF) bool { return pf.Address == address })
	switch {
	case known >= 0 && isSF:
		return r.hostPFs[known].eswitchPort(devlink.PCISF, sfnum), nil
	case known >= 0:
		return r.hostPFs[known].eswitchPort(devlink.PCIPF, 0), nil
	case isSF:
		return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is no --host-pf", address)
	}
	// The VFs of one PF lie between those of others or among them, by another remainder. So the one that begins next
	// below has it, without being told how many VFs each has.
	found, nearest := eswitchPort{}, -1
	for _, pf := range r.hostPFs {
		if index, distance, ok := pf.vf(address); ok && (nearest < 0 || distance < nearest) {
			found, nearest = pf.eswitchPort(devlink.PCIVF, uint32(index)), distance
		}
	}
	if nearest < 0 {
		return eswitchPort{}, fmt.Errorf("%s is no --host-pf and no VF of one by its offset and stride", address)
	}
	return found, nil
}

// ofThisMachine resolves a VF by its address, or an SF by its PF's address and its sfnum.
func (r portResolver) ofThisMachine(f function.ID) (eswitchPort, error) {
	address := f.Address
	const hint = "; with addresses of another machine, give --host-pf"
	if sfnum, isSF := f.SFNum(); isSF {
		if !r.sysfs.PCI(address).Has("vendor") {
			return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is not in sysfs%s", address, hint)
		}
		return eswitchPort{eswitch: address, portAttrs: portAttrs{flavour: devlink.PCISF, number: sfnum}, anyPF: true}, nil
	}
	pf, index, ok := r.findVF(address)
	if !ok {
		return eswitchPort{}, fmt.Errorf("no PF in sysfs has a VF %s, by virtfn links or by sriov_offset and sriov_stride%s",
			address, hint)
	}
	return eswitchPort{eswitch: pf, portAttrs: portAttrs{flavour: devlink.PCIVF, number: uint32(index)}, anyPF: true}, nil
}

// findVF finds a VF's PF and its index there. A driver may make representors before the VFs' devices are there (mlx5),
// so it also asks which PF would have it.
func (r portResolver) findVF(address pci.Address) (pf pci.Address, index int, ok bool) {
	if physfn, err := r.sysfs.PCI(address).Link("physfn"); err == nil && physfn != "" {
		vfs, _ := r.sysfs.PCI(pci.Address(physfn)).VFs()
		for _, vf := range vfs {
			if vf.Address == address {
				return pci.Address(physfn), vf.Index, true
			}
		}
	}
	devices, _ := r.sysfs.Dir(sysfs.PCIDevices).Sorted()
	for _, name := range devices {
		device := r.sysfs.PCI(pci.Address(name))
		total, err := device.Number("sriov_totalvfs")
		if err != nil {
			continue
		}
		offset, _ := device.Number("sriov_offset")
		stride, _ := device.Number("sriov_stride") // 0 if it cannot be read: the PF then has no VF
		capability := HostPF{Address: pci.Address(name), Offset: offset, Stride: stride}
		if index, _, ok := capability.vf(address); ok && index < total {
			return capability.Address, index, true
		}
	}
	return "", 0, false
}
