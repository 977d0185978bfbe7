// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

const demandMAC = function.MAC("02:00:00:00:00:05")

// demand has the parts of an agent that make SFs on demand, on the machine's own cards.
type demand struct {
	t         *testing.T
	spec      v1alpha1.DevicePoolSpec
	devlink   *devlink.Conn
	inv       *inventory.Inventory
	journal   *journal.Journal
	tracker   *pool.Tracker
	changed   notify.Signal // notified by inventory and eswitches
	outputs   notify.Signal // notified by pools
	lifecycle *lifecycle.Manager
	close     func()

	mutex     sync.Mutex
	published []resourceslice.DriverResources
}

// newDemand starts an agent that has its journal in dir, until close is called or the test ends. It
// calls trace before every change of the Function or the journal.
func newDemand(
	t *testing.T, dir string, spec v1alpha1.DevicePoolSpec, trace func(step string),
) *demand {
	t.Helper()
	log := testr.New(t)
	d := &demand{t: t, spec: spec}
	var err error
	d.journal, err = journal.Open(filepath.Join(dir, "journal.db"))
	must.Succeed(t, err)
	engine, err := netdev.New(netdev.Options{Trace: trace})
	must.Succeed(t, err)
	d.devlink, err = devlink.Dial("")
	must.Succeed(t, err)
	d.inv = inventory.New(inventory.Options{SysRoot: "/sys", Changed: d.changed.Notify, Log: log})
	sfs := &sriov.SFMaker{
		Devlink: tracedDevlink{d.devlink, trace}, Functions: d.inv, Changes: d.changed.Subscribe,
		Changed: d.changed.Notify,
		Log:     log,
	}

	d.tracker = pool.NewTracker(d.inv, d, sfs.NoSFs, log)
	setups := &setup.Runner{SFs: sfs}
	records := tracedJournal{d.journal, trace}
	d.lifecycle = lifecycle.New(records, engine, d.inv,
		lifecycle.Options{BootID: "boot-1", Setup: setups}, log)
	publisher := &dra.Publisher{
		Node: "guest", Pools: d.tracker.Pools, Health: &health.Checker{},
		Publish:  d.PublishResources,
		Features: func() (devicemodel.Features, bool) { return devicemodel.AllFeatures(), true },
		Metrics:  dra.NewMetrics(prometheus.NewRegistry()), Log: log,
	}

	ctx, cancel := context.WithCancel(context.Background())
	forTracker, forPublisher := d.changed.Subscribe(ctx), d.outputs.Subscribe(ctx)
	ended := make(chan error, 4)
	go func() { ended <- d.inv.Run(ctx) }()
	d.inv.Synced(ctx)
	go func() { ended <- d.tracker.Run(ctx, forTracker, d.outputs.Notify) }()
	go func() { ended <- publisher.Run(ctx, forPublisher) }()
	go func() { ended <- sfs.Watch(ctx) }()

	d.close = sync.OnceFunc(func() {
		cancel()
		must.Succeed(t,
			errors.Join(<-ended, <-ended, <-ended, <-ended, engine.Close(), d.journal.Close()))
		d.devlink.Close()
	})

	t.Cleanup(d.close)
	return d
}

func (d *demand) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) {
	p := v1alpha1.DevicePool{Spec: d.spec}
	p.Name = "fast"
	return []v1alpha1.DevicePool{p}, nil
}

func (d *demand) NodeLabels(context.Context) (map[string]string, error) { return nil, nil }

// PublishResources stores the resources that a driver would send to the API server.
func (d *demand) PublishResources(_ context.Context, r resourceslice.DriverResources) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	d.published = append(d.published, r)
	return nil
}

// devices returns the names of the devices that were published last, and how often was published.
func (d *demand) devices() (names []string, times int) {
	d.mutex.Lock()
	defer d.mutex.Unlock()

	if len(d.published) == 0 {
		return nil, 0
	}

	for _, p := range d.published[len(d.published)-1].Pools {
		for _, slice := range p.Slices {
			for _, device := range slice.Devices {
				names = append(names, device.Name)
			}
		}
	}

	return names, len(d.published)
}

