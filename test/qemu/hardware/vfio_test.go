// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	nodecdi "github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// claims has the parts of an agent that serve claims, on the machine's own Functions.
type claims struct {
	t         *testing.T
	dir       string
	spec      v1alpha1.DevicePoolSpec
	inventory *inventory.Inventory
	engine    *netdev.Engine
	drivers   *setup.PCIDrivers
	journal   *journal.Journal
	lifecycle *lifecycle.Manager
	driver    *dra.Driver
	close     func()
}

// newClaims starts an agent that has its journal and its CDI files in dir, until close is called or
// the test ends. It calls trace before every change.
func newClaims(
	t *testing.T, dir string, spec v1alpha1.DevicePoolSpec, trace func(step string),
) *claims {
	t.Helper()
	return newClaimsOf(t, "boot-1", dir, spec, trace)
}

// newClaimsOf does the same as newClaims, in the boot with this ID.
func newClaimsOf(
	t *testing.T, bootID, dir string, spec v1alpha1.DevicePoolSpec, trace func(step string),
) *claims {
	t.Helper()
	log := testr.New(t)
	spec.Allow = v1alpha1.PrivilegedFields()
	c := &claims{t: t, dir: dir, spec: spec}
	var err error
	c.journal, err = journal.Open(filepath.Join(dir, "journal.db"))
	must.Succeed(t, err)
	c.engine, err = netdev.New(netdev.Options{Trace: trace})
	must.Succeed(t, err)
	var changed notify.Signal
	c.inventory = inventory.New(inventory.Options{
		SysRoot: "/sys", Changed: changed.Notify, Log: log,
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.inventory.Run(ctx) }()
	open := true
	c.close = func() {
		if open {
			open = false
			cancel()
			must.Succeed(t, errors.Join(<-ended, c.engine.Close(), c.journal.Close()))
		}
	}

	t.Cleanup(c.close)
	c.inventory.Synced(ctx)

	c.drivers = &setup.PCIDrivers{
		SysRoot: "/sys", DevRoot: "/dev", ProcRoot: "/proc", BootID: bootID, Functions: c.inventory,
		Changes: changed.Subscribe, Engine: c.engine, Trace: trace, Log: log,
	}

	setups := &setup.Runner{Drivers: c.drivers}
	c.lifecycle = lifecycle.New(c.journal, c.engine, c.inventory,
		lifecycle.Options{BootID: bootID, Setup: setups}, log)
	files, err := nodecdi.Open(filepath.Join(dir, "cdi"))
	must.Succeed(t, err)

	c.driver = &dra.Driver{
		Function: c.inventory.Get, DevicePool: c.DevicePool, WaitForPort: c.Wait,
		Journal: c.journal, Lifecycle: c.lifecycle,
		CDI: &dra.CDIFiles{
			Dir: files, Journal: c.journal, Function: c.inventory.Get, DevicePool: c.DevicePool,
			DeviceNodes: &devnode.Finder{SysRoot: "/sys", DevRoot: "/dev"}, Log: log,
		},
		RuntimeConnected: func(context.Context) error { return nil },
		PodTerminating:   func(context.Context, journal.Pod) (bool, error) { return false, nil },
		Metrics:          dra.NewMetrics(prometheus.NewRegistry()), Log: log,
		ProvisionTimeout: patience,
	}

	return c
}

// DevicePool returns the pool of all claims.
func (c *claims) DevicePool(string) (v1alpha1.DevicePoolSpec, bool) { return c.spec, true }

// Wait returns a Port at once, as if it were served.
func (c *claims) Wait(
	context.Context, *resourceapi.ResourceClaim, function.ID,
) (*v1alpha1.XPUPort, error) {
	return &v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{
		MAC: "02:00:00:00:00:88", MTU: 1500, Addresses: []string{"192.0.2.88/24"},
	}}, nil
}

// claimOf returns a claim to a VF with these parameters.
func claimOf(pf, vf pci.Address, parameters string) *resourceapi.ResourceClaim {
	pool := "guest/" + pf.DeviceName() + "/fast"
	return claimtest.Allocated("net", claimtest.Result("fast", pool, vf.DeviceName()),
		claimtest.FromClaim(parameters), claimtest.ReservedFor("pod1"))
}

