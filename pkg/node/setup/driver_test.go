// SPDX-License-Identifier: Apache-2.0

package setup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const address = "0000:3b:00.2"

var vf = function.ID{Address: address}

// host is a sysfs with one VF, and the kernel that carries out the orders written there.
type host struct {
	t     *testing.T
	root  string
	f     function.Function // without the driver, which sysfs has
	steps []string
	fault map[function.ID]string
	// hidden says that Netdev fails although there is a netdev
	hidden bool
	// restored is the snapshot that the netdev was restored to
	restored *netdev.Snapshot
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, root: t.TempDir(), f: function.Function{
		ID: vf, Kind: function.VF, PF: "0000:3b:00.0", IOMMUGroup: "42", RDMA: true,
		RDMADevices: []string{"mlx5_2"},
	}}
	for _, driver := range []string{"vfio-pci", "mlx5_core", "other", "hisi_acc_vfio_pci"} {
		h.file("bus/pci/drivers/"+driver+"/bind", "")
		h.file("bus/pci/drivers/"+driver+"/unbind", "")
	}

	h.file(h.device("driver_override"), "(null)\n")
	h.file(h.device("net/eth5/address"), "")
	h.link("kernel/iommu_groups/42", h.device("iommu_group"))
	h.link("bus/pci/devices/"+address, "kernel/iommu_groups/42/devices/"+address)
	h.bind("mlx5_core")

	return h
}

func (h *host) path(name string) string { return filepath.Join(h.root, name) }

func (h *host) device(name string) string { return "bus/pci/devices/" + address + "/" + name }

func (h *host) file(name, content string) {
	h.t.Helper()
	must.Succeed(h.t, os.MkdirAll(filepath.Dir(h.path(name)), 0o755))
	must.Succeed(h.t, os.WriteFile(h.path(name), []byte(content), 0o644))
}

func (h *host) link(target, name string) {
	h.t.Helper()
	must.Succeed(h.t, os.MkdirAll(filepath.Dir(h.path(name)), 0o755))
	must.Succeed(h.t, os.MkdirAll(h.path(target), 0o755))
	must.Succeed(h.t, os.Symlink(h.path(target), h.path(name)))
}

func (h *host) bind(driver string) {
	h.t.Helper()
	_ = os.Remove(h.path(h.device("driver")))
	if driver != "" {
		h.link("bus/pci/drivers/"+driver, h.device("driver"))
	}
}

// trace does the kernel's work for a step just before the step is written.
func (h *host) trace(step string) {
	h.steps = append(h.steps, step)
	verb, driver, _ := strings.Cut(step, " ")
	switch verb {
	case "bind":
		h.bind(driver)
	case "unbind":
		h.bind("")
	case "driver_override":
		must.Succeed(h.t, os.Truncate(h.path(h.device("driver_override")), 0))
	}
}

func (h *host) Get(id function.ID) (function.Function, bool) {
	f := h.f
	f.Driver, _ = driverOf(sysfs.Dir(h.path("bus/pci/devices/" + address)))
	return f, id == vf
}

func (h *host) Netdev(id function.ID) (string, error) {
	if h.hidden {
		return "", errors.New("too many open files")
	}
	for _, pattern := range []string{"net/*", "virtio*/net/*"} {
		found, err := filepath.Glob(h.path(h.device(pattern)))
		must.Succeed(h.t, err)
		if id == vf && len(found) > 0 {
			return filepath.Base(found[0]), nil
		}
	}
	return "", nil
}

func (h *host) Snapshot(_ context.Context, d netdev.Device) (netdev.Snapshot, error) {
	return netdev.Snapshot{Name: d.Name}, nil
}

func (h *host) Restore(
	_ context.Context, d netdev.Device, before netdev.Snapshot, _ netdev.Place,
) (netdev.Restored, error) {
	h.restored = &before
	return netdev.Restored{Name: d.Name}, nil
}

func (h *host) drivers() *PCIDrivers {
	return &PCIDrivers{
		SysRoot: h.root, DevRoot: h.t.TempDir(), ProcRoot: h.path("proc"), BootID: "boot-1",
		Functions: h, Engine: h,
		Fault: func(f function.Function) string { return h.fault[f.ID] },
		Changes: func(context.Context) <-chan struct{} {
			return nil
		}, Trace: h.trace, Log: testr.New(h.t),
	}
}