// until waits for a state that follows from an event.
func (d *demand) until(t *testing.T, what string, is func() bool) {
	t.Helper()
	begin := time.Now()
	for !is() {
		if time.Since(begin) > patience {
			names, times := d.devices()
			t.Fatalf("%s: not within %s; published %d times, last %q", what, patience, times, names)
		}
		time.Sleep(5 * time.Millisecond)
	}

	t.Logf("%s after %s", what, time.Since(begin).Round(time.Millisecond))
}

// reserve reserves the Function, as the preparation of a claim does.
func (d *demand) reserve(id function.ID) error {
	f, known := d.tracker.Get(id)
	if !known {
		return errors.New("is not known")
	}

	return d.lifecycle.Reserve(context.Background(), journal.Attachment{
		Function: id, PF: f.PF, PFName: f.PFName, VFIndex: f.Index,
		Claim: journal.Claim{Namespace: "default", Name: "c", UID: "claim-1"},
		Setup: setup.Wanted(d.spec, id, "", demandMAC),
		Interface: function.Interface{
			Name: "net1", MAC: demandMAC,
			Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.5/24")},
		},
	})
}

func (d *demand) take(id function.ID, namespace *netns.Namespace) error {
	_, err := d.lifecycle.Attach(context.Background(), id, lifecycle.Sandbox{
		ID: "sandbox-1", NetNS: namespace.Path(),
		Pod: journal.Pod{Namespace: "default", Name: "p", UID: "pod-1"},
	})
	return err
}

func (d *demand) free(id function.ID) error {
	return d.lifecycle.Unprepare(context.Background(), "claim-1")
}

// wantPort checks the SF at its eswitch.
func (d *demand) wantPort(t *testing.T, id function.ID) {
	t.Helper()
	sfnum, _ := id.SFNum()
	port := portOf(t, d.devlink, id.Address, devlink.PCISF, sfnum)
	if got := port.Function; got.MAC != demandMAC || !got.Active {
		t.Errorf("port function of the SF is %+v, want active with MAC %s", got, demandMAC)
	}

	f, exists := d.inv.Get(id)
	if !exists || f.Netdev == "" {
		t.Fatalf("SF is (exists: %v) %+v, want one with a netdev", exists, f)
	}
	if got := linkOf(t, f.Netdev).Attrs().HardwareAddr.String(); got != string(demandMAC) {
		t.Errorf("netdev %s has MAC %s, want %s", f.Netdev, got, demandMAC)
	}
}

// wantNothing checks that no SFs are left: no ports, auxiliary devices or records.
func (d *demand) wantNothing(t *testing.T) {
	t.Helper()
	ports, err := d.devlink.Ports()
	must.Succeed(t, err)

	for _, p := range ports {
		if p.Flavour == devlink.PCISF {
			t.Errorf("port %s/%d of SF %d is left", p.Device, p.Index, p.SF)
		}
	}

	if left, _ := filepath.Glob("/sys/bus/auxiliary/devices/*.sf.*"); len(left) > 0 {
		t.Errorf("auxiliary devices %q are left", left)
	}
	if records := d.journal.All(); len(records) > 0 {
		t.Errorf("the journal still has %+v", records)
	}
}

// tracedDevlink reports every change before it is made.
type tracedDevlink struct {
	*devlink.Conn
	trace func(step string)
}

func (c tracedDevlink) AddSF(d devlink.Device, pf uint16, sfnum uint32) (devlink.Port, error) {
	c.trace("port add")
	return c.Conn.AddSF(d, pf, sfnum)
}

func (c tracedDevlink) SetFunction(
	d devlink.Device, index uint32, to devlink.FunctionChange,
) error {
	c.trace(fmt.Sprintf("port function set, MAC %q", to.MAC))
	return c.Conn.SetFunction(d, index, to)
}

func (c tracedDevlink) DeletePort(d devlink.Device, index uint32) error {
	c.trace("port del")
	return c.Conn.DeletePort(d, index)
}

// tracedJournal reports every write before it is made.
type tracedJournal struct {
	*journal.Journal
	trace func(step string)
}

func (j tracedJournal) Put(a journal.Attachment) error {
	j.trace("journal: " + string(a.State))
	return j.Journal.Put(a)
}

