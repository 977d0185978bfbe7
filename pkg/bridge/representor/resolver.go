// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// resolve returns the eswitch port for the id of a bridge port. The id is the PCI address of a
// Function, or the eswitch's name for the Function.
//
// Only Functions for clients are resolved: external Functions, which belong to another machine, and
// Functions of the configured PFs. All others are refused, because clients choose ids, and this
// machine's own Functions must not end in their networks.
func (c Config) resolve(port string) (eswitchPort, error) {
	if name, ok := parsePortName(port); ok { // see opi.PortIDAt
		return c.resolveName(name)
	}

	id, ok := opi.ParsePortID(port)
	if !ok {
		return eswitchPort{}, errors.New("its id tells no PCI address (vf-dddd-bb-dd-f or " +
			"sf-bb-dd-f-sfnum), and no name of an eswitch port (c1pf0vf3)")
	}
	return c.resolveAddress(id)
}

// resolveName resolves the eswitch's name for a Function. A name without a controller belongs to a
// Function of this machine, unless a --host-pf says that the kernel does not name controllers.
func (c Config) resolveName(name portName) (eswitchPort, error) {
	at := eswitchPort{name: name}
	if c.isForClients(at) {
		return at, nil
	}
	return eswitchPort{}, fmt.Errorf("%s is a function of this machine, and no --host-pf is %s: "+
		"functions of the host are named with their controller, such as c1%s",
		at, name.pf, at)
}

// isForClients reports whether the Function at an eswitch port of this machine is for clients.
func (c Config) isForClients(at eswitchPort) bool {
	return at.name.isExternal() || slices.ContainsFunc(c.HostPFs, func(pf HostPF) bool {
		if pf.isOwn() {
			return at.eswitch == pf.Address && at.name.function != ""
		}
		return pf.Name == at.name.pf &&
			(at.eswitch == "" || pf.Eswitch == "" || at.eswitch == pf.Eswitch)
	})
}

// allowsName reports whether any netdev with this name may be a port. The configuration can allow a
// name. An id with a PCI address is allowed, because neither the kernel nor udev gives such a name,
// so an administrator did. The name of a Function for clients, such as c1pf0vf3, is allowed because
// no Function of this machine has it.
func (c Config) allowsName(name string) bool {
	if _, isID := opi.ParsePortID(name); isID {
		return true
	}
	numbered, isNumbered := parsePortName(name)
	return isNumbered && c.isForClients(eswitchPort{name: numbered}) ||
		slices.ContainsFunc(c.Netdevs, func(pattern string) bool {
			matched, err := path.Match(pattern, name)
			return err == nil && matched
		})
}

// resolveAddress resolves a PF or VF by its address, or an SF by its PF's address and its sfnum. It
// knows only the configured addresses, because this machine may have other devices with the
// addresses that clients mean.
func (c Config) resolveAddress(id function.ID) (eswitchPort, error) {
	pf, name, ok := function.PFOf(c.HostPFs, id,
		func(pf HostPF) pci.Address { return pf.Address }, c.vfIndex)

	switch {
	case ok:
		return pf.eswitchPort(name)
	case id.Subfunction != "":
		return eswitchPort{}, fmt.Errorf("PF %s, whose SF it is, is no --host-pf%s",
			id.Address, c.namingHint(id.Subfunction))
	}

	return eswitchPort{}, fmt.Errorf("%s is no --host-pf and no VF of one by its offset and "+
		"stride%s", id.Address, c.namingHint(function.VFName(0)))
}

// namingHint says by which name a client can ask for a Function whose PF has no known address.
func (c Config) namingHint(function string) string {
	for _, pf := range c.HostPFs {
		if pf.Address == "" {
			return fmt.Sprintf(": the host's functions are named as this xPU numbers them, "+
				"such as %s", pf.Name+function)
		}
	}
	return fmt.Sprintf(": name the function as the eswitch does, such as c1pf0%s, or tell the "+
		"PF's address by --host-pf", function)
}

// vfIndex returns the index that a VF with this address has at a PF, or would have, and its
// distance in routing IDs from the PF's first VF.
func (c Config) vfIndex(pf HostPF, address pci.Address) (index, distance int, ok bool) {
	switch {
	case pf.Address == "":
		return 0, 0, false
	case !pf.isOwn():
		return pci.VFIndex(pf.Address, address, pf.Offset, pf.Stride)
	}

	device := c.sysfs().PCI(pf.Address)
	vfs, _ := device.VFs() // none if the PF does not exist
	for _, vf := range vfs {
		if vf.Address == address {
			return vf.Index, 0, true
		}
	}

	// A driver may make representors before the VFs' devices exist (mlx5).
	total, err := device.Number("sriov_totalvfs")
	if err != nil {
		return 0, 0, false
	}

	offset, _ := device.Number("sriov_offset")
	stride, _ := device.Number("sriov_stride") // 0 if it cannot be read: the PF then has no VF
	index, distance, ok = pci.VFIndex(pf.Address, address, offset, stride)

	return index, distance, ok && index < total
}