func (c *claims) prepare(object *resourceapi.ResourceClaim) (kubeletplugin.PrepareResult, error) {
	results, err := c.driver.PrepareResourceClaims(context.Background(),
		[]*resourceapi.ResourceClaim{object})
	return results[object.UID], errors.Join(err, results[object.UID].Err)
}

func (c *claims) unprepare(ctx context.Context, object *resourceapi.ResourceClaim) error {
	named := kubeletplugin.NamespacedObject{UID: object.UID}
	named.Namespace, named.Name = object.Namespace, object.Name
	results, err := c.driver.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{named})
	return errors.Join(err, results[object.UID])
}

func (c *claims) attach(
	object *resourceapi.ResourceClaim, vf pci.Address, pod *netns.Namespace,
) (netdev.Observed, error) {
	return c.lifecycle.Attach(context.Background(), function.ID{Address: vf}, lifecycle.Sandbox{
		ID: "sandbox1", NetNS: pod.Path(),
		Pod: journal.Pod{
			Namespace: object.Namespace, Name: "pod1", UID: object.Status.ReservedFor[0].UID,
		},
	})
}

// container returns what a runtime makes of the claim's CDI devices.
func (c *claims) container(devices ...string) ocispec.Spec {
	c.t.Helper()
	c.offer()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(filepath.Join(c.dir, "cdi")),
		cdi.WithAutoRefresh(false))
	must.Succeed(c.t, err)
	var container ocispec.Spec
	if unresolved, err := cache.InjectDevices(&container, devices...); err != nil {
		c.t.Fatalf("unresolved %q: %v", unresolved, err)
	}

	return container
}

// offer writes the CDI files of the reserved Functions, as they are after the attachment.
func (c *claims) offer() {
	c.t.Helper()
	for _, reserved := range c.journal.All() {
		if reserved.State != journal.Reserved {
			continue
		}

		attached := reserved
		attached.State, attached.Before, attached.Observed = journal.Attached, &netdev.Snapshot{}, &netdev.Observed{}
		attached.Place.NetNS = "/run/netns/pod" // where a pod would be
		must.Succeed(c.t, c.journal.Put(attached))
		must.Succeed(c.t, c.driver.CDI.Expose(attached))
		must.Succeed(c.t, c.journal.Put(reserved))
	}
}

func nodePaths(container ocispec.Spec) []string {
	var paths []string
	if container.Linux != nil {
		for _, d := range container.Linux.Devices {
			paths = append(paths, d.Path)
		}
	}
	return paths
}

// worn sets a VF up as an administrator does, until the test ends. All these settings are lost when
// its driver is unbound.
func worn(
	t *testing.T, c *claims, pf pci.Address, index int,
) (vf pci.Address, device netdev.Device, before netdev.Snapshot) {
	t.Helper()
	vf = card.VF(t, pf, index)
	l, name := linkOf(t, card.Netdev(vf)), card.Netdev(vf)
	t.Cleanup(func() {
		l := linkOf(t, card.Netdev(vf))
		must.Succeed(t, errors.Join(
			netlink.LinkSetVfVlan(linkOf(t, card.Netdev(pf)), index, 0), netlink.LinkSetDown(l),
			netlink.LinkSetName(l, name),
			netlink.LinkSetMTU(l, 1500), netlink.LinkSetAlias(l, ""),
		))
	})

	must.Succeed(t, netlink.LinkSetVfVlan(linkOf(t, card.Netdev(pf)), index, 7))
	must.Succeed(t, netlink.LinkSetName(l, "worn0"))
	must.Succeed(t, netlink.LinkSetMTU(l, 1400))
	must.Succeed(t, netlink.LinkSetAlias(l, "the administrator's"))
	must.Succeed(t, netlink.LinkSetUp(l))
	device = netdev.Device{
		Name: "worn0", PF: &netdev.PF{Name: card.Netdev(pf), Address: string(pf), VF: index},
	}
	before, err := c.engine.Snapshot(t.Context(), device)
	must.Succeed(t, err)

	return vf, device, before
}

func wantRestored(t *testing.T, c *claims, device netdev.Device, before netdev.Snapshot) {
	t.Helper()
	now, err := c.engine.Snapshot(t.Context(), device)
	must.Succeed(t, err)
	if left := netdev.Diff(before, now); len(left) > 0 {
		t.Errorf("the VF is not what it was: %q", left)
	}
	if records := c.journal.All(); len(records) > 0 {
		t.Errorf("the journal still has %+v", records)
	}
}