func (j tracedJournal) Delete(id function.ID) error {
	j.trace("journal: delete")
	return j.Journal.Delete(id)
}

// makingPool returns a pool with the PF's VF 0 and with SFs 5 and 6 made at each of these PFs.
func makingPool(pfs ...pci.Address) v1alpha1.DevicePoolSpec {
	var selector v1alpha1.FunctionSelector
	for _, pf := range pfs {
		selector.RootDevices = append(selector.RootDevices, string(pf)+"#0")
	}
	return v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDRA, Selectors: []v1alpha1.FunctionSelector{selector},
		SFs: &v1alpha1.SFSpec{Count: 2, FirstNumber: 5}, MaxAllocated: new(int32(2)),
	}
}

// switchdev sets the mode of a PF's eswitch to switchdev, until the test ends.
func switchdev(t *testing.T, pf pci.Address) {
	t.Helper()
	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	t.Cleanup(conn.Close)
	must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Switchdev))
	t.Cleanup(func() { must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Legacy)) })
}

func nothing(string) {}

// TestSubfunctions checks that an SF is published although it does not exist, made for the pod to
// which it is allocated, and deleted when the pod is gone.
func TestSubfunctions(t *testing.T) {
	card.InGuest(t, "simnic")
	pfs := card.PFs(t)
	pf := pfs[len(pfs)-1] // its number is not 0
	d := newDemand(t, t.TempDir(), makingPool(pf), nothing)
	sf := function.SubfunctionID(pf, 5)
	vf := function.ID{Address: card.VF(t, pf, 0)}
	all := []string{vf.DeviceName(), sf.DeviceName(), function.SubfunctionID(pf, 6).DeviceName()}

	t.Run("in eswitch mode legacy none are offered, and the pool says why", func(t *testing.T) {
		d.until(t, "VF published", func() bool {
			names, _ := d.devices()
			return cmp.Equal(names, all[:1])
		})

		pools, _ := d.tracker.Pools()
		if s := pools[0].Shortages; len(s) != 1 || s[0].PF != string(pf) ||
			s[0].Reason != v1alpha1.ReasonNotSupported ||
			!strings.Contains(s[0].Message, "mode legacy") {
			t.Errorf("shortages are %+v", s)
		}

		if err := d.reserve(sf); err == nil {
			t.Error("an SF was reserved")
		}

		d.wantNothing(t)
	})

	switchdev(t, pf)
	times := 0
	t.Run("published although they are not there", func(t *testing.T) {
		d.until(t, "SFs published", func() bool {
			names, _ := d.devices()
			return cmp.Equal(names, all)
		})
		_, times = d.devices()
		d.wantNothing(t)
	})

	t.Run("made with its MAC when it is reserved", func(t *testing.T) {
		begin := time.Now()
		must.Succeed(t, d.reserve(sf))
		t.Logf("made in %s", time.Since(begin).Round(time.Millisecond))
		d.wantPort(t, sf)
		begin = time.Now()
		must.Succeed(t, d.reserve(sf))
		t.Logf("reserved again in %s", time.Since(begin).Round(time.Microsecond))
	})

	namespace := netns.New(t)
	t.Run("attached, and reaches a VF over the representors", func(t *testing.T) {
		must.Succeed(t, d.take(sf, namespace))
		wantTraffic(t, pod{Namespace: namespace, ip: net.IPv4(192, 0, 2, 5).To4()}, pf, 0)
	})

	t.Run("deleted when it is released", func(t *testing.T) {
		begin := time.Now()
		must.Succeed(t, d.free(sf))
		t.Logf("released in %s", time.Since(begin).Round(time.Millisecond))
		d.wantNothing(t)
	})

	t.Run("the network namespace of its pod is gone", func(t *testing.T) {
		short := netns.New(t)
		must.Succeed(t, d.reserve(sf))
		must.Succeed(t, d.take(sf, short))
		must.Succeed(t, short.Close())
		must.Succeed(t, d.free(sf))
		d.wantNothing(t)
	})

	t.Run("deleted by somebody while a pod has it", func(t *testing.T) {
		must.Succeed(t, d.reserve(sf))
		must.Succeed(t, d.take(sf, netns.New(t)))
		port := portOf(t, d.devlink, pf, devlink.PCISF, 5)
		must.Succeed(t, d.devlink.DeletePort(port.Device, port.Index))
		must.Succeed(t, d.free(sf))
		d.wantNothing(t)
	})

	t.Run("there already, active and with another MAC", func(t *testing.T) {
		port, err := d.devlink.AddSF(devlink.OfPCI(pf),
			portOf(t, d.devlink, pf, devlink.PCIVF, 0).PF, 5)
		must.Succeed(t, err)
		other := devlink.FunctionChange{MAC: "02:00:00:00:00:99", Active: new(true)}
		must.Succeed(t, d.devlink.SetFunction(port.Device, port.Index, other))
		must.Succeed(t, d.reserve(sf))
		d.wantPort(t, sf)
		must.Succeed(t, d.free(sf))
		d.wantNothing(t)
	})

	t.Run("nothing was published anew all the while", func(t *testing.T) {
		if names, now := d.devices(); now != times {
			t.Errorf("published %d times more, last %q", now-times, names)
		}
	})
}

