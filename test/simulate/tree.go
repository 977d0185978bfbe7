// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// tree is a directory in the form of sysfs. Files are replaced by rename, so that readers never see
// a partial one.
type tree struct {
	sys string // the directory
	tmp string // temporary directory beside it
	// left says that a simulation that was killed had left a tree here.
	left bool
}

func newTree(root string) (tree, error) {
	t := tree{sys: filepath.Join(root, "sys"), tmp: filepath.Join(root, ".sys-new")}
	if _, err := os.Stat(t.tmp); err == nil { // a previous simulation was killed
		t.left = true
		if err := t.empty(); err != nil {
			return t, err
		}
	}

	if entries, err := os.ReadDir(t.sys); err == nil && len(entries) > 0 && !t.left {
		return t, fmt.Errorf("%s: is not empty, and not of an earlier simulation", t.sys)
	}

	for _, dir := range append(t.standing(), t.sys, t.tmp) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return t, err
		}
	}

	return t, nil
}

// standing returns the directories that a tree always has.
func (t tree) standing() []string {
	return []string{t.path("bus/pci/devices"), t.path("bus/pci/drivers"),
		t.path("bus/auxiliary/devices"), t.path("class/net"), t.path("devices")}
}

// empty removes what is in the standing directories, and not the directories themselves, because
// pods may have mounted them.
func (t tree) empty() error {
	var errs []error
	for _, dir := range append(t.standing(), t.tmp) {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, entry := range entries {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, entry.Name())))
		}
	}
	return errors.Join(errs...)
}

func (t tree) remove() error { return errors.Join(os.RemoveAll(t.sys), os.RemoveAll(t.tmp)) }

func (t tree) path(elements ...string) string {
	return filepath.Join(append([]string{t.sys}, elements...)...)
}

// link creates a relative symbolic link, like all links of sysfs.
func (t tree) link(from, to string) error {
	relative, err := filepath.Rel(filepath.Dir(from), to)
	if err != nil {
		return err
	}
	return os.Symlink(relative, from)
}

func writeAll(dir string, attributes map[string]string) error {
	for name, value := range attributes {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(value+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// replace changes an attribute atomically.
func (t tree) replace(path, value string) error {
	tmp := filepath.Join(t.tmp, "attribute")
	if err := os.WriteFile(tmp, []byte(value+"\n"), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// device is a PCI device in the tree.
type device struct {
	address    pci.Address
	parent     string // parent directory relative to devices/, such as "pci0000:3a/0000:3a:00.0"
	driver     string
	attributes map[string]string
	physfn     *device // the PF of a VF
	index      int     // of a VF
}

func (t tree) dir(d *device) string { return t.path("devices", d.parent, string(d.address)) }

// add adds a device. Its directory is complete before it appears on the bus.
func (t tree) add(d *device) error {
	dir := t.dir(d)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := writeAll(dir, d.attributes); err != nil {
		return err
	}
	if err := t.link(filepath.Join(dir, "subsystem"), t.path("bus/pci")); err != nil {
		return err
	}

	if d.driver != "" {
		driver := t.path("bus/pci/drivers", d.driver)
		if err := errors.Join(os.MkdirAll(driver, 0o755),
			t.link(filepath.Join(dir, "driver"), driver)); err != nil {
			return err
		}
	}

	if d.physfn != nil {
		if err := errors.Join(t.link(t.virtfn(d), dir),
			t.link(filepath.Join(dir, "physfn"), t.dir(d.physfn))); err != nil {
			return err
		}
	}

	return t.link(t.onBus(d), dir)
}

// removeDevice removes a device.
func (t tree) removeDevice(d *device) error {
	var errs []error
	if d.physfn != nil {
		errs = append(errs, os.Remove(t.virtfn(d)))
	}
	return errors.Join(append(errs, os.Remove(t.onBus(d)), os.RemoveAll(t.dir(d)))...)
}

func (t tree) onBus(d *device) string { return t.path("bus/pci/devices", string(d.address)) }

func (t tree) virtfn(d *device) string {
	return filepath.Join(t.dir(d.physfn), "virtfn"+strconv.Itoa(d.index))
}

// netdev is the state of a netdev in the tree. Equal values look the same.
type netdev struct {
	name     string
	index    int
	mtu      int
	address  string
	up       bool // administratively
	carrier  bool
	state    string // operstate
	portName string // phys_port_name; "" if the driver has none
	speed    int    // of the link in Mbit/s; 0 if the driver does not report it
}

// show replaces the netdev in its device's directory. The zero value means none.
func (t tree) show(d *device, before, now netdev) error {
	if before == now {
		return nil
	}

	if before.name != now.name || now.name == "" {
		if err := t.hide(d, before); err != nil || now.name == "" {
			return err
		}
		return t.register(d, now)
	}

	dir := filepath.Join(t.dir(d), "net", now.name)
	for name, value := range now.attributes() {
		if value == before.attributes()[name] {
			continue
		}
		if err := t.replace(filepath.Join(dir, name), value); err != nil {
			return err
		}
	}

	if !now.up {
		return errors.Join(os.RemoveAll(filepath.Join(dir, "carrier")),
			os.RemoveAll(filepath.Join(dir, "speed")))
	}

	return nil
}

func (t tree) register(d *device, n netdev) error {
	tmp := filepath.Join(t.tmp, "net-"+n.name)
	if err := errors.Join(os.RemoveAll(tmp), os.Mkdir(tmp, 0o755),
		writeAll(tmp, n.attributes())); err != nil {
		return err
	}
	if err := os.Symlink("../../../"+string(d.address), filepath.Join(tmp, "device")); err != nil {
		return err
	}

	dir := filepath.Join(t.dir(d), "net", n.name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o755), os.Rename(tmp, dir)); err != nil {
		return err
	}

	class := t.path("class/net", n.name)
	if err := os.Remove(class); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	return t.link(class, dir)
}

func (t tree) hide(d *device, n netdev) error {
	if n.name == "" {
		return nil
	}

	dir := filepath.Join(t.dir(d), "net", n.name)
	gone := filepath.Join(t.tmp, "gone-"+n.name)
	class := t.path("class/net", n.name)
	// Another device's netdev may have taken the name.
	if to, err := os.Readlink(class); err == nil &&
		strings.HasSuffix(to, filepath.Join(string(d.address), "net", n.name)) {
		if err := os.Remove(class); err != nil {
			return err
		}
	}

	if err := os.Rename(dir, gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	return os.RemoveAll(gone)
}

// attributes returns the attributes of a netdev. While it is down, carrier and speed are missing,
// because the kernel then refuses to read them (EINVAL).
func (n netdev) attributes() map[string]string {
	a := map[string]string{
		"address": n.address, "ifindex": strconv.Itoa(n.index), "mtu": strconv.Itoa(n.mtu),
		"operstate": n.state,
		"dev_port":  "0", "dev_id": "0x0", "type": "1", "addr_len": "6",
		"broadcast": "ff:ff:ff:ff:ff:ff",
	}

	if n.up {
		a["carrier"] = map[bool]string{false: "0", true: "1"}[n.carrier]
		if n.speed > 0 {
			a["speed"] = map[bool]string{false: "-1", true: strconv.Itoa(n.speed)}[n.carrier]
		}
	}

	if n.portName != "" {
		a["phys_port_name"] = n.portName
	}

	return a
}