func reservation() journal.Attachment {
	return journal.Attachment{
		Function: vf, PF: "0000:3b:00.0", VFIndex: 0, State: journal.Reserved,
		Setup: &journal.Setup{Driver: "vfio-pci"},
	}
}

func TestPlan(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*host)
		want   journal.Setup
	}{
		{"own driver", func(*host) {},
			journal.Setup{Own: "mlx5_core", Netdev: &netdev.Snapshot{Name: "eth5"}}},
		{"no driver", func(h *host) {
			h.bind("")
			must.Succeed(t, os.RemoveAll(h.path(h.device("net"))))
		}, journal.Setup{}},
		{"the driver already", func(h *host) {
			h.bind("vfio-pci")
		}, journal.Setup{Own: "vfio-pci"}},
		{"no IOMMU, and nobody minds", func(h *host) {
			must.Succeed(t, os.Remove(h.path(h.device("iommu_group"))))
			h.file("module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n")
		}, journal.Setup{Own: "mlx5_core", Netdev: &netdev.Snapshot{Name: "eth5"}}},
		{"a bridge in the IOMMU group", func(h *host) {
			h.link("bus/pci/drivers/pcieport", "kernel/iommu_groups/42/devices/0000:3a:00.0/driver")
		}, journal.Setup{Own: "mlx5_core", Netdev: &netdev.Snapshot{Name: "eth5"}}},
		{"what was left by an agent that was killed", func(h *host) {
			h.file(h.device("driver_override"), "vfio-pci\n")
		},
			journal.Setup{Own: "mlx5_core", Netdev: &netdev.Snapshot{Name: "eth5"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			test.change(h)
			got, err := h.drivers().Plan(t.Context(), reservation())
			must.Succeed(t, err)
			test.want.Driver, test.want.RDMA, test.want.BootID = "vfio-pci", true, "boot-1"
			test.want.RDMADevices = []string{"mlx5_2"}
			if diff := cmp.Diff(&test.want, got); diff != "" {
				t.Errorf("setup (-want +got):\n%s", diff)
			}
			if len(h.steps) > 0 {
				t.Errorf("it did %q", h.steps)
			}
		})
	}
}

// TestVariants checks that a variant of vfio-pci is bound where it is asked for by name, and that a
// Function that is bound to one keeps it for who asks for vfio-pci.
func TestVariants(t *testing.T) {
	const variant = "hisi_acc_vfio_pci"
	h := newHost(t)
	p := h.drivers()
	want := reservation()
	want.Setup.Driver = variant
	planned, err := p.Plan(t.Context(), want)
	must.Succeed(t, err)
	if planned.Driver != variant || planned.Own != "mlx5_core" {
		t.Errorf("setup %+v", planned)
	}

	must.Succeed(t, p.Bind(t.Context(), vf, variant))
	bound := []string{"driver_override " + variant, "unbind mlx5_core", "bind " + variant}
	if diff := cmp.Diff(bound, h.steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}

	planned, err = p.Plan(t.Context(), reservation())
	must.Succeed(t, err)
	if planned.Driver != variant || planned.Own != variant {
		t.Errorf("setup for vfio-pci of a Function with the variant: %+v", planned)
	}

	want.Setup, h.steps = planned, nil
	must.Succeed(t, p.Bind(t.Context(), vf, planned.Driver))
	must.Succeed(t, p.Restore(t.Context(), want))
	if len(h.steps) > 0 {
		t.Errorf("it did %q to a Function that keeps its driver", h.steps)
	}

	want.Setup = &journal.Setup{Driver: "hisi-acc-vfio-pci"}
	if _, err := p.Plan(t.Context(), want); err == nil ||
		!strings.Contains(err.Error(), "does not have that driver, but "+variant) {
		t.Errorf("error %v for the name of the module", err)
	}
}