// wantTraffic checks that a pod with an SF and a pod with a VF reach each other, over a bridge that
// joins their representors.
func wantTraffic(t *testing.T, p pod, pf pci.Address, index int) {
	t.Helper()
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "sfbridge"}}
	must.Succeed(t, netlink.LinkAdd(bridge))
	defer func() { must.Succeed(t, netlink.LinkDel(bridge)) }()

	must.Succeed(t, netlink.LinkSetUp(bridge))
	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	defer conn.Close()

	for _, port := range []devlink.Port{
		portOf(t, conn, pf, devlink.PCISF, 5), portOf(t, conn, pf, devlink.PCIVF, uint32(index)),
	} {
		representor := linkOf(t, port.Netdev)
		must.Succeed(t, netlink.LinkSetMaster(representor, bridge))
		must.Succeed(t, netlink.LinkSetUp(representor))
	}

	reach(t, p, newPod(t, card.VF(t, pf, index), 6))
}

// TestSubfunctionKilled checks that after an agent's end before any of its steps, the next agent
// makes the SF for the same pod or deletes it.
func TestSubfunctionKilled(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	switchdev(t, pf)
	dir, spec, sf := t.TempDir(), makingPool(pf), function.SubfunctionID(pf, 6)
	for n := 1; ; n++ {
		died := dieAt(t, dir, spec, sf, n)
		next := newDemand(t, dir, spec, nothing)
		if died == "" {
			next.wantNothing(t)
			next.close()
			if n <= 12 {
				t.Errorf("only %d steps", n-1)
			}
			return
		}

		t.Run(fmt.Sprintf("%02d before %s", n, strings.ReplaceAll(died, " ", "_")),
			func(t *testing.T) {
				must.Succeed(t, next.lifecycle.Recover(t.Context()))
				known := func() bool { _, known := next.tracker.Pools(); return known }
				next.until(t, "pools known", known)

				if a, ok := next.journal.Get(sf); !ok || a.State == journal.Reserved {
					must.Succeed(t, next.reserve(sf))
					next.wantPort(t, sf)
				}

				must.Succeed(t, next.free(sf))
				next.wantNothing(t)
			})

		next.close()
	}
}

// dieAt takes an SF through its life and ends before step n. It returns this step, or "" if there
// are fewer steps.
func dieAt(
	t *testing.T, dir string, spec v1alpha1.DevicePoolSpec, sf function.ID, n int,
) (died string) {
	t.Helper()
	namespace := netns.New(t)
	steps := 0
	var mutex sync.Mutex
	d := newDemand(t, dir, spec, func(step string) {
		mutex.Lock()
		defer mutex.Unlock()
		if steps++; steps == n {
			died = step
			runtime.Goexit() // does not undo anything
		}
	})

	defer d.close()
	d.until(t, "pools known", func() bool { _, known := d.tracker.Pools(); return known })
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for _, do := range []func() error{
			func() error { return d.reserve(sf) },
			func() error { return d.take(sf, namespace) },
			func() error { return d.free(sf) },
		} {
			if err := do(); err != nil {
				t.Error(err)
				return
			}
		}
	}()

	<-ended
	return died
}
