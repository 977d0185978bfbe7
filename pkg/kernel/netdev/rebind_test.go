// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// bus is a sysfs with one device of the PCI bus. Its driver accepts orders and does nothing.
type bus struct {
	t    *testing.T
	root string
}

const busDevice = "0000:3b:00.2"

// newBus makes a device with a driver, or without one if driver is "".
func newBus(t *testing.T, driver string) bus {
	t.Helper()
	b := bus{t, t.TempDir()}
	must.Succeed(t, os.MkdirAll(b.device(), 0o700))
	other := filepath.Join(b.root, "bus/pci/devices/0000:00:00.0")
	must.Succeed(t, os.MkdirAll(other, 0o700))

	for _, known := range []string{"iavf", "ice", "vfio-pci"} {
		must.Succeed(t, os.MkdirAll(b.driver(known), 0o700))
		for _, order := range []string{"unbind", "bind"} {
			must.Succeed(t, os.WriteFile(filepath.Join(b.driver(known), order), nil, 0o600))
		}
	}

	if driver != "" {
		must.Succeed(t, os.Symlink(b.driver(driver), filepath.Join(b.device(), "driver")))
	}

	return b
}

func (b bus) device() string { return filepath.Join(b.root, "bus/pci/devices", busDevice) }

func (b bus) driver(name string) string { return filepath.Join(b.root, "bus/pci/drivers", name) }

// wantOrders checks that the driver got exactly these orders.
func (b bus) wantOrders(driver string, orders ...string) {
	b.t.Helper()
	var got []string
	for _, order := range []string{"unbind", "bind"} {
		text, err := os.ReadFile(filepath.Join(b.driver(driver), order))
		must.Succeed(b.t, err)
		if string(text) == busDevice {
			got = append(got, order)
		}
	}

	if strings.Join(got, " ") != strings.Join(orders, " ") {
		b.t.Errorf("orders to %s %q, want %q", driver, got, orders)
	}
}

// engine returns an engine that uses the bus, on a host without netdevs.
func (b bus) engine(trace func(string)) *netdev.Engine {
	b.t.Helper()
	e, err := netdev.New(netdev.Options{
		HostNetNS: netns.New(b.t).Path(), SysRoot: b.root, Trace: trace,
	})
	must.Succeed(b.t, err)
	b.t.Cleanup(func() { must.Succeed(b.t, e.Close()) })
	return e
}

var onBus = netdev.Identity{Index: 7, Kind: "device", Bus: "pci", Parent: busDevice}

func TestRebind(t *testing.T) {
	refused := errors.New("disk full")
	for name, test := range map[string]struct {
		driver, vfs string
		intend      error
		err         string
	}{
		"VF":                     {driver: "iavf"},
		"PF with VFs":            {driver: "ice", vfs: "8", err: "has 8 VFs, which would end"},
		"PF without":             {driver: "ice", vfs: "0"},
		"no driver":              {err: "has no driver"},
		"the intent is not kept": {driver: "iavf", intend: refused, err: refused.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBus(t, test.driver)
			if test.vfs != "" {
				file := filepath.Join(b.device(), "sriov_numvfs")
				must.Succeed(t, os.WriteFile(file, []byte(test.vfs), 0o600))
			}

			intended := ""
			err := b.engine(nil).Rebind(t.Context(), onBus, func(driver string) error {
				b.wantOrders(driver)
				intended = driver
				return test.intend
			})

			if test.err != "" {
				mentions(t, err, test.err)
				for _, driver := range []string{"iavf", "ice"} {
					b.wantOrders(driver)
				}
				return
			}

			must.Succeed(t, err)
			b.wantOrders(test.driver, "unbind", "bind")
			if intended != test.driver {
				t.Errorf("intended for %q, want %q", intended, test.driver)
			}
		})
	}

	gone := newBus(t, "iavf")
	must.Succeed(t, os.RemoveAll(gone.device()))
	intend := func(string) error { return errors.New("intended for a device that is gone") }
	mentions(t, gone.engine(nil).Rebind(t.Context(), onBus, intend), "has no driver")
}

