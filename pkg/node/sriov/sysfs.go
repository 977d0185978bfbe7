package sriov

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// sysfs reads and writes what the kernel shows of PFs and their VFs (Documentation/ABI/testing/sysfs-bus-pci). It has
// no state.
type sysfs struct{ root string }

func (s sysfs) device(a pci.Address) string {
	return filepath.Join(s.root, "bus/pci/devices", string(a))
}

// numVFs is how many VFs a PF has; the error is an [fs.ErrNotExist] where the device can have none.
func (s sysfs) numVFs(pf pci.Address) (int, error) { return s.number(pf, "sriov_numvfs") }

// totalVFs is how many VFs a PF can have, as its driver limits that.
func (s sysfs) totalVFs(pf pci.Address) (int, error) { return s.number(pf, "sriov_totalvfs") }

func (s sysfs) number(pf pci.Address, name string) (int, error) {
	text, err := os.ReadFile(filepath.Join(s.device(pf), name))
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s of PF %s: %q: must be a number", name, pf, text)
	}
	return n, nil
}

// setNumVFs has the kernel make n VFs, or take all away if n is 0. It returns when that is done, which takes the driver
// seconds. Any number but 0 is refused while there are VFs.
func (s sysfs) setNumVFs(pf pci.Address, n int) error {
	file, err := os.OpenFile(filepath.Join(s.device(pf), "sriov_numvfs"), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(strconv.Itoa(n))
	return errors.Join(err, file.Close())
}

// vfs are the VFs of a PF, by its links to them, sorted.
func (s sysfs) vfs(pf pci.Address) ([]pci.Address, error) {
	links, err := filepath.Glob(filepath.Join(s.device(pf), "virtfn*"))
	if err != nil {
		return nil, err
	}
	var vfs []pci.Address
	for _, link := range links {
		target, err := os.Readlink(link)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was taken away meanwhile
		}
		if err != nil {
			return nil, err
		}
		vf, err := pci.Parse(filepath.Base(target))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", link, err)
		}
		vfs = append(vfs, vf)
	}
	slices.Sort(vfs)
	return vfs, nil
}

// driver is the kernel driver that is bound, "" if none is.
func (s sysfs) driver(a pci.Address) (string, error) {
	target, err := os.Readlink(filepath.Join(s.device(a), "driver"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return filepath.Base(target), nil
}

// netdevs are the names of the netdevs that a device has on the host. made says that it has netdevs at all: those in
// other network namespaces are not shown, but the directory that they are in is (device_get_ns in drivers/base). With
// virtio the directory is that of the virtio device.
func (s sysfs) netdevs(a pci.Address) (names []string, made bool, err error) {
	for _, pattern := range []string{"net", "virtio*/net"} {
		dirs, err := filepath.Glob(filepath.Join(s.device(a), pattern))
		if err != nil {
			return nil, false, err
		}
		for _, dir := range dirs {
			entries, err := os.ReadDir(dir)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, false, err
			}
			made = true
			for _, entry := range entries {
				names = append(names, entry.Name())
			}
		}
	}
	return names, made, nil
}