const vfioParameters = `"driver": "vfio-pci", "network": "lab", "vf": {"vlan": 100, "qos": 3}`

// TestVFIO checks that a claim that asks for vfio-pci gets the VF's IOMMU group, and that the VF is
// as before afterwards.
func TestVFIO(t *testing.T) {
	card.InGuest(t, "igb")
	pf := card.PFs(t)[0]
	c := newClaims(t, t.TempDir(), v1alpha1.DevicePoolSpec{}, func(string) {})
	vf, device, before := worn(t, c, pf, 0)
	group := card.Link(vf, "iommu_group")
	object := claimOf(pf, vf, vfioParameters)

	t.Run("claim gives the container the group", func(t *testing.T) {
		prepared, err := c.prepare(object)
		must.Succeed(t, err)
		if got := card.Link(vf, "driver"); got != "vfio-pci" {
			t.Errorf("the driver is %q", got)
		}

		metadata := prepared.Devices[0].Metadata.NetworkData
		if metadata.HardwareAddress != "02:00:00:00:00:88" || len(metadata.IPs) != 1 ||
			metadata.IPs[0] != "192.0.2.88/24" {
			t.Errorf("the pod is told %+v", metadata)
		}

		container := c.container(prepared.Devices[0].CDIDeviceIDs...)
		if diff := cmp.Diff([]string{"/dev/vfio/vfio", "/dev/vfio/" + group},
			nodePaths(container)); diff != "" {
			t.Errorf("device nodes (-want +got):\n%s", diff)
		}

		wantEnv := []string{"XPU_FUNCTION_FAST=" + string(vf), "XPU_INTERFACE_FAST=net1",
			"XPU_VFIO_FAST=/dev/vfio/" + group}
		if diff := cmp.Diff(wantEnv, container.Process.Env); diff != "" {
			t.Errorf("environment (-want +got):\n%s", diff)
		}
	})

	t.Run("the PF enforces what the pod asked for", func(t *testing.T) {
		observed, err := c.attach(object, vf, netns.New(t))
		must.Succeed(t, err)
		if observed.MAC != "02:00:00:00:00:88" || len(observed.Addresses) != 1 ||
			observed.Addresses[0].String() != "192.0.2.88/24" {
			t.Errorf("observed %+v", observed)
		}

		routes, err := netlink.NewHandle(unix.NETLINK_ROUTE) // only a new handle asks for VFs
		must.Succeed(t, err)
		defer routes.Close()

		l, err := routes.LinkByName(device.PF.Name)
		must.Succeed(t, err)
		info := l.Attrs().Vfs[0]
		if info.Vlan != 100 || info.Qos != 3 || info.Mac.String() != "02:00:00:00:00:88" {
			t.Errorf("the PF has %+v", info)
		}
		if differences, err := c.lifecycle.Check(t.Context(), function.ID{Address: vf},
			nil); err != nil || len(differences) > 0 {
			t.Errorf("check: %q, %v", differences, err)
		}
	})

	t.Run("pod still has the device while it is released", func(t *testing.T) {
		program := openVFIO(t, group, vf)
		// without and with access to device nodes
		for _, devRoot := range []string{t.TempDir(), "/dev"} {
			c.drivers.DevRoot = devRoot
			begin := time.Now()
			err := c.unprepare(t.Context(), object)
			wantMessage(t, err, "IOMMU group "+group+" is open in process", fmt.Sprint(os.Getpid()),
				"hardware.test")
			if took := time.Since(begin); took > 5*time.Second {
				t.Errorf("that took %s", took)
			}
		}

		if got := card.Link(vf, "driver"); got != "vfio-pci" {
			t.Errorf("the driver is %q", got)
		}

		program.close()
	})

	t.Run("release makes the VF what it was", func(t *testing.T) {
		begin := time.Now()
		must.Succeed(t, c.unprepare(t.Context(), object))
		t.Logf("released after %s", time.Since(begin).Round(time.Millisecond))
		wantRestored(t, c, device, before)
		if got := card.Attribute(t, vf, "driver_override"); got != "(null)" {
			t.Errorf("driver_override is %q", got)
		}
		if _, err := os.Stat("/dev/vfio/" + group); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("/dev/vfio/%s: %v", group, err)
		}
	})

	t.Run("unbinding that the kernel blocks is waited for in the background", func(t *testing.T) {
		_, err := c.prepare(object)
		must.Succeed(t, err)
		var program *vfioProgram
		c.drivers.Trace = func(step string) {
			if step == "unbind vfio-pci" && program == nil {
				program = openVFIO(t, group, vf) // after the check that the device is free
			}
		}

		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			wantMessage(t, c.unprepare(ctx, object), "IOMMU group "+group+" is open in process",
				"hardware.test")
			cancel()
		}

		program.close()
		must.Succeed(t, c.unprepare(t.Context(), object))
		wantRestored(t, c, device, before)
	})

	t.Run("pool asks for it", func(t *testing.T) {
		c.spec.Driver = v1alpha1.DriverVFIO
		_, err := c.prepare(claimOf(pf, vf, `"network": "lab", "mtu": 1400`))
		wantMessage(t, err, "mtu 1400: must be absent")
		prepared, err := c.prepare(claimOf(pf, vf, `"network": "lab"`))
		must.Succeed(t, err)
		if paths := nodePaths(c.container(prepared.Devices[0].CDIDeviceIDs...)); len(paths) != 2 {
			t.Errorf("device nodes %q", paths)
		}

		bare := setup.OwnDrivers{Functions: c.inventory, Journal: c.journal}
		for _, f := range bare.Snapshot() {
			if f.Kind == function.VF && f.Driver != "igbvf" {
				t.Errorf("pools see driver %q of %s", f.Driver, f.ID)
			}
		}

		must.Succeed(t, c.unprepare(t.Context(), object))
		c.spec.Driver = ""
		wantRestored(t, c, device, before)
	})

	t.Run("variant of vfio-pci is asked for by name", func(t *testing.T) {
		const variant = "sim_vfio_pci"
		object := claimOf(pf, vf, `"driver": "`+variant+`", "network": "lab"`)
		prepared, err := c.prepare(object)
		must.Succeed(t, err)
		if got := card.Link(vf, "driver"); got != variant {
			t.Errorf("the driver is %q", got)
		}
		if f, _ := c.inventory.Get(function.ID{Address: vf}); f.Passthrough != function.VFIO {
			t.Errorf("the inventory has %+v", f)
		}

		paths := nodePaths(c.container(prepared.Devices[0].CDIDeviceIDs...))
		if diff := cmp.Diff([]string{"/dev/vfio/vfio", "/dev/vfio/" + group}, paths); diff != "" {
			t.Errorf("device nodes (-want +got):\n%s", diff)
		}

		program := openVFIO(t, group, vf)
		wantMessage(t, c.unprepare(t.Context(), object), "IOMMU group "+group+" is open in process")
		program.close()
		must.Succeed(t, c.unprepare(t.Context(), object))
		wantRestored(t, c, device, before)
	})

	t.Run("VF that has a variant keeps it for who wants vfio-pci", func(t *testing.T) {
		const variant = "sim_vfio_pci"
		card.SetAttribute(t, vf, "driver_override", variant)
		card.Set(t, "/sys/bus/pci/drivers/igbvf/unbind", string(vf))
		card.Set(t, "/sys/bus/pci/drivers/"+variant+"/bind", string(vf))
		for range 2 {
			_, err := c.prepare(object)
			must.Succeed(t, err)
			if got := card.Link(vf, "driver"); got != variant {
				t.Errorf("the driver is %q", got)
			}
		}

		must.Succeed(t, c.unprepare(t.Context(), object))
		if got := card.Link(vf, "driver"); got != variant {
			t.Errorf("the driver is %q after the release", got)
		}

		card.Set(t, "/sys/bus/pci/drivers/"+variant+"/unbind", string(vf))
		card.SetAttribute(t, vf, "driver_override", "\n")
		card.Set(t, "/sys/bus/pci/drivers/igbvf/bind", string(vf))
	})

	t.Run("VF without a driver gets none back", func(t *testing.T) {
		card.Set(t, "/sys/bus/pci/drivers/igbvf/unbind", string(vf))
		_, err := c.prepare(object)
		must.Succeed(t, err)
		must.Succeed(t, c.unprepare(t.Context(), object))
		if got := card.Link(vf, "driver"); got != "" {
			t.Errorf("the driver is %q", got)
		}
		card.Set(t, "/sys/bus/pci/drivers/igbvf/bind", string(vf))
	})
}

