package setup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// device is a PCI device in sysfs.
type device struct {
	root string // of sysfs
	name string // PCI address
	dir  string
}

// driver is the name of the driver that is bound, "" if none is.
func (d device) driver() (string, error) {
	target, err := os.Readlink(filepath.Join(d.dir, "driver"))
	if errors.Is(err, fs.ErrNotExist) {
		if !exists(d.dir) {
			return "", fmt.Errorf("is gone from this node: %w", err)
		}
		return "", nil
	}
	return filepath.Base(target), err
}

// driverDir is where the kernel takes orders for a driver.
func (d device) driverDir(driver string) string {
	return filepath.Join(d.root, "bus/pci/drivers", driver)
}

// hasDriver says what to do where the node does not have a driver.
func (d device) hasDriver(driver string) error {
	if exists(d.driverDir(driver)) {
		return nil
	}
	return fmt.Errorf("the node does not have that driver: load the module, as by \"modprobe %s\"", driver)
}

// override is the driver that alone may be bound, "" where any may.
func (d device) override() (string, error) {
	text, err := os.ReadFile(filepath.Join(d.dir, "driver_override"))
	if err != nil {
		return "", err
	}
	name := strings.TrimSpace(string(text))
	if name == "(null)" { // what printf makes of none
		return "", nil
	}
	return name, nil
}

// harmless are the drivers of other devices in an IOMMU group that let a program have its device: they do no DMA
// (driver_managed_dma in the kernel). Those of vfio do too, but are other programs' and there is one group for both.
var harmless = []string{"", "pcieport", "pci-stub"}

// group returns the name of the device's IOMMU group, "" where there is none, and the other devices in it that are in
// use, for people.
func (d device) group() (name string, peers []string, err error) {
	target, err := os.Readlink(filepath.Join(d.dir, "iommu_group"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil, nil
	}
	if err != nil {
		return "", nil, err
	}
	entries, err := os.ReadDir(filepath.Join(d.dir, "iommu_group/devices"))
	if err != nil {
		return "", nil, err
	}
	for _, e := range entries {
		peer := device{root: d.root, name: e.Name(), dir: filepath.Join(d.dir, "iommu_group/devices", e.Name())}
		driver, err := peer.driver()
		if err == nil && peer.name != d.name && !slices.Contains(harmless, driver) {
			peers = append(peers, fmt.Sprintf("%s (driver %s)", peer.name, driver))
		}
	}
	return filepath.Base(target), peers, nil
}

// enabled says whether the device's driver has enabled it: the file counts how often.
func (d device) enabled() bool {
	text, err := os.ReadFile(filepath.Join(d.dir, "enable"))
	return err == nil && strings.TrimSpace(string(text)) != "0"
}

// netdevAway says whether the device has a netdev that is not on the host: its directory is then there, and empty.
func (d device) netdevAway() bool { return len(d.below("net")) > 0 && len(d.below("net/*")) == 0 }

// below are the files of the device by a pattern. With virtio, the netdev is that of the virtio device.
func (d device) below(pattern string) []string {
	own, _ := filepath.Glob(filepath.Join(d.dir, pattern)) // it fails only for a bad pattern
	virtio, _ := filepath.Glob(filepath.Join(d.dir, "virtio*", pattern))
	return append(own, virtio...)
}

// users are the netdevs on top of the device's, such as bonds, bridges and VLANs.
func (d device) users(netdev string) []string {
	links := d.below(filepath.Join("net", netdev, "upper_*"))
	names := make([]string, 0, len(links))
	for _, l := range links {
		names = append(names, strings.TrimPrefix(filepath.Base(l), "upper_"))
	}
	return names
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// writes are orders to sysfs. One may block in the kernel: the unbinding of vfio-pci does as long as a program has the
// device open. It is then carried out whenever that ends, whether somebody waits for it or not, and must not be given a
// second time.
type writes struct {
	mutex   sync.Mutex
	running map[[2]string]*order
}

type order struct {
	done chan struct{}
	err  error // once done is closed
}

// do gives an order, or waits for the same one that was given before, until ctx ends.
func (w *writes) do(ctx context.Context, file, value string) error {
	o := w.give(file, value)
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
		return fmt.Errorf("write %q to %s: %w", strings.TrimSpace(value), file, context.Cause(ctx))
	}
}

func (w *writes) give(file, value string) *order {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	key := [2]string{file, value}
	if o := w.running[key]; o != nil {
		return o
	}
	o := &order{done: make(chan struct{})}
	if w.running == nil {
		w.running = map[[2]string]*order{}
	}
	w.running[key] = o
	go func() {
		o.err = write(file, value)
		w.mutex.Lock()
		defer w.mutex.Unlock()
		delete(w.running, key)
		close(o.done)
	}()
	return o
}

func write(file, value string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}
