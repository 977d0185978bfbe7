// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// maxNUMANode is the kernel's upper bound, MAX_NUMNODES at its largest NODES_SHIFT
// (include/linux/nodemask_types.h).
const maxNUMANode = 1023

var (
	hexID = regexp.MustCompile(`^0x[0-9a-f]{4}$`)
	// representor matches the phys_port_name of a netdev that stands for another function of the
	// eswitch (net/devlink/port.c).
	representor = regexp.MustCompile(`^(c[0-9]+)?pf[0-9]+((vf|sf)[0-9]+)?$`)
	uplinkPort  = regexp.MustCompile(`^p[0-9]+(s[0-9]+)?$`)
	pcieRoot    = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// read reads and parses an attribute.
func read[T any](dir sysfs.Dir, name string, parse func(string) (T, error)) (value T, err error) {
	text, err := dir.Attribute(name)
	if err != nil {
		return value, err
	}
	return parse(text)
}

// parseClass parses a class, "0x020000". It returns "" for a class that the inventory does not
// list.
func parseClass(s string) (function.Class, error) {
	digits, ok := strings.CutPrefix(s, "0x")
	class, err := strconv.ParseUint(digits, 16, 24)
	if !ok || err != nil {
		return "", fmt.Errorf("%q: must be a PCI class such as 0x020000", s)
	}

	// the base class (PCI Code and ID Assignment Specification, 1.3 and 1.19)
	switch class >> 16 {
	case 0x02: // Ethernet is 0x020000, InfiniBand 0x020700
		return function.Network, nil
	case 0x12:
		return function.Accelerator, nil
	}

	return "", nil
}

func parseID(s string) (string, error) {
	if !hexID.MatchString(s) {
		return "", fmt.Errorf("%q: must be a PCI id such as 0x15b3", s)
	}
	return s[2:], nil
}

func parseNUMANode(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < -1 || n > maxNUMANode {
		return -1, fmt.Errorf("%q: must be -1 to %d", s, maxNUMANode)
	}
	return n, nil
}

// parseSFNum parses sfnum (drivers/net/ethernet/mellanox/mlx5/core/sf/dev/dev.c).
func parseSFNum(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%q: must be a number of 32 bits", s)
	}
	return uint32(n), nil
}

// parseRoot returns the root complex in the target of a device's link,
// "../../../devices/pci0000:3a/0000:3a:00.0/..", or "" if there is none. The result agrees with
// k8s.io/dynamic-resource-allocation/deviceattribute. A device below a bridge with a PCI domain of
// its own, such as VMD's, has the bridge's root.
func parseRoot(link string) string {
	_, path, _ := strings.Cut(link, "devices/")
	root, _, _ := strings.Cut(path, "/")
	if !pcieRoot.MatchString(root) {
		return ""
	}
	return root
}

// rootOf returns the root complex of a PCI device, or "" if it has none.
func rootOf(device sysfs.Dir) (string, error) {
	link, err := device.Target()
	if errors.Is(err, syscall.EINVAL) { // no link, as on the bus of no kernel
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return parseRoot(link), nil
}

// virtioVDPA returns the name of a vDPA device whose netdev virtio_vdpa makes, or "" for another
// vDPA device.
func virtioVDPA(vdpa function.VDPA) string {
	if vdpa.Driver != "virtio_vdpa" {
		return ""
	}
	return vdpa.Name
}

// netdevsOf is [sysfs.Dir.Netdevs] for a device that may have a vDPA device on virtio_vdpa. The
// netdev below the vDPA device counts then, because the data goes through it, and not the netdev of
// the device's own driver.
func netdevsOf(device sysfs.Dir, virtioVDPA string) (dir sysfs.Dir, names []string, err error) {
	if virtioVDPA == "" {
		return device.Netdevs()
	}
	return device.Dir(virtioVDPA).VirtioNetdevs()
}

func isPCI(name string) bool {
	_, err := pci.Parse(name)
	return err == nil
}

// ownNetdev chooses one of the netdevs of a device, which are in dir. It returns "" if there are
// none.
//
// A PF whose eswitch is in switchdev mode also has the representors, and may have them first. If a
// PF has two ports, the netdev of the first port is chosen. Otherwise the netdev that was made
// first is chosen, because names can change.
func ownNetdev(dir sysfs.Dir, netdevs []string) string {
	switch len(netdevs) {
	case 0:
		return ""
	case 1:
		return netdevs[0]
	}

	type candidate struct {
		rank, port, index int
		name              string
	}

	var candidates []candidate
	for _, name := range netdevs {
		port, _ := dir.Dir(name).Number("dev_port")
		index, _ := dir.Dir(name).Number("ifindex")
		candidates = append(candidates, candidate{rank(dir.Dir(name)), port, index, name})
	}

	return slices.MinFunc(candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.port, b.port),
			cmp.Compare(a.index, b.index),
			cmp.Compare(a.name, b.name))
	}).name
}

// rank is lower the likelier the netdev is the uplink: 0 for an uplink's port name, 2 for a
// representor's, and 1 without a name. A representor that is just being made has none.
func rank(netdev sysfs.Dir) int {
	portName, _ := netdev.Attribute("phys_port_name") // EOPNOTSUPP is usual
	switch {
	case uplinkPort.MatchString(portName):
		return 0
	case representor.MatchString(portName):
		return 2
	}
	return 1
}

// subfunction is an SF's auxiliary device, such as mlx5_core.sf.2. If it cannot be read, err and
// why say so.
type subfunction struct {
	dir sysfs.Dir
	id  function.ID
	err error
	why reason
}

// subfunctions lists the SFs, sorted by the name of their auxiliary device.
func subfunctions(root sysfs.Root) ([]subfunction, error) {
	entries, err := root.Dir(sysfs.AuxiliaryDevices).Sorted()
	var out []subfunction
	for _, name := range entries {
		if strings.Contains(name, ".sf.") {
			out = append(out, readSubfunction(root.Auxiliary(name)))
		}
	}
	return out, err
}

func readSubfunction(dir sysfs.Dir) subfunction {
	link, err := dir.Target()
	if err != nil {
		return subfunction{dir: dir, err: err, why: reasonParent}
	}

	pf, err := pci.Parse(filepath.Base(filepath.Dir(link)))
	if err != nil {
		return subfunction{
			dir: dir, err: fmt.Errorf("%s: is not below a PCI device", link), why: reasonParent,
		}
	}

	sfnum, err := read(dir, "sfnum", parseSFNum)
	return subfunction{dir, function.SubfunctionID(pf, sfnum), err, reasonSFNum}
}
