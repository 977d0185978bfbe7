package bridge

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// place is where a Function is at an eswitch: what its representor is found by.
type eswitchPort struct {
	// eswitch is the PF on this machine that has the eswitch, "" for any.
	eswitch pci.Address
	portNumber
	// anyPF says that the eswitch has the Functions of one PF, whatever number the driver gives that.
	anyPF bool
}

// portNumber is how an eswitch numbers a Function.
type portNumber struct {
	external   bool // of another machine, and controller is the number of that one's
	controller uint32
	pf         uint16
	flavour    devlink.Flavour // PCIPF, PCIVF or PCISF
	number     uint32          // of the VF or SF
}

// String is what the kernel calls its representor (phys_port_name, net/devlink/port.c).
func (s portNumber) String() string {
	name := HostPF{External: s.external, Controller: s.controller, Number: s.pf}.portName()
	switch s.flavour {
	case devlink.PCIVF:
		return name + fmt.Sprintf("vf%d", s.number)
	case devlink.PCISF:
		return name + fmt.Sprintf("sf%d", s.number)
	}
	return name
}

// has says whether a portNumber is this place's.
func (p eswitchPort) has(s portNumber) bool {
	if p.anyPF {
		s.pf = p.pf
	}
	return s == p.portNumber
}

func (p eswitchPort) String() string {
	name := p.portNumber.String()
	if p.anyPF {
		name = strings.TrimPrefix(name, "pf0")
	}
	if p.eswitch == "" {
		return name
	}
	return name + " of " + string(p.eswitch)
}

// places knows where the Functions that ports are named after are.
type portFinder struct {
	sysRoot sysfs.Root
	// hostPFs, if any, are the PFs of the host. The addresses in ports' ids are the host's then and may be this machine's
	// too, for other devices, so that its own sysfs is not asked.
	hostPFs []HostPF
}

// of gives the place of the Function that a port's id is derived from.
func (p portFinder) of(port string) (eswitchPort, error) {
	f, ok := opi.ParsePortID(port)
	if !ok {
		return eswitchPort{}, errors.New("its id tells no PCI address (vf-dddd-bb-dd-f or sf-bb-dd-f-sfnum)")
	}
	var sf *uint32
	if sfnum, isSF := f.SFNum(); isSF {
		sf = &sfnum
	}
	if len(p.hostPFs) > 0 {
		return p.atHost(f.Address, sf)
	}
	return p.here(f.Address, sf)
}

// atHost is a place of a host's Function.
func (p portFinder) atHost(address pci.Address, sfnum *uint32) (eswitchPort, error) {
	at := func(pf HostPF, flavour devlink.Flavour, number uint32) (eswitchPort, error) {
		return eswitchPort{eswitch: pf.Eswitch, portNumber: portNumber{pf.External, pf.Controller, pf.Number, flavour, number}}, nil
	}
	known := slices.IndexFunc(p.hostPFs, func(pf HostPF) bool { return pf.Address == address })
	switch {
	case known >= 0 && sfnum != nil:
		return at(p.hostPFs[known], devlink.PCISF, *sfnum)
	case known >= 0:
		return at(p.hostPFs[known], devlink.PCIPF, 0)
	case sfnum != nil:
		return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is no --host-pf", address)
	}
	// The VFs of one PF lie between those of others or among them, by another remainder. So the one that begins next
	// below has it, without being told how many VFs each has.
	found, nearest := -1, 0
	var number int
	for i, pf := range p.hostPFs {
		if index, distance, ok := pf.vf(address); ok && (found < 0 || distance < nearest) {
			found, nearest, number = i, distance, index
		}
	}
	if found < 0 {
		return eswitchPort{}, fmt.Errorf("%s is no --host-pf and no VF of one by its offset and stride", address)
	}
	return at(p.hostPFs[found], devlink.PCIVF, uint32(number))
}

// here is a place of a Function of this machine.
func (p portFinder) here(address pci.Address, sfnum *uint32) (eswitchPort, error) {
	const hint = "; with addresses of another machine, give --host-pf"
	if sfnum != nil {
		if !p.exists(address) {
			return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is not in sysfs%s", address, hint)
		}
		return eswitchPort{eswitch: address, portNumber: portNumber{flavour: devlink.PCISF, number: *sfnum}, anyPF: true}, nil
	}
	pf, index, ok := p.virtual(address)
	if !ok {
		return eswitchPort{}, fmt.Errorf("no PF in sysfs has a VF %s, by virtfn links or by sriov_offset and sriov_stride%s",
			address, hint)
	}
	return eswitchPort{eswitch: pf, portNumber: portNumber{flavour: devlink.PCIVF, number: uint32(index)}, anyPF: true}, nil
}

func (p portFinder) exists(a pci.Address) bool { return p.sysRoot.PCI(a).Has("vendor") }

// virtual finds a VF's PF and its index there. A driver may make representors before the VFs' devices are there (mlx5),
// so it also asks which PF would have it.
func (p portFinder) virtual(address pci.Address) (pf pci.Address, index int, ok bool) {
	if link, err := p.sysRoot.PCI(address).Link("physfn"); err == nil && link != "" {
		pf := pci.Address(link)
		if index, ok := p.virtfn(pf, address); ok {
			return pf, index, true
		}
	}
	devices, _ := p.sysRoot.Dir(sysfs.PCIDevices).Sorted()
	for _, name := range devices {
		pf := pci.Address(name)
		if !p.sysRoot.PCI(pf).Has("sriov_totalvfs") {
			continue
		}
		capability := HostPF{Address: pf, Offset: p.number(pf, "sriov_offset"), Stride: p.number(pf, "sriov_stride")}
		if index, _, ok := capability.vf(address); ok && index < p.number(pf, "sriov_totalvfs") {
			return pf, index, true
		}
	}
	return "", 0, false
}

// virtfn is the index by which a PF has a VF.
func (p portFinder) virtfn(pf, vf pci.Address) (index int, ok bool) {
	vfs, _ := p.sysRoot.PCI(pf).VFs()
	for _, link := range vfs {
		if link.Address == vf {
			return link.Index, true
		}
	}
	return 0, false
}

// number reads an attribute of a PF, 0 if there is none.
func (p portFinder) number(pf pci.Address, name string) int {
	n, _ := p.sysRoot.PCI(pf).Number(name)
	return n
}