// TestVFIORefused checks that a VF that must not lose its driver keeps it, without partial changes.
func TestVFIORefused(t *testing.T) {
	card.InGuest(t, "igb")
	pf := card.PFs(t)[0]
	c := newClaims(t, t.TempDir(), v1alpha1.DevicePoolSpec{}, func(string) {})
	vf := card.VF(t, pf, 1)
	name := card.Netdev(vf)

	refused := func(t *testing.T, texts ...string) {
		t.Helper()
		_, err := c.prepare(claimOf(pf, vf, vfioParameters))
		wantMessage(t, err, texts...)
		if got := card.Link(vf, "driver"); got != "igbvf" || len(c.journal.All()) > 0 {
			t.Errorf("the driver is %q, the journal has %+v", got, c.journal.All())
		}
	}

	t.Run("netdev is a bridge's port", func(t *testing.T) {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br-vfio"}}
		must.Succeed(t, netlink.LinkAdd(bridge))
		must.Succeed(t, netlink.LinkSetMaster(linkOf(t, name), bridge))
		refused(t, name, "in use on the host, by br-vfio")
		must.Succeed(t, netlink.LinkDel(bridge))
	})

	t.Run("netdev has a VLAN", func(t *testing.T) {
		vlan := &netlink.Vlan{
			LinkAttrs: netlink.LinkAttrs{
				Name: "vlan-vfio", ParentIndex: linkOf(t, name).Attrs().Index,
			}, VlanId: 5,
		}
		must.Succeed(t, netlink.LinkAdd(vlan))
		refused(t, "in use on the host, by vlan-vfio")
		must.Succeed(t, netlink.LinkDel(vlan))
	})

	t.Run("netdev is in another namespace", func(t *testing.T) {
		pod := netns.New(t)
		must.Succeed(t, netlink.LinkSetNsFd(linkOf(t, name), pod.Fd()))
		refused(t, "its netdev is in another network namespace")
		toHost(t, pod, name)
	})

	t.Run("driver_override is somebody else's", func(t *testing.T) {
		card.SetAttribute(t, vf, "driver_override", "igbvf")
		refused(t, `driver_override is "igbvf"`)
		card.SetAttribute(t, vf, "driver_override", "\n")
	})

	t.Run("PF has VFs", func(t *testing.T) {
		_, err := c.prepare(claimOf(pf, pf, vfioParameters))
		wantMessage(t, err, "it is a PF with", "VFs, which would be lost")
	})
}

