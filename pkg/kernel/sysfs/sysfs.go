// SPDX-License-Identifier: Apache-2.0

// Package sysfs reads and writes the kernel's files about devices
// (Documentation/ABI/testing/sysfs-bus-pci and sysfs-class-net). It caches nothing: each call reads
// again. Several goroutines may use the package at once.
package sysfs

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// maxAttribute is the maximum size of an attribute in bytes: a page
// (Documentation/filesystems/sysfs.rst).
const maxAttribute = 4096

// These directories list the devices of a bus.
const (
	PCIDevices       = "bus/pci/devices"
	AuxiliaryDevices = "bus/auxiliary/devices"
	VDPADevices      = "bus/vdpa/devices"
)

// VFIODevices is the directory below a device with the device that a VFIO driver has made of it,
// since Linux 6.1 (class vfio-dev in drivers/vfio/vfio_main.c): "vfio0".
const VFIODevices = "vfio-dev"

// Root is the path where sysfs is mounted: "/sys".
type Root string

// Dir returns a directory below the root.
func (r Root) Dir(elements ...string) Dir {
	return Dir(filepath.Join(string(r), filepath.Join(elements...)))
}

// PCI returns the directory of a PCI device.
func (r Root) PCI(a pci.Address) Dir { return r.Dir(PCIDevices, string(a)) }

// Gone reports whether the kernel does not have the device of a directory below the root. It is true
// only if the kernel shows other PCI devices: without any, this sysfs does not show the host's
// devices. The error says why the answer is not known.
func (r Root) Gone(device Dir) (bool, error) {
	_, err := os.Lstat(string(device))
	if !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}

	bus := r.Dir(PCIDevices)
	others, _, err := bus.Names()
	if err == nil && len(others) == 0 {
		err = fmt.Errorf("%s has no devices, so it does not show that %s is gone", bus, device.Base())
	}
	// A device that the bus lists was plugged in meanwhile.
	return err == nil && !slices.Contains(others, device.Base()), err
}

// PCIDriver returns the directory of a PCI driver.
func (r Root) PCIDriver(name string) Dir { return r.Dir("bus/pci/drivers", name) }

// Auxiliary returns the directory of an auxiliary device, such as "mlx5_core.sf.4" of an SF.
func (r Root) Auxiliary(name string) Dir { return r.Dir(AuxiliaryDevices, name) }

// Function returns the directory of a Function's device. With the root "" it is the path below the
// root.
func (r Root) Function(f function.Function) Dir {
	if f.Kind == function.SF {
		return r.Auxiliary(f.AuxDevice)
	}
	return r.PCI(f.ID.Address)
}

// RDMANodes returns the names of the character devices of a device's RDMA devices, which are below
// /dev/infiniband: "uverbs0", "umad0", "issm0". It shows those of RDMA devices in all network
// namespaces. A device without RDMA devices has none.
func (d Dir) RDMANodes() (nodes []string, err error) {
	for _, class := range []string{"infiniband_verbs", "infiniband_mad"} {
		names, err := d.Dir(class).Sorted()
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, names...)
	}
	return nodes, nil
}

// Dir is the path of a directory in sysfs, such as the directory of a device.
type Dir string

// Dir returns a directory below this one.
func (d Dir) Dir(elements ...string) Dir { return Root(d).Dir(elements...) }

// Base returns the last element of the path, which is the name of a device on its bus.
func (d Dir) Base() string { return filepath.Base(string(d)) }

// Exists reports whether there is a directory, or a symbolic link, at the path. What cannot be looked
// at counts as there. For a device whose absence ends something, use [Root.Gone].
func (d Dir) Exists() bool {
	_, err := os.Lstat(string(d))
	return !errors.Is(err, fs.ErrNotExist)
}

// Has reports whether the directory has an entry of the name that can be looked at.
func (d Dir) Has(name string) bool {
	_, err := os.Lstat(string(d.Dir(name)))
	return err == nil
}

// Inode returns the inode number of the directory. A later device at the same path has another
// number, because sysfs does not use a number again before the next boot: since Linux 5.5 numbers
// have 64 bits, of which the upper half counts the rounds of the lower half (__kernfs_new_node in
// fs/kernfs/dir.c). Before, and on 32-bit kernels, a number returns after 2^31 others.
func (d Dir) Inode() (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Stat(string(d), &stat); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: string(d), Err: err}
	}
	return stat.Ino, nil
}