func TestPlanRefuses(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*host)
		want   string
	}{
		{"no module", func(h *host) {
			must.Succeed(t, os.RemoveAll(h.path("bus/pci/drivers/vfio-pci")))
		}, "modprobe vfio-pci"},
		{"no IOMMU", func(h *host) {
			must.Succeed(t, os.Remove(h.path(h.device("iommu_group"))))
		}, "turn the IOMMU on"},
		{"shared IOMMU group", func(h *host) {
			h.link("bus/pci/drivers/other", "kernel/iommu_groups/42/devices/0000:3b:00.3/driver")
		}, "its IOMMU group 42 also has 0000:3b:00.3 (driver other)"},
		{"unknown driver in the IOMMU group", func(h *host) {
			h.file("kernel/iommu_groups/42/devices/0000:3b:00.3/driver", "")
		}, "driver of 0000:3b:00.3 in its IOMMU group 42"},
		{"PF with VFs", func(h *host) { h.f.NumVFs = 4 }, "it is a PF with 4 VFs"},
		{"PF with VFs that the inventory has not seen", func(h *host) {
			h.link("bus/pci/devices/0000:3b:00.4", h.device("virtfn0"))
		}, "it is a PF with 1 VFs"},
		{"VF in error", func(h *host) {
			h.fault = map[function.ID]string{vf: "its own"}
		}, "its card is in error: its own"},
		{"PF in error", func(h *host) {
			h.fault = map[function.ID]string{{Address: "0000:3b:00.0"}: "fw"}
		}, "its card is in error: fw"},
		{"default route", func(h *host) {
			h.f.DefaultRoute = true
		}, "the node's default route goes over its netdev"},
		{"somebody's override", func(h *host) {
			h.file(h.device("driver_override"), "mlx5_core\n")
		}, `driver_override is "mlx5_core"`},
		{"bond", func(h *host) {
			h.link("bond0", h.device("net/eth5/upper_bond0"))
		}, "netdev eth5 is in use on the host, by bond0"},
		{"bridge over virtio", func(h *host) {
			must.Succeed(t, os.RemoveAll(h.path(h.device("net"))))
			h.bind("virtio-pci")
			h.link("br0", h.device("virtio3/net/eth5/upper_br0"))
		}, "netdev eth5 is in use on the host, by br0"},
		{"what is on top of the netdev is unknown", func(h *host) {
			must.Succeed(t, os.RemoveAll(h.path(h.device("net/eth5"))))
			h.file(h.device("net/eth5"), "")
		}, "whether its netdev eth5 is in use"},
		{"whether there is a netdev is unknown", func(h *host) {
			must.Succeed(t, os.RemoveAll(h.path(h.device("net"))))
			h.file(h.device("net"), "")
		}, "whether it has a netdev"},
		{"netdev that the inventory does not find", func(h *host) {
			h.hidden = true
		}, "no netdev in the host's network namespace"},
		{"netdev of virtio is away", func(h *host) {
			must.Succeed(t, os.RemoveAll(h.path(h.device("net"))))
			h.bind("virtio-pci")
			must.Succeed(t, os.MkdirAll(h.path(h.device("virtio3/net")), 0o755))
		}, "in another network namespace"},
		{"netdev is away", func(h *host) {
			must.Succeed(t, os.RemoveAll(h.path(h.device("net/eth5"))))
		}, "in another network namespace"},
		{"gone", func(h *host) {
			must.Succeed(t, os.RemoveAll(h.path("bus/pci/devices/"+address)))
		}, "is gone from this node"},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			test.change(h)
			if _, err := h.drivers().Plan(t.Context(), reservation()); err == nil ||
				!strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

// TestBind checks that Bind continues wherever an earlier Bind was interrupted.
func TestBind(t *testing.T) {
	override, unbind, bind := "driver_override vfio-pci", "unbind mlx5_core", "bind vfio-pci"
	for _, test := range []struct {
		name   string
		change func(*host)
		steps  []string
	}{
		{"own driver", func(*host) {}, []string{override, unbind, bind}},
		{"no driver", func(h *host) { h.bind("") }, []string{override, bind}},
		{"done", func(h *host) { h.bind("vfio-pci") }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			test.change(h)
			must.Succeed(t, h.drivers().Bind(t.Context(), vf, "vfio-pci"))
			if diff := cmp.Diff(test.steps, h.steps); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			if got, _ := h.Get(vf); got.Driver != "vfio-pci" {
				t.Errorf("driver %q", got.Driver)
			}
		})
	}
}