// TestVFIOKilled checks that the next agent continues after an agent's end before any of its steps.
func TestVFIOKilled(t *testing.T) {
	card.InGuest(t, "igb")
	pf := card.PFs(t)[0]
	dir := t.TempDir()
	c := newClaims(t, dir, v1alpha1.DevicePoolSpec{}, func(string) {})
	vf, device, before := worn(t, c, pf, 2)
	c.close()
	object := claimOf(pf, vf, vfioParameters)
	for n := 1; ; n++ {
		pod := netns.New(t)
		died := ""
		steps := 0
		c := newClaims(t, dir, v1alpha1.DevicePoolSpec{}, func(step string) {
			if steps++; steps == n {
				died = step
				// nothing is undone; open files are closed, as the kernel does
				runtime.Goexit()
			}
		})

		ended := make(chan error, 1)
		go func() {
			err := errors.New("died")
			defer func() { ended <- err }()

			prepared := func() error { _, err := c.prepare(object); return err }
			attached := func() error { _, err := c.attach(object, vf, pod); return err }
			unprepared := func() error { return c.unprepare(context.Background(), object) }
			for _, do := range []func() error{prepared, attached, unprepared} {
				if err := do(); err != nil && died == "" {
					t.Error(err)
				}
				if died != "" {
					return
				}
			}

			err = nil
		}()

		err := <-ended
		c.close()
		next := newClaims(t, dir, v1alpha1.DevicePoolSpec{}, func(string) {})
		if died == "" {
			must.Succeed(t, err)
			wantRestored(t, next, device, before)
			if n <= 12 {
				t.Errorf("only %d steps", n-1)
			}
			return
		}

		if what, _, isMAC := strings.Cut(died, " MAC "); isMAC {
			died = what + " MAC" // which differs each time
		}

		t.Run(fmt.Sprintf("%02d before %s", n, died), func(t *testing.T) {
			must.Succeed(t, next.lifecycle.Recover(t.Context()))
			if a, ok := next.journal.Get(function.ID{Address: vf}); ok &&
				a.State == journal.Reserved {
				_, err := next.prepare(object)
				must.Succeed(t, err)
				if got := card.Link(vf, "driver"); got != "vfio-pci" {
					t.Errorf("prepared again: the driver is %q", got)
				}
			}

			must.Succeed(t, next.unprepare(t.Context(), object))
			wantRestored(t, next, device, before)
		})

		next.close()
	}
}