// TestKilledBetweenUnbindAndBind checks that the next call binds the driver that the previous call
// unbound.
func TestKilledBetweenUnbindAndBind(t *testing.T) {
	type killed struct{}
	needs.Root(t, "to make a network namespace")
	b := newBus(t, "iavf")
	kept := ""
	func() {
		defer func() {
			if p := recover(); p != (killed{}) {
				t.Fatalf("ended by %v", p)
			}
		}()

		e := b.engine(func(step string) {
			if step == "bind iavf of "+busDevice {
				panic(killed{})
			}
		})

		err := e.Rebind(t.Context(), onBus, func(driver string) error { kept = driver; return nil })
		t.Errorf("not killed: %v", err)
	}()

	b.wantOrders("iavf", "unbind")
	must.Succeed(t, os.Remove(filepath.Join(b.device(), "driver"))) // as the kernel does

	device := netdev.Device{Rebinding: &netdev.Rebinding{Driver: kept}}
	before := netdev.Snapshot{Name: "eth1", Identity: onBus}
	_, err := b.engine(nil).Restore(t.Context(), device, before, netdev.Place{})
	if !errors.Is(err, netdev.ErrGone) {
		t.Errorf("error %v, want that the netdev is not there yet", err)
	}

	b.wantOrders("iavf", "unbind", "bind")
}

// TestRestoreBindsADriver checks that Restore binds only the driver that an earlier call was about
// to bind, and only to a device without a driver.
func TestRestoreBindsADriver(t *testing.T) {
	for name, test := range map[string]struct {
		is    string // driver of the device
		was   string // driver that was about to be bound again
		gone  string // path below bus/pci to remove
		binds bool
		alive bool // the pod's namespace exists
		wants error
		fails string
	}{
		"none is bound": {was: "iavf", binds: true, wants: netdev.ErrGone},
		"the pod is there": {
			was: "iavf", alive: true, binds: true, wants: netdev.ErrGone,
		},
		"it is bound, without a netdev": {
			is: "iavf", was: "iavf", alive: true, wants: netdev.ErrGone,
		},
		"another one is bound":      {is: "vfio-pci", was: "iavf", wants: netdev.ErrGone},
		"none was to be bound":      {wants: netdev.ErrGone},
		"none was to be bound, pod": {alive: true, wants: netdev.ErrAway},
		"the device is gone": {
			was: "iavf", gone: "devices/" + busDevice, wants: netdev.ErrGone,
		},
		"the driver is gone": {was: "igbvf", fails: "load its module again"},
		"the driver does not take it": {
			was: "iavf", gone: "drivers/iavf/bind", fails: "bind iavf of " + busDevice,
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBus(t, test.is)
			if test.gone != "" {
				must.Succeed(t, os.RemoveAll(filepath.Join(b.root, "bus/pci", test.gone)))
			}

			e := b.engine(nil)
			var place netdev.Place
			if test.alive {
				place = placeOf(t, netns.New(t))
			}

			device := netdev.Device{Rebinding: &netdev.Rebinding{Driver: test.was}}
			before := netdev.Snapshot{Name: "eth1", Identity: onBus}
			_, err := e.Restore(t.Context(), device, before, place)
			if test.fails != "" {
				mentions(t, err, test.fails)
				return
			}
			if !errors.Is(err, test.wants) {
				t.Errorf("error %v, want %v", err, test.wants)
			}

			if test.gone == "" {
				b.wantOrders("vfio-pci")
				if test.binds {
					b.wantOrders("iavf", "bind")
				} else {
					b.wantOrders("iavf")
				}
			}
		})
	}
}

// placeOf returns a place in a namespace that exists.
func placeOf(t *testing.T, pod *netns.Namespace) netdev.Place {
	t.Helper()
	cookie, err := netdev.CookieOf(pod.Path())
	must.Succeed(t, err)
	return netdev.Place{NetNS: pod.Path(), Cookie: cookie, Index: 7}
}