// TestBindWithoutOverride checks that a device keeps its driver if the override cannot be set,
// because any driver could take the device then.
func TestBindWithoutOverride(t *testing.T) {
	h := newHost(t)
	file := h.path(h.device("driver_override"))
	must.Succeed(t, os.Remove(file))
	must.Succeed(t, os.Symlink(h.path("nowhere/at/all"), file))
	p := h.drivers()
	p.Trace = func(step string) { h.steps = append(h.steps, step) }
	if err := p.Bind(t.Context(), vf, "vfio-pci"); err == nil ||
		!strings.Contains(err.Error(), "driver_override") {
		t.Errorf("error %v, want one about the override", err)
	}
	if got, _ := h.Get(vf); got.Driver != "mlx5_core" || len(h.steps) != 1 {
		t.Errorf("driver %q after %q", got.Driver, h.steps)
	}
}

// TestBindWithoutTheModule checks the error if the driver's module is not loaded after a reboot
// while the pod still exists.
func TestBindWithoutTheModule(t *testing.T) {
	h := newHost(t)
	must.Succeed(t, os.RemoveAll(h.path("bus/pci/drivers/vfio-pci")))
	if err := h.drivers().Bind(t.Context(), vf, "vfio-pci"); err == nil ||
		!strings.Contains(err.Error(), "modprobe vfio-pci") {
		t.Errorf("error %v", err)
	}
	if len(h.steps) > 0 {
		t.Errorf("it did %q", h.steps)
	}
}

// TestBindUnknownToTheInventory checks that Bind waits until the inventory knows the IOMMU group of
// the Function.
func TestBindUnknownToTheInventory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		h.f.IOMMUGroup = ""
		err := h.drivers().Bind(t.Context(), vf, "vfio-pci")
		if err == nil ||
			!strings.Contains(err.Error(),
				"wait for driver vfio-pci and an IOMMU group: is not there after 10s") {
			t.Errorf("error %v", err)
		}
	})
}

// TestRestore checks that Restore continues wherever Bind or an earlier Restore was interrupted.
func TestRestore(t *testing.T) {
	override, unbind, bind, back := "driver_override ", "unbind vfio-pci", "bind mlx5_core", "restore netdev eth5"
	done := journal.Setup{
		Driver: "vfio-pci", Own: "mlx5_core", Netdev: &netdev.Snapshot{Name: "eth5"},
		BootID: "boot-1",
	}

	of := func(change func(*journal.Setup)) journal.Setup { o := done; change(&o); return o }
	for _, test := range []struct {
		name             string
		bound, overrides string
		setup            journal.Setup
		steps            []string
		driver           string
	}{
		{"all", "vfio-pci", "vfio-pci\n", done, []string{override, unbind, bind, back},
			"mlx5_core"},
		{"no override any more", "vfio-pci", "(null)\n", done, []string{unbind, bind, back},
			"mlx5_core"},
		{"no driver, with override", "", "vfio-pci\n", done, []string{override, bind, back},
			"mlx5_core"},
		{"no driver", "", "(null)\n", done, []string{bind, back}, "mlx5_core"},
		{"own driver, with override", "mlx5_core", "vfio-pci\n", done, []string{override, back},
			"mlx5_core"},
		{"own driver", "mlx5_core", "(null)\n", done, []string{back}, "mlx5_core"},
		{"somebody's driver", "other", "(null)\n", done, nil, "other"},
		{"nothing was done", "vfio-pci", "(null)\n", of(func(o *journal.Setup) {
			o.Own, o.Netdev = "vfio-pci", nil
		}), nil, "vfio-pci"},
		{"had no driver", "vfio-pci", "vfio-pci\n", of(func(o *journal.Setup) {
			o.Own, o.Netdev = "", nil
		}), []string{override, unbind}, ""},
		{"had no netdev", "vfio-pci", "vfio-pci\n", of(func(o *journal.Setup) {
			o.Netdev = nil
		}), []string{override, unbind, bind}, "mlx5_core"},
		{"after a boot", "mlx5_core", "(null)\n", of(func(o *journal.Setup) {
			o.BootID = "boot-0"
		}), nil, "mlx5_core"},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			h.bind(test.bound)
			h.file(h.device("driver_override"), test.overrides)
			a := reservation()
			a.Setup = &test.setup
			must.Succeed(t, h.drivers().Restore(t.Context(), a))
			if diff := cmp.Diff(test.steps, h.steps); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			if got, _ := h.Get(vf); got.Driver != test.driver {
				t.Errorf("driver %q, want %q", got.Driver, test.driver)
			}
			if restored := slices.Contains(test.steps, back); restored != (h.restored != nil) {
				t.Errorf("netdev restored: %+v", h.restored)
			}
		})
	}
}