// TestVFIOAfterBoot checks that, after a boot has given a VF its own driver, the agent that starts
// binds the driver that the VF's owner still wants.
func TestVFIOAfterBoot(t *testing.T) {
	card.InGuest(t, "igb")
	pf := card.PFs(t)[0]
	dir := t.TempDir()
	before := newClaims(t, dir, v1alpha1.DevicePoolSpec{}, func(string) {})
	vf := card.VF(t, pf, 0)
	object := claimOf(pf, vf, vfioParameters)
	_, err := before.prepare(object)
	must.Succeed(t, err)
	before.close()
	card.SetAttribute(t, vf, "driver_override", "\n")
	card.Set(t, "/sys/bus/pci/drivers/vfio-pci/unbind", string(vf))
	card.Set(t, "/sys/bus/pci/drivers_probe", string(vf))
	if got := card.Link(vf, "driver"); got != "igbvf" {
		t.Fatalf("after the boot the driver is %q", got)
	}

	c := newClaimsOf(t, "boot-2", dir, v1alpha1.DevicePoolSpec{}, func(string) {})
	must.Succeed(t, c.lifecycle.Recover(t.Context()))
	must.Succeed(t, c.lifecycle.SetUp(t.Context()))
	if got := card.Link(vf, "driver"); got != "vfio-pci" {
		t.Errorf("for its owner the driver is %q", got)
	}

	_, err = c.attach(object, vf, netns.New(t))
	must.Succeed(t, err)
	must.Succeed(t, c.unprepare(t.Context(), object))

	if got := card.Link(vf, "driver"); got != "igbvf" || card.Netdev(vf) == "" ||
		len(c.journal.All()) > 0 {
		t.Errorf("released: driver %q, netdev %q, journal %+v", got, card.Netdev(vf),
			c.journal.All())
	}
}

func wantMessage(t *testing.T, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v, want one with %q", err, text)
		}
	}
}

// vfioProgram has the files that a program opens to use a PCI device by vfio.
type vfioProgram []int

// openVFIO opens the files as such a program does (linux/Documentation/driver-api/vfio.rst). The
// numbers come from linux/vfio.h.
func openVFIO(t *testing.T, group string, device pci.Address) *vfioProgram {
	t.Helper()
	const (
		setIOMMU, getDevice, setContainer = ';'<<8 | 102, ';'<<8 | 106, ';'<<8 | 104
		type1v2                           = 3
	)

	// The guest's IOMMU does not isolate interrupts.
	card.Set(t, "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "Y")
	p := &vfioProgram{}
	t.Cleanup(p.close)

	open := func(file string) int {
		fd, err := unix.Open(file, unix.O_RDWR|unix.O_CLOEXEC, 0)
		must.Succeed(t, err)
		*p = append(*p, fd)
		return fd
	}

	container, own := open("/dev/vfio/vfio"), open("/dev/vfio/"+group)
	must.Succeed(t, unix.IoctlSetPointerInt(own, setContainer, container))
	must.Succeed(t, unix.IoctlSetInt(container, setIOMMU, type1v2))
	name, err := unix.BytePtrFromString(string(device))
	must.Succeed(t, err)
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(own), getDevice,
		uintptr(unsafe.Pointer(name)))
	if errno != 0 {
		t.Fatalf("VFIO_GROUP_GET_DEVICE_FD: %v", errno)
	}

	*p = append(*p, int(fd))
	return p
}

func (p *vfioProgram) close() {
	for _, fd := range *p {
		_ = unix.Close(fd)
	}
	*p = nil
}