// Names lists the entries of the directory in no particular order. exists is false if there is no
// such directory.
func (d Dir) Names() (names []string, exists bool, err error) {
	// The inventory reads a directory for each VF. os.Open would stat the directory and allocate a
	// buffer each time.
	fd, err := unix.Open(string(d), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, &fs.PathError{Op: "open", Path: string(d), Err: err}
	}
	defer unix.Close(fd)

	var buf [4096]byte
	for {
		n, err := unix.Getdents(fd, buf[:])
		if errors.Is(err, fs.ErrNotExist) {
			return nil, false, nil // the directory was removed meanwhile
		}
		if err != nil {
			return nil, true, &fs.PathError{Op: "getdents", Path: string(d), Err: err}
		}
		if n <= 0 {
			return names, true, nil
		}

		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

// Sorted returns [Dir.Names] in alphabetical order. A directory that does not exist is empty.
func (d Dir) Sorted() ([]string, error) {
	names, _, err := d.Names()
	slices.Sort(names)
	return names, err
}

// Attribute returns the text of a file, without surrounding white space and without the zero byte
// that ends device-tree strings.
func (d Dir) Attribute(name string) (string, error) {
	f, err := os.Open(string(d.Dir(name)))
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

	return strings.Trim(string(buf[:n]), " \t\r\n\x00"), nil
}

// Number returns the decimal number in a file. A negative number is an error.
func (d Dir) Number(name string) (int, error) {
	text, err := d.Attribute(name)
	if err != nil {
		return 0, err
	}

	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s: %q: must be a number", d.Dir(name), text)
	}
	return n, nil
}

// Link returns the last element of the target of a symbolic link: the name of the driver for
// "driver", the address of the PF for "physfn". It returns "" if there is no such link.
func (d Dir) Link(name string) (string, error) {
	to, err := d.Dir(name).Target()
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return filepath.Base(to), nil
}

// Target returns the target of this symbolic link. The entry of a device on its bus is such a link:
// "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0".
func (d Dir) Target() (string, error) { return os.Readlink(string(d)) }

// Write writes a file. It returns when the kernel has carried out the order, which may take
// seconds, or has refused it.
//
// EAGAIN is a refusal, too: i40e returns it for a write to sriov_numvfs while another operation is
// pending. Write does not use [os.OpenFile], which would poll the file after EAGAIN and wait for
// ever.
func (d Dir) Write(name, value string) error {
	path := string(d.Dir(name))
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_TRUNC|unix.O_CLOEXEC, 0)
	for errors.Is(err, unix.EINTR) {
		fd, err = unix.Open(path, unix.O_WRONLY|unix.O_TRUNC|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}

	file := os.NewFile(uintptr(fd), path) // the file is blocking, so Go does not poll it
	_, err = file.WriteString(value)
	return errors.Join(err, file.Close())
}

// VF is one of the VFs of a PF.
type VF struct {
	Index   int
	Address pci.Address
}

// VFs lists the VFs of a PF by index. It leaves out a VF that is removed meanwhile.
func (d Dir) VFs() ([]VF, error) {
	names, _, err := d.Names()
	if err != nil {
		return nil, err
	}

	var vfs []VF
	for _, name := range names {
		index, ok := VFIndex(name)
		if !ok {
			continue
		}

		target, err := d.Link(name)
		if err != nil {
			return nil, err
		}
		if target == "" {
			continue
		}

		address, err := pci.Parse(target)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.Dir(name), err)
		}

		vfs = append(vfs, VF{index, address})
	}

	slices.SortFunc(vfs, func(a, b VF) int { return cmp.Compare(a.Index, b.Index) })
	return vfs, nil
}

// VFIndex parses the name of a PF's symbolic link to a VF, such as "virtfn7".
func VFIndex(name string) (index int, ok bool) {
	digits, ok := strings.CutPrefix(name, "virtfn")
	if !ok {
		return 0, false
	}
	index, err := strconv.Atoi(digits)
	return index, err == nil && strconv.Itoa(index) == digits && index >= 0
}

// Netdevs returns the directory of a device's netdevs, and their names. dir is "" if the device has
// no netdev in any network namespace. names has only the netdevs in the network namespace of the
// caller (device_get_ns in drivers/base). For a virtio-pci device, dir is the directory of the
// virtio device.
func (d Dir) Netdevs() (dir Dir, names []string, err error) {
	dir = d.Dir("net")
	names, exists, err := dir.Names()
	if err != nil || exists {
		return dir, names, err
	}
	if driver, err := d.Link("driver"); driver != quirk.VirtioDriver {
		return "", nil, err
	}
	return d.VirtioNetdevs()
}

// VirtioNetdevs returns [Dir.Netdevs] of the virtio device below this device, which the driver
// virtio-pci or virtio_vdpa made.
func (d Dir) VirtioNetdevs() (dir Dir, names []string, err error) {
	children, err := d.Sorted()
	if err != nil {
		return "", nil, err
	}

	for _, child := range children {
		if !strings.HasPrefix(child, "virtio") {
			continue
		}
		if dir, names, err := d.Dir(child).Netdevs(); err != nil || dir != "" {
			return dir, names, err
		}
	}

	return "", nil, nil
}

// Passthrough returns how the driver that is bound to this device passes the device to a program.
//
// The kernel shows a vfio or uio device below this device. Before Linux 6.1 it shows only that the
// driver's module depends on the module of vfio or uio. A driver that is built into the kernel is
// recognized by its name.
func (d Dir) Passthrough(driver string, root Root) (function.Passthrough, error) {
	switch {
	case d.Has(VFIODevices):
		return function.VFIO, nil
	case d.Has("uio"):
		return function.UIO, nil
	}

	module, err := root.PCIDriver(driver).Link("module")
	if err != nil {
		return "", err
	}

	for _, core := range []struct {
		module string
		is     function.Passthrough
	}{{"vfio_pci_core", function.VFIO}, {"vfio", function.VFIO}, {"uio", function.UIO}} {
		if module != "" && root.Dir("module", core.module, "holders").Has(module) {
			return core.is, nil
		}
	}

	return function.PassthroughOf(driver), nil
}