// TestRestoreWhileInUse checks that the kernel is not asked to unbind a device that a program has
// open, because only the program could end the wait.
func TestRestoreWhileInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		h.bind("vfio-pci")
		h.file(h.device("enable"), "1\n")
		a := reservation()
		a.Setup.Own = "mlx5_core"
		p := h.drivers()
		if err := p.Restore(t.Context(), a); err == nil ||
			!strings.Contains(err.Error(), "IOMMU group 42: is still in use") {
			t.Errorf("error %v", err)
		}
		if len(h.steps) > 0 {
			t.Errorf("it did %q", h.steps)
		}

		time.AfterFunc(time.Second, func() { h.file(h.device("enable"), "0\n") })
		must.Succeed(t, p.Restore(t.Context(), a))
	})
}

// TestRestoreWhileUseIsUnknown checks that no driver is unbound while the kernel does not say whether
// a program uses the device, because such an unbind may never end.
func TestRestoreWhileUseIsUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		h.bind("vfio-pci")
		must.Succeed(t, os.Mkdir(h.path(h.device("enable")), 0o755)) // cannot be read
		a := reservation()
		a.Setup.Own = "mlx5_core"
		if err := h.drivers().Restore(t.Context(), a); err == nil || len(h.steps) > 0 {
			t.Errorf("error %v, it did %q", err, h.steps)
		}
	})
}

func TestRestoreOfWhatIsGone(t *testing.T) {
	h := newHost(t)
	must.Succeed(t, os.RemoveAll(h.path("bus/pci/devices/"+address)))
	a := reservation()
	a.Setup.Own = "mlx5_core"
	// The kernel shows no device at all, so none is known to be gone.
	if err := h.drivers().Restore(t.Context(), a); err == nil {
		t.Error("nothing to restore on a node that shows no devices")
	}

	must.Succeed(t, os.MkdirAll(h.path("bus/pci/devices/0000:00:00.0"), 0o755))
	must.Succeed(t, h.drivers().Restore(t.Context(), a))
}

func TestRestoreWithoutTheModule(t *testing.T) {
	h := newHost(t)
	h.bind("vfio-pci")
	must.Succeed(t, os.RemoveAll(h.path("bus/pci/drivers/mlx5_core")))
	a := reservation()
	a.Setup.Own = "mlx5_core"
	if err := h.drivers().Restore(t.Context(), a); err == nil ||
		!strings.Contains(err.Error(), "load its module again") {
		t.Errorf("error %v", err)
	}
}

// TestBlockedWrite checks that an order that the kernel has not carried out yet is waited for and
// not given twice. A pipe without a reader stands for the kernel.
func TestBlockedWrite(t *testing.T) {
	h := newHost(t)
	pipe := h.path(h.device("blocks"))
	must.Succeed(t, unix.Mkfifo(pipe, 0o600))
	h.file("proc/4711/comm", "testpmd\n")
	must.Succeed(t, os.MkdirAll(h.path("proc/4711/fd"), 0o755))
	must.Succeed(t, os.Symlink("/host/dev/vfio/42", h.path("proc/4711/fd/7")))
	p := h.drivers()
	dir := sysfs.Dir(filepath.Dir(pipe))
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		err := p.write(ctx, p.device(vf), "unbind vfio-pci", dir, "blocks", "once")
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) ||
			!strings.Contains(err.Error(),
				"IOMMU group 42 is open in process 4711 (testpmd), which must end first") {
			t.Errorf("error %v", err)
		}
	}

	// This call must join the pending order, before it is carried out, instead of giving a new one.
	given := p.orders.DoChan(pipe+" once", nil)
	content, err := os.ReadFile(pipe)
	must.Succeed(t, err)
	if got := string(content); got != "once" {
		t.Errorf("the kernel was told %q", got)
	}

	must.Succeed(t, (<-given).Err)
}

