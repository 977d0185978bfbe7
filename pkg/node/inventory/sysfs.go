package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

const (
	pciDevices       = "bus/pci/devices"
	auxiliaryDevices = "bus/auxiliary/devices"
	vdpaDevices      = "bus/vdpa/devices"

	// Base classes (PCI Code and ID Assignment Specification, 1.3 and 1.19). Ethernet is 0x020000, InfiniBand 0x020700.
	classNetwork     = 0x02
	classAccelerator = 0x12

	// maxAttribute is more than any of the attributes read here has, in bytes. What is longer is garbage.
	maxAttribute = 256
	// maxNUMANode is the kernel's upper bound, MAX_NUMNODES at its largest NODES_SHIFT (include/linux/nodemask_types.h).
	maxNUMANode = 1023
)

var (
	hexID = regexp.MustCompile(`^0x[0-9a-f]{4}$`)
	// representor is the phys_port_name of a netdev that stands for another function of the eswitch: those of an uplink
	// are p0, p1, .. (ndo_get_phys_port_name of devlink ports, net/devlink/port.c).
	representor = regexp.MustCompile(`^(c[0-9]+)?pf[0-9]+((vf|sf)[0-9]+)?$`)
	uplinkPort  = regexp.MustCompile(`^p[0-9]+(s[0-9]+)?$`)
	pcieRoot    = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// sysfs reads single facts. It has no state: its methods may be called by several goroutines at once.
type sysfs struct{ root string }

// device is the directory of a PCI function.
func (s sysfs) device(a pci.Address) string { return filepath.Join(s.root, pciDevices, string(a)) }

// names lists a directory, unsorted. A directory that is not there is empty.
func names(dir string) ([]string, error) {
	names, _, err := list(dir)
	return names, err
}

// list is [names] for those who want to know whether the directory exists.
func list(dir string) (names []string, exists bool, err error) {
	// A scan reads a directory for each VF. os.Open would look at each file's type and allocate a buffer for each.
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	var buf [4096]byte
	for {
		n, err := unix.Getdents(fd, buf[:])
		if errors.Is(err, fs.ErrNotExist) {
			return nil, false, nil // it was removed meanwhile
		}
		if err != nil {
			return nil, true, &fs.PathError{Op: "getdents", Path: dir, Err: err}
		}
		if n <= 0 {
			return names, true, nil
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

// attribute is what a file says, without white space around it.
func attribute(dir, name string) (string, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return "", err
	}
	defer f.Close()
	var buf [maxAttribute + 1]byte
	n, err := f.Read(buf[:])
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	if n > maxAttribute || !utf8.Valid(buf[:n]) {
		return "", fmt.Errorf("%s: is not an attribute", name)
	}
	return strings.TrimSpace(string(buf[:n])), nil
}

// target is the last element of what a symbolic link points to, "" if there is no such link.
func target(dir, name string) (string, error) {
	to, err := os.Readlink(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return filepath.Base(to), nil
}

// parseClass reads a class, "0x020000"; it is "" if it is none of ours.
func parseClass(s string) (function.Class, error) {
	digits, ok := strings.CutPrefix(s, "0x")
	class, err := strconv.ParseUint(digits, 16, 24)
	if !ok || err != nil {
		return "", fmt.Errorf("%q: must be a PCI class such as 0x020000", s)
	}
	switch class >> 16 {
	case classNetwork:
		return function.Network, nil
	case classAccelerator:
		return function.Accelerator, nil
	}
	return "", nil
}

// parseID reads a vendor or device, "0x15b3".
func parseID(s string) (string, error) {
	if !hexID.MatchString(s) {
		return "", fmt.Errorf("%q: must be a PCI id such as 0x15b3", s)
	}
	return s[2:], nil
}

// parseNUMANode reads numa_node, -1 where the kernel does not know.
func parseNUMANode(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < -1 || n > maxNUMANode {
		return -1, fmt.Errorf("%q: must be -1 to %d", s, maxNUMANode)
	}
	return n, nil
}

// parseSFNum reads sfnum (drivers/net/ethernet/mellanox/mlx5/core/sf/dev/dev.c).
func parseSFNum(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%q: must be a number of 32 bits", s)
	}
	return uint32(n), nil
}

// parseRoot finds the root complex in the target of a device's link, "../../../devices/pci0000:3a/0000:3a:00.0/..", as
// k8s.io/dynamic-resource-allocation/deviceattribute does. It returns "" where the device is under none: a device below
// a bridge that has a domain of its own, such as VMD's, is still under the bridge's root.
func parseRoot(link string) string {
	_, path, ok := strings.Cut(link, "devices/")
	if !ok {
		return ""
	}
	root, _, _ := strings.Cut(path, "/")
	if !pcieRoot.MatchString(root) {
		return ""
	}
	return root
}

// virtfn reads the name of a PF's link to a VF.
func virtfn(name string) (index int, ok bool) {
	digits, ok := strings.CutPrefix(name, "virtfn")
	if !ok {
		return 0, false
	}
	index, err := strconv.Atoi(digits)
	return index, err == nil && strconv.Itoa(index) == digits && index >= 0
}

// netdev is the name that a device's netdev has on the host, "" if there is none there. The kernel shows it in the
// device's directory, and only to readers in the netdev's namespace; with virtio, in that of the virtio device. made
// says that there is one at all: the directory that netdevs are in exists as long as one does, whatever its namespace.
func (s sysfs) netdev(device string) (name string, made bool, err error) {
	found, made, err := list(filepath.Join(device, "net"))
	if err != nil || made {
		return s.own(device, found), made, err
	}
	if driver, err := target(device, "driver"); driver != "virtio-pci" {
		return "", false, err
	}
	children, err := names(device)
	if err != nil {
		return "", false, err
	}
	slices.Sort(children)
	for _, child := range children {
		if !strings.HasPrefix(child, "virtio") {
			continue
		}
		found, made, err := list(filepath.Join(device, child, "net"))
		if err != nil || made {
			return s.own(filepath.Join(device, child), found), made, err
		}
	}
	return "", false, nil
}

// own chooses among the netdevs of one device. A PF whose eswitch is in switchdev mode also has the representors; a
// card with one function for two ports has a netdev for each, and the first port's counts.
func (s sysfs) own(device string, netdevs []string) string {
	if len(netdevs) == 0 {
		return ""
	}
	if len(netdevs) == 1 {
		return netdevs[0]
	}
	type candidate struct {
		name string
		rank int // see rank
		port int
	}
	candidates := make([]candidate, 0, len(netdevs))
	for _, name := range netdevs {
		dir := filepath.Join(device, "net", name)
		portName, _ := attribute(dir, "phys_port_name") // EOPNOTSUPP is usual
		port, _ := attribute(dir, "dev_port")
		number, _ := strconv.Atoi(port)
		candidates = append(candidates, candidate{name, rank(portName), number})
	}
	return slices.MinFunc(candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.port, b.port), cmp.Compare(a.name, b.name))
	}).name
}