// TestProgramsOfIOMMUFD checks that an error names a program that has the device's own node open,
// although the kernel removes that node before it waits for the program.
func TestProgramsOfIOMMUFD(t *testing.T) {
	h := newHost(t)
	pipe := h.path(h.device("blocks"))
	must.Succeed(t, unix.Mkfifo(pipe, 0o600))
	h.file(h.device("vfio-dev/vfio7/dev"), "")
	for pid, target := range map[string]string{
		"4711": "/dev/vfio/devices/vfio7", "4712": "/host/dev/vfio/devices/vfio7 (deleted)",
		"4713": "/dev/vfio/devices/vfio70", "4714": "/dev/iommu",
	} {
		h.file("proc/"+pid+"/comm", "qemu\n")
		must.Succeed(t, os.MkdirAll(h.path("proc/"+pid+"/fd"), 0o755))
		must.Succeed(t, os.Symlink(target, h.path("proc/"+pid+"/fd/7")))
	}

	p := h.drivers()
	p.Trace = func(string) { must.Succeed(t, os.RemoveAll(h.path(h.device("vfio-dev")))) }
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := p.write(ctx, p.device(vf), "unbind vfio-pci", sysfs.Dir(filepath.Dir(pipe)), "blocks",
		"once")
	const want = "IOMMU group 42 is open in process 4711 (qemu), process 4712 (qemu), which must end"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want one with %q", err, want)
	}
	_, err = os.ReadFile(pipe) // ends the order
	must.Succeed(t, err)
}

func TestBare(t *testing.T) {
	h := newHost(t)
	h.bind("vfio-pci")
	h.f.RDMA = false
	a := reservation()
	a.Setup.Own, a.Setup.RDMA, a.Setup.RDMADevices = "mlx5_core", true, []string{"mlx5_2"}
	b := OwnDrivers{Functions: snapshots{h}, Journal: records{a}}
	if got := b.Snapshot()[0]; got.Driver != "mlx5_core" || !got.RDMA ||
		len(got.RDMADevices) != 1 {
		t.Errorf("pools see driver %q, RDMA %v %q", got.Driver, got.RDMA, got.RDMADevices)
	}
	if got, _ := b.Get(vf); got.Driver != "vfio-pci" {
		t.Errorf("the Function itself has driver %q", got.Driver)
	}

	b.Journal = records{}
	if got := b.Snapshot()[0]; got.Driver != "vfio-pci" {
		t.Errorf("without an owner, pools see driver %q", got.Driver)
	}
}

// TestAltNamesOfAPFThatAPodHas checks that selectors see the altnames that a PF had before a pod got
// it, because the pod can give it others, which it keeps until it is restored.
func TestAltNamesOfAPFThatAPodHas(t *testing.T) {
	const pf = "0000:3b:00.0"
	const own, pods = "rail0", "rail1"
	before := &netdev.Snapshot{Name: "ens3f0", AltNames: []string{own}}
	record := func(change func(*journal.Attachment)) records {
		a := journal.Attachment{Function: function.ID{Address: pf}, PF: pf}
		change(&a)
		return records{a}
	}

	for _, test := range []struct {
		name    string
		records records
		want    string
	}{
		{"free", nil, pods},
		{"attached", record(func(a *journal.Attachment) { a.Before = before }), own},
		{"bound for a pod", record(func(a *journal.Attachment) {
			a.Setup = &journal.Setup{Driver: "vfio-pci", Own: "ice", Netdev: before}
		}), own},
		{"bound for a pod, and attached without a netdev", record(func(a *journal.Attachment) {
			a.Setup = &journal.Setup{Driver: "vfio-pci", Own: "ice", Netdev: before}
			a.Before = &netdev.Snapshot{}
		}), own},
		{"only reserved", record(func(*journal.Attachment) {}), pods},
		{"a VF", record(func(a *journal.Attachment) {
			a.Function.Address, a.Before = "0000:3b:00.2", before
		}), pods},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			h.f.PF, h.f.PFAltNames = pf, []string{pods}
			got := OwnDrivers{Functions: snapshots{h}, Journal: test.records}.Snapshot()[0]
			if !slices.Equal(got.PFAltNames, []string{test.want}) {
				t.Errorf("altnames %q, want %q", got.PFAltNames, test.want)
			}
		})
	}
}

type snapshots struct{ *host }

func (s snapshots) Snapshot() []function.Function {
	f, _ := s.Get(vf)
	return []function.Function{f}
}

type records []journal.Attachment

func (r records) All() []journal.Attachment { return r }