// rank puts what says that it is an uplink before what says nothing, as a representor does that is being made, and that
// before what says that it is a representor.
func rank(portName string) int {
	switch {
	case uplinkPort.MatchString(portName):
		return 0
	case representor.MatchString(portName):
		return 2
	}
	return 1
}

// netdevDir is the directory of a device's netdev.
func (s sysfs) netdevDir(device, netdev string) string {
	dir := filepath.Join(device, "net", netdev)
	if _, err := os.Lstat(dir); err != nil { // it is a virtio device's
		return filepath.Join(s.root, "class/net", netdev)
	}
	return dir
}

// carrier says whether a device's netdev has a link. The kernel refuses to read carrier while the netdev is down.
func (s sysfs) carrier(device, netdev string) (bool, error) {
	dir := s.netdevDir(device, netdev)
	if carrier, err := attribute(dir, "carrier"); err == nil {
		return carrier == "1", nil
	}
	state, err := attribute(dir, "operstate")
	if err != nil {
		return false, fmt.Errorf("netdev %s: %w", netdev, err)
	}
	return state == "up", nil
}

// subfunction is an SF's auxiliary device.
type subfunction struct {
	dir    string
	parent pci.Address
	sfnum  uint32
}

// subfunctions lists the SFs: auxiliary devices such as mlx5_core.sf.2, whose parent is the PF's PCI device. bad is
// called for each that cannot be read.
func (s sysfs) subfunctions(bad func(entry string, why reason, err error)) ([]subfunction, error) {
	entries, err := names(filepath.Join(s.root, auxiliaryDevices))
	if err != nil {
		return nil, err
	}
	slices.Sort(entries)
	var out []subfunction
	for _, name := range entries {
		if !strings.Contains(name, ".sf.") {
			continue
		}
		entry := filepath.Join(auxiliaryDevices, name)
		link, err := os.Readlink(filepath.Join(s.root, entry))
		if err != nil {
			bad(entry, reasonParent, err)
			continue
		}
		parent, err := pci.Parse(filepath.Base(filepath.Dir(link)))
		if err != nil {
			bad(entry, reasonParent, fmt.Errorf("%s: is not below a PCI device", link))
			continue
		}
		dir := filepath.Join(s.root, entry)
		text, err := attribute(dir, "sfnum")
		if err != nil {
			bad(entry, reasonSFNum, err)
			continue
		}
		sfnum, err := parseSFNum(text)
		if err != nil {
			bad(entry, reasonSFNum, err)
			continue
		}
		out = append(out, subfunction{dir, parent, sfnum})
	}
	return out, nil
}
