// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	pf0 = pci.Address("0000:3b:00.0")
	pf1 = pci.Address("0000:3b:00.1")
)

// host is a directory in place of sysfs, with PFs of 7 VFs each, and with all other sources that
// the supply of VFs reads. It makes the VFs that are written to sriov_numvfs, as the kernel does. A
// file cannot return the kernel's errors, so host makes no VFs instead of an error.
type host struct {
	t    *testing.T
	root string
	vfs  *VFs

	functions, poolChanges, records notify.Signal

	mutex       sync.Mutex
	pools       []pool.Pool
	attachments []journal.Attachment
	assigned    map[string]podresources.Assignment
	away        error // returned by the kubelet
	asked       int   // calls of the kubelet
	uses        hostuse.Netdevs
	vdpa        map[pci.Address]string // uses of the netdevs of vDPA devices
	unreadable  error                  // returned in place of the host's uses
	sick        string                 // error that a health reporter shows for all PFs
	refused     int                    // a number of VFs that every PF refuses, or 0
	writes      []string
	had         map[pci.Address]int // the journal's numbers of VFs
	locks       []string            // log of locks taken and, with "not", released
	held        function.ID         // locked by another caller
	behind      int                 // VFs that the inventory still shows of PFs without any
	changed     int
	looks       int // calls of the inventory
}

// newHost returns a host whose PFs have these numbers of VFs.
func newHost(t *testing.T, numVFs ...int) *host {
	t.Helper()
	h := &host{t: t, root: t.TempDir(), uses: hostuse.Netdevs{}}
	for i, n := range numVFs {
		pf := pci.Address(fmt.Sprintf("0000:3b:00.%d", i))
		h.device(pf, "igb", fmt.Sprintf("ens%d", i))
		h.write(pf, "sriov_totalvfs", "7")
		h.write(pf, "sriov_numvfs", "0")
		h.makeVFs(pf, n)
		h.write(pf, "sriov_numvfs", strconv.Itoa(n))
	}

	h.vfs = &VFs{
		SysRoot: h.root, Functions: h, Pools: h, Journal: h, Assignments: h,
		HostNetdevs: h.netdevs, Fault: h.fault,
		Changed: func() { h.set(func() { h.changed++ }) },
		Writing: h.writing,
		Metrics: NewMetrics(prometheus.NewRegistry()), Log: testr.New(t),
	}

	return h
}

func (h *host) set(change func()) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	change()
}

// counted returns the value of a counter.
func (h *host) counted(counter *int) int {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return *counter
}

func (h *host) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) dir(a pci.Address, elements ...string) string {
	return filepath.Join(append([]string{h.root, "bus/pci/devices", string(a)}, elements...)...)
}

func (h *host) write(a pci.Address, name, value string) {
	h.must(os.WriteFile(h.dir(a, name), []byte(value+"\n"), 0o644))
}

func (h *host) device(a pci.Address, driver, netdev string) {
	h.must(os.MkdirAll(h.dir(a), 0o755))
	h.bind(a, driver)
	if netdev != "" {
		h.must(os.MkdirAll(h.dir(a, "net", netdev), 0o755))
	}
}

func (h *host) bind(a pci.Address, driver string) {
	h.must(os.RemoveAll(h.dir(a, "driver")))
	if driver != "" {
		h.must(os.Symlink("../../../bus/pci/drivers/"+driver, h.dir(a, "driver")))
	}
}

// vf returns the address of a VF of a PF.
func vf(pf pci.Address, index int) pci.Address {
	return pci.Address(fmt.Sprintf("0000:3b:%02x.%d", 1+int(pf[len(pf)-1]-'0'), index))
}

func (h *host) makeVFs(pf pci.Address, n int) {
	for i := range n {
		a := vf(pf, i)
		h.device(a, "igbvf", fmt.Sprintf("v%s-%d", pf[len(pf)-1:], i))
		h.must(os.Symlink("../"+string(a), h.dir(pf, fmt.Sprintf("virtfn%d", i))))
	}
}

func (h *host) numVFs(pf pci.Address) int {
	n, err := sysfs.Root(h.root).PCI(pf).Number(numVFs)
	h.must(err)
	return n
}

// writing makes or removes VFs for a number that is about to be written to sriov_numvfs.
func (h *host) writing(pf pci.Address, n int) {
	h.set(func() { h.writes = append(h.writes, fmt.Sprintf("%s %d", pf, n)) })
	links, err := filepath.Glob(h.dir(pf, "virtfn*"))
	h.must(err)
	if n > 0 && len(links) > 0 {
		h.t.Errorf("%d VFs written while there are %d: the kernel says EBUSY", n, len(links))
	}

	for _, link := range links {
		target, err := os.Readlink(link)
		h.must(errors.Join(err, os.RemoveAll(h.dir(pci.Address(filepath.Base(target)))),
			os.Remove(link)))
	}

	if n > 0 && n == h.refused { // after it was written
		time.AfterFunc(time.Millisecond, func() { h.write(pf, "sriov_numvfs", "0") })
		return
	}

	h.makeVFs(pf, n)
}

func (h *host) taken() (writes []string) {
	h.set(func() { writes, h.writes = h.writes, nil })
	return writes
}

func (h *host) Snapshot() []function.Function {
	var out []function.Function
	for i := range 2 {
		pf := pci.Address(fmt.Sprintf("0000:3b:00.%d", i))
		if _, err := os.Stat(h.dir(pf)); err != nil {
			continue
		}

		driver, err := sysfs.Root(h.root).PCI(pf).Link("driver")
		h.must(err)
		vfs, err := sysfs.Root(h.root).PCI(pf).VFs()
		h.must(err)

		out = append(out, function.Function{
			ID: function.ID{Address: pf}, Kind: function.PF, Class: function.Network, PF: pf,
			Index: -1, Vendor: "8086",
			PFName: fmt.Sprintf("ens%d", i), Driver: driver, NumVFs: cmp.Or(len(vfs), h.behind),
		})

		for _, link := range vfs {
			driver, err := sysfs.Root(h.root).PCI(link.Address).Link("driver")
			h.must(err)
			netdevs, _, err := sysfs.Root(h.root).PCI(link.Address).Netdevs()
			h.must(err)

			f := function.Function{
				ID: function.ID{Address: link.Address}, Kind: function.VF, Class: function.Network,
				PF: pf, Index: link.Index,
				Driver: driver, NoNetdev: netdevs == "",
			}

			if use := h.vdpaUse(link.Address); use != "" {
				f.Netdev, f.HostUse = "eth9", use
			}

			out = append(out, f)
		}
	}

	h.set(func() { h.looks++ })
	return out
}

func (h *host) Pools() ([]pool.Pool, bool) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return h.pools, h.pools != nil
}

// declare replaces the pools.
func (h *host) declare(pools ...pool.Pool) {
	h.set(func() { h.pools = pools })
	h.poolChanges.Notify()
}

func (h *host) All() []journal.Attachment {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return slices.Clone(h.attachments)
}

func (h *host) record(attachments ...journal.Attachment) {
	h.set(func() { h.attachments = attachments })
	h.records.Notify()
}

func (h *host) PutVFs(pf pci.Address, n int) error {
	h.set(func() {
		if h.had == nil {
			h.had = map[pci.Address]int{}
		}
		h.had[pf] = n
	})
	return nil
}

func (h *host) DeleteVFs(pf pci.Address) error {
	h.set(func() { delete(h.had, pf) })
	return nil
}

func (h *host) VFs() map[pci.Address]int {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return maps.Clone(h.had)
}

// remembers checks the numbers of VFs in the journal.
func (h *host) remembers(want map[pci.Address]int) {
	h.t.Helper()
	if got := h.VFs(); !maps.Equal(got, want) {
		h.t.Errorf("the journal has VFs %v, want %v", got, want)
	}
}

func (h *host) Subscribe(ctx context.Context) <-chan struct{} { return h.records.Subscribe(ctx) }

func (h *host) Lock(ctx context.Context, id function.ID) (func(), error) {
	h.set(func() { h.locks = append(h.locks, id.String()) })
	if id == h.held {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	return func() { h.set(func() { h.locks = append(h.locks, "not "+id.String()) }) }, nil
}

func (h *host) Assigned(context.Context) (map[string]podresources.Assignment, error) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.asked++
	return h.assigned, h.away
}

func (h *host) netdevs() (hostuse.Netdevs, error) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return maps.Clone(h.uses), h.unreadable
}

func (h *host) vdpaUse(vf pci.Address) string {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return h.vdpa[vf]
}

func (h *host) fault(function.Function) string {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return h.sick
}

// wants returns a DevicePool that asks for n VFs of a PF.
func wants(name string, n int32, pfNames ...string) pool.Pool {
	return pool.Pool{Name: name, Spec: v1alpha1.DevicePoolSpec{
		NumVFs: ptr.To(n), Selectors: []v1alpha1.FunctionSelector{{PFNames: pfNames}},
	}}
}

// run runs the supply in the background until the test ends.
func (h *host) run() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	functions, pools := h.functions.Subscribe(ctx), h.poolChanges.Subscribe(ctx)
	go func() { ended <- h.vfs.Run(ctx, functions, pools) }()
	h.t.Cleanup(func() {
		cancel()
		h.must(<-ended)
	})
}

func (h *host) supply(devicePool string) pool.Supply {
	h.t.Helper()
	s, known := h.vfs.Supply(devicePool)
	if !known {
		h.t.Fatalf("what DevicePool %s has is not known", devicePool)
	}
	return s
}

// short checks the only Shortage of a DevicePool; an empty reason means that there is no Shortage.
func (h *host) short(devicePool, reason, text string) {
	h.t.Helper()
	got := h.supply(devicePool).Shortages
	switch {
	case reason == "" && len(got) == 0:
	case len(got) != 1 || got[0].Reason != reason || !strings.Contains(got[0].Message, text):
		h.t.Errorf("DevicePool %s lacks %+v; want %q: ..%s..", devicePool, got, reason, text)
	}
}

func (h *host) wrote(want ...string) {
	h.t.Helper()
	if diff := gocmp.Diff(want, h.taken()); diff != "" {
		h.t.Errorf("written to sriov_numvfs (-want +got):\n%s", diff)
	}
}

func TestVFs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 0, 3)
		h.run()
		synctest.Wait()
		if _, known := h.vfs.Supply("four"); known {
			t.Error("what a DevicePool has is known before there are pools")
		}

		h.declare(wants("four", 4, "ens0#0-1"), wants("three", 3, "ens1"), pool.Pool{Name: "other"})
		synctest.Wait()
		h.wrote("0000:3b:00.0 4") // whatever indexes are named; the second PF has 3 VFs already
		h.short("four", "", "")
		h.short("three", "", "")
		if s := h.supply("four"); s.PFs != 1 {
			t.Errorf("%d PFs are named, want 1", s.PFs)
		}
		if _, known := h.vfs.Supply("other"); known {
			t.Error("a DevicePool without numVFs has something made")
		}

		h.declare(wants("four", 2, "ens0"), wants("three", 5, "ens1"))
		synctest.Wait()
		got := h.taken()
		slices.Sort(got)
		want := []string{"0000:3b:00.0 0", "0000:3b:00.0 2", "0000:3b:00.1 0", "0000:3b:00.1 5"}
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("written by way of 0 (-want +got):\n%s", diff)
		}

		h.declare(wants("four", 0, "ens0"))
		synctest.Wait()
		h.wrote("0000:3b:00.0 0")

		h.declare() // PFs keep their VFs
		time.Sleep(time.Hour)
		h.wrote()
		if n := h.numVFs(pf1); n != 5 {
			t.Errorf("%d VFs after the DevicePool is gone, want 5", n)
		}
		if n := testutil.ToFloat64(h.vfs.Metrics.changes.WithLabelValues("done")); n != 4 {
			t.Errorf("%v changes counted, want 4", n)
		}
	})
}

// TestVFsLocks checks that a Function cannot be reserved while the VFs change.
func TestVFsLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 2)
		h.held = function.ID{Address: vf(pf0, 1)}
		h.declare(wants("four", 4, "ens0"))
		h.run()
		time.Sleep(lockTimeout)
		synctest.Wait()
		h.short("four", v1alpha1.ReasonInUse, "took more than 2s")
		h.wrote()
		first, second := string(vf(pf0, 0)), string(vf(pf0, 1))
		want := []string{string(pf0), first, second, "not " + first, "not " + string(pf0)}
		if diff := gocmp.Diff(want, h.locks); diff != "" {
			t.Errorf("locked (-want +got):\n%s", diff)
		}

		h.set(func() { h.locks, h.held = nil, function.ID{} })
		time.Sleep(2 * time.Second)
		h.wrote("0000:3b:00.0 0", "0000:3b:00.0 4")
		want = slices.Insert(want, 3, "not "+second)
		if diff := gocmp.Diff(want, h.locks); diff != "" {
			t.Errorf("locked (-want +got):\n%s", diff)
		}
	})
}

// TestVFsInUse checks that a PF in use is not changed until the use ends.
func TestVFsInUse(t *testing.T) {
	sf := function.SubfunctionID(pf0, 8)
	for _, c := range []struct {
		name       string
		begin, end func(h *host)
		message    string
	}{
		{
			"VF in the journal",
			func(h *host) {
				h.record(journal.Attachment{
					Function: function.ID{Address: vf(pf0, 1)}, PF: pf0,
					Pod: journal.Pod{Namespace: "default", Name: "web"},
				})
			},
			func(h *host) { h.record() },
			"PF 0000:3b:00.0 is in use: 0000:3b:01.1 belongs to pod default/web; its VFs are " +
				"changed when that has ended",
		},
		{
			"SF in the journal",
			func(h *host) {
				h.record(journal.Attachment{
					Function: sf, PF: pf0, Claim: journal.Claim{Namespace: "default", Name: "nic"},
				})
			},
			func(h *host) { h.record() },
			"0000:3b:00.0/sf8 belongs to claim default/nic",
		},
		{
			"VF that the kubelet gave away",
			func(h *host) {
				h.set(func() {
					h.assigned = map[string]podresources.Assignment{
						string(vf(pf0, 1)): {
							Resource: "intel.com/vf", Namespace: "default", Pod: "web",
							Container: "c",
						},
						string(vf(pf1, 1)): {
							Resource: "intel.com/vf", Namespace: "default", Pod: "other",
							Container: "c",
						},
					}
				})
			},
			func(h *host) { h.set(func() { h.assigned = nil }) },
			"0000:3b:01.1 belongs to pod default/web (container c)",
		},
		{
			"kubelet away",
			func(h *host) { h.set(func() { h.away = errors.New("kubelet at x: gone") }) },
			func(h *host) { h.set(func() { h.away = nil }) },
			"may be in use: whether pods have its VFs is not known: kubelet at x: gone",
		},
		{
			"netdev of a VF away",
			func(h *host) { h.must(os.Remove(h.dir(vf(pf0, 0), "net", "v0-0"))) },
			func(h *host) { h.must(os.Mkdir(h.dir(vf(pf0, 0), "net", "v0-0"), 0o755)) },
			"VF 0000:3b:01.0 has its netdev in another network namespace",
		},
		{
			"netdev of the PF away",
			func(h *host) { h.must(os.Remove(h.dir(pf0, "net", "ens0"))) },
			func(h *host) { h.must(os.Mkdir(h.dir(pf0, "net", "ens0"), 0o755)) },
			"is in use: its netdev is in another network namespace",
		},
		{
			"VF with vfio-pci",
			func(h *host) {
				h.bind(vf(pf0, 0), "vfio-pci")
				h.must(os.RemoveAll(h.dir(vf(pf0, 0), "net")))
			},
			func(h *host) { h.bind(vf(pf0, 0), "") },
			"VF 0000:3b:01.0 has driver vfio-pci and no netdev",
		},
		{
			"VFs that the host uses",
			func(h *host) {
				h.set(func() {
					for i := range 5 {
						h.uses[fmt.Sprintf("v0-%d",
							i)] = hostuse.Netdev{Use: "is a port of bridge br0"}
					}
				})
			},
			func(h *host) { h.set(func() { clear(h.uses) }) },
			"VF 0000:3b:01.2 has netdev v0-2, which is a port of bridge br0 and 2 more; its",
		},
		{
			"as many uses as a message names",
			func(h *host) {
				h.set(func() {
					for i := range shownUses {
						h.uses[fmt.Sprintf("v0-%d",
							i)] = hostuse.Netdev{Use: "is a port of bridge br0"}
					}
				})
			},
			func(h *host) { h.set(func() { clear(h.uses) }) },
			"VF 0000:3b:01.2 has netdev v0-2, which is a port of bridge br0; its VFs",
		},
		{
			"VF that is up with a carrier",
			func(h *host) { h.set(func() { h.uses["v0-3"] = hostuse.Netdev{Carrier: true} }) },
			func(h *host) { h.set(func() { clear(h.uses) }) },
			"VF 0000:3b:01.3 has netdev v0-3, which is up and has a carrier",
		},
		{
			"netdev of a VF's vDPA device",
			func(h *host) {
				h.set(func() {
					h.vdpa = map[pci.Address]string{vf(pf0, 2): "has address 192.0.2.7/24"}
				})
			},
			func(h *host) { h.set(func() { h.vdpa = nil }) },
			"VF 0000:3b:01.2 has netdev eth9, which has address 192.0.2.7/24",
		},
		{
			"what the host uses is not known",
			func(h *host) { h.set(func() { h.unreadable = errors.New("message too long") }) },
			func(h *host) { h.set(func() { h.unreadable = nil }) },
			"may be in use: what the host does with its netdevs cannot be read: message too long",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, 5, 5)
				c.begin(h)
				h.declare(wants("one", 1, "ens0"))
				h.run()
				synctest.Wait()
				h.short("one", v1alpha1.ReasonInUse, c.message)
				changed := h.counted(&h.changed)
				time.Sleep(10 * time.Minute)
				h.wrote()
				if h.counted(&h.changed) != changed {
					t.Errorf("told %d times of what did not change", h.counted(&h.changed)-changed)
				}
				if h.counted(&h.asked) > 20 {
					t.Errorf("the kubelet was asked %d times in 10 minutes", h.counted(&h.asked))
				}

				c.end(h)
				time.Sleep(2 * time.Minute) // no event reports the end of these uses
				h.wrote("0000:3b:00.0 0", "0000:3b:00.0 1")
				h.short("one", "", "")
			})
		})
	}
}

// TestVFsFollowReleases checks that the VFs of a PF change soon after the last of them is free,
// however long that took.
func TestVFsFollowReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 2)
		h.record(journal.Attachment{Function: function.ID{Address: vf(pf0, 1)}, PF: pf0})
		h.declare(wants("one", 1, "ens0"))
		h.run()
		time.Sleep(10 * time.Minute) // the retries are a minute apart by now
		h.wrote()
		asked := h.counted(&h.asked)

		h.set(func() {
			h.assigned = map[string]podresources.Assignment{
				string(vf(pf0, 1)): {Namespace: "default", Pod: "web"},
			}
		})

		for range 100 { // many pods come and go elsewhere
			h.records.Notify()
			time.Sleep(pause / 10)
		}

		h.wrote()
		if h.counted(&h.asked) > asked {
			t.Errorf("the kubelet was asked %d times for what the journal knows",
				h.counted(&h.asked)-asked)
		}

		h.record()
		time.Sleep(pause)
		synctest.Wait()
		h.short("one", v1alpha1.ReasonInUse, "belongs to pod default/web (container")
		h.set(func() { h.assigned = nil }) // without a notification by the kubelet
		// The look comes after 1 s, or after 2 s if the last changed record caused one more look
		// before.
		time.Sleep(3 * time.Second)
		h.wrote("0000:3b:00.0 0", "0000:3b:00.0 1")
	})
}

// TestVFsAfterReboot checks that the VFs and SFs of pods are made again after a reboot of the
// machine.
func TestVFsAfterReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 0)
		one, sf := function.ID{Address: vf(pf0, 1)}, function.SubfunctionID(pf0, 8)
		h.record(journal.Attachment{Function: one, PF: pf0},
			journal.Attachment{Function: sf, PF: pf0})

		h.set(func() {
			web := podresources.Assignment{Namespace: "default", Pod: "web"}
			h.assigned = map[string]podresources.Assignment{one.String(): web, sf.String(): web}
		})

		h.declare(wants("two", 2, "ens0"))
		h.run()
		synctest.Wait()
		h.wrote("0000:3b:00.0 2")
		h.short("two", "", "")
	})
}

// TestVFsKubeletAway checks that a PF without VFs does not need the kubelet's answer, because no
// pod can have a VF.
func TestVFsKubeletAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 0)
		h.away = errors.New("gone")
		h.declare(wants("one", 1, "ens0"))
		h.run()
		synctest.Wait()
		h.wrote("0000:3b:00.0 1")
	})
}

func TestVFsNotPossible(t *testing.T) {
	for _, c := range []struct {
		name            string
		change          func(h *host)
		reason, message string
	}{
		{"too many", nil, v1alpha1.ReasonOutOfRange,
			"PF 0000:3b:00.0 can have 7 VFs at most, not 9"},
		{
			"no SR-IOV", func(h *host) { h.must(os.Remove(h.dir(pf0, "sriov_numvfs"))) },
			v1alpha1.ReasonNotSupported, "is SR-IOV on",
		},
		{"garbage", func(h *host) {
			h.write(pf0, "sriov_numvfs", "-1")
		}, v1alpha1.ReasonRefused, "must be a number"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, 2)
				if c.change != nil {
					c.change(h)
				}

				h.declare(wants("nine", 9, "ens0"))
				h.run()
				synctest.Wait()
				h.short("nine", c.reason, c.message)
				time.Sleep(time.Hour)
				h.wrote()
			})
		})
	}
}

// TestRefused checks the messages for errors of the kernel, which a file of a test cannot return.
func TestRefused(t *testing.T) {
	h := newHost(t, 2)
	for _, c := range []struct {
		answer          error
		driver          string
		reason, message string
	}{
		{unix.EBUSY, "igb", v1alpha1.ReasonBusy, "does somebody else change its VFs?"},
		{unix.EAGAIN, "i40e", v1alpha1.ReasonBusy, "cannot be given 3 VFs now"},
		{unix.ERANGE, "igb", v1alpha1.ReasonOutOfRange, "can have 7 VFs at most, not 3"},
		{unix.ENOENT, "", v1alpha1.ReasonNotSupported, "has no driver"},
		{unix.ENOENT, "vfio-pci", v1alpha1.ReasonNotSupported,
			"has driver vfio-pci, which makes no VFs"},
		{unix.Errno(524), "igb", v1alpha1.ReasonNotSupported, "has driver igb, which makes no VFs"},
		{unix.EROFS, "igb", v1alpha1.ReasonRefused,
			"this agent may not write sriov_numvfs (read-only file system)"},
		{unix.EACCES, "igb", v1alpha1.ReasonRefused,
			"this agent may not write sriov_numvfs (permission denied)"},
		{unix.EPERM, "ixgbe", v1alpha1.ReasonRefused,
			`driver ixgbe says "operation not permitted"`},
		{unix.ENOMEM, "igb", v1alpha1.ReasonRefused,
			`cannot be given 3 VFs: driver igb says "cannot allocate memory"`},
	} {
		h.bind(pf0, c.driver)
		p := h.vfs.refused(pf0, 3, &os.PathError{Op: "write", Path: "/sys/x", Err: c.answer})
		if p.reason != c.reason || !strings.Contains(p.message, c.message) ||
			strings.Contains(p.message, "/sys") {
			t.Errorf("%v of driver %q is %s: %s; want %s: ..%s..", c.answer, c.driver, p.reason,
				p.message, c.reason, c.message)
		}
	}
}

// TestVFsRefused checks that a card that refuses more VFs gets back its former number, and is not
// asked again for the refused number.
func TestVFsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 2)
		h.refused = 5
		h.declare(wants("five", 5, "ens0"))
		h.run()
		synctest.Wait()
		h.short("five", v1alpha1.ReasonMaking, "is being changed from 2 to 5 VFs")
		time.Sleep(showTimeout + pause)
		h.short("five", v1alpha1.ReasonRefused,
			"has 0 VFs after driver igb was told to make 5: see the kernel's log; it has its 2 "+
				"VFs again")
		h.wrote("0000:3b:00.0 0", "0000:3b:00.0 5", "0000:3b:00.0 2")
		h.functions.Notify() // the inventory reports that there are 2 VFs again
		time.Sleep(pause + time.Millisecond)
		h.wrote()

		time.Sleep(time.Hour) // each retry would cost the 2 VFs
		h.wrote()
		if n := testutil.ToFloat64(h.vfs.Metrics.changes.WithLabelValues("failed")); n != 1 {
			t.Errorf("%v failures counted, want 1", n)
		}

		h.declare(wants("five", 4, "ens0"))
		time.Sleep(time.Second)
		h.wrote("0000:3b:00.0 0", "0000:3b:00.0 4")
		h.short("five", "", "")
		h.declare(wants("five", 5, "ens0"))
		time.Sleep(2 * showTimeout)
		h.wrote("0000:3b:00.0 0", "0000:3b:00.0 5", "0000:3b:00.0 4")
		h.set(func() { h.refused = 0 })
		h.bind(pf0, "other")
		h.functions.Notify()
		time.Sleep(time.Second)
		h.wrote("0000:3b:00.0 0", "0000:3b:00.0 5")
		h.short("five", "", "")
	})
}

// TestVFsInterrupted checks that a PF gets its VFs back after a change that was not finished, when
// no DevicePool names it any more.
func TestVFsInterrupted(t *testing.T) {
	t.Run("agent was killed", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := newHost(t, 0, 0)
			h.must(h.PutVFs(pf0, 3))
			h.must(h.PutVFs(pf1, 3))
			h.declare(wants("five", 5, "ens1"))
			h.run()
			synctest.Wait()
			time.Sleep(showTimeout + pause)
			if a, b := h.numVFs(pf0), h.numVFs(pf1); a != 3 || b != 5 {
				t.Errorf("%d and %d VFs, want what the PF had, and what the pool wants", a, b)
			}
			h.remembers(nil)
		})
	})

	t.Run("pool was deleted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := newHost(t, 2)
			h.refused = 5
			h.declare(wants("five", 5, "ens0"))
			h.run()
			synctest.Wait()
			h.remembers(map[pci.Address]int{pf0: 2}) // before anything is written
			h.set(func() { h.refused = 2 })          // neither 5 VFs nor the 2 of before
			h.write(pf0, "sriov_numvfs", "0")
			h.must(errors.Join(os.RemoveAll(h.dir(pf0, "virtfn0")), os.RemoveAll(h.dir(pf0, "virtfn1"))))
			h.declare([]pool.Pool{}...)
			time.Sleep(time.Minute)
			h.set(func() { h.refused = 0 })
			time.Sleep(2 * time.Minute)
			if n := h.numVFs(pf0); n != 2 {
				t.Errorf("%d VFs, want the 2 of before", n)
			}
			h.functions.Notify()
			synctest.Wait()
			h.remembers(nil)
		})
	})

	t.Run("none are wanted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := newHost(t, 0)
			h.must(h.PutVFs(pf0, 3))
			h.declare(wants("none", 0, "ens0"))
			h.run()
			synctest.Wait()
			h.remembers(nil)
			h.declare([]pool.Pool{}...)
			time.Sleep(time.Minute)
			h.wrote()
		})
	})

	t.Run("inventory is behind", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := newHost(t, 0)
			h.behind = 3
			h.must(h.PutVFs(pf0, 3))
			h.declare([]pool.Pool{}...)
			h.run()
			time.Sleep(showTimeout + pause)
			h.wrote("0000:3b:00.0 3")
		})
	})

	t.Run("somebody else made some", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := newHost(t, 4)
			h.must(h.PutVFs(pf0, 3))
			h.declare([]pool.Pool{}...)
			h.run()
			synctest.Wait()
			h.wrote()
			h.remembers(nil)
		})
	})
}

// TestVFsRetried checks that a card without VFs is asked again, less and less often.
func TestVFsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 0)
		h.refused = 5
		h.declare(wants("five", 5, "ens0"))
		h.run()
		time.Sleep(10 * time.Minute)
		h.short("five", v1alpha1.ReasonRefused,
			"has 0 VFs after driver igb was told to make 5: see the kernel's log")
		if n := len(h.taken()); n < 10 || n > 20 {
			t.Errorf("tried %d times in 10 minutes, want about 15", n)
		}
	})
}

// TestVFsUnseen checks that no VFs are made, and no look each second follows, if the inventory
// lacks some VFs of a PF because a program removed them from the PCI bus.
func TestVFsUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 4)
		h.must(os.Remove(h.dir(pf0, "virtfn3")))
		h.declare(wants("four", 4, "ens0"))
		h.run()
		time.Sleep(10 * time.Minute)
		h.wrote()
		h.short("four", "", "")
		if h.counted(&h.looks) > 50 {
			t.Errorf("looked %d times in 10 minutes", h.counted(&h.looks))
		}
	})
}

// TestVFsConflict checks that, if two DevicePools want different numbers, the DevicePool decides to
// which the Functions would belong: the one with the higher priority, or the older one.
func TestVFsConflict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 0, 0)
		first, second := wants("a", 3, "ens0"), wants("z", 4, "ens0")
		second.Spec.Priority = 1
		older, younger := wants("old", 2, "ens1"), wants("b", 5, "ens1")
		older.Created, younger.Created = time.Unix(1, 0), time.Unix(2, 0)
		h.declare(first, second, wants("same", 4, "ENS0"), older, younger)
		h.run()
		synctest.Wait()
		h.short("a", v1alpha1.ReasonConflict, "PF 0000:3b:00.0 is to have 4 VFs by DevicePool z")
		h.short("b", v1alpha1.ReasonConflict, "PF 0000:3b:00.1 is to have 2 VFs by DevicePool old")
		h.short("same", "", "")
		h.short("z", "", "")
		if a, b := h.numVFs(pf0), h.numVFs(pf1); a != 4 || b != 2 {
			t.Errorf("%d and %d VFs, want 4 and 2", a, b)
		}
	})
}

// TestVFsNoPF checks that a DevicePool has no status on a node without its PFs.
func TestVFsNoPF(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 0)
		other := wants("other", 3, "ens0")
		other.Spec.Selectors[0].Vendors = []string{"15b3"}
		broken := wants("broken", 3, "ens0")
		broken.Err = errors.New("it is wrong")
		h.declare(wants("elsewhere", 3, "enp1s0"), other, broken)
		h.run()
		synctest.Wait()
		h.wrote()

		for _, name := range []string{"elsewhere", "other", "broken"} {
			if s := h.supply(name); s.PFs != 0 || len(s.Shortages) != 0 {
				t.Errorf("DevicePool %s: %+v", name, s)
			}
		}
	})
}

// TestVFsOfAnOlderGeneration checks that the status of a DevicePool refers to its older spec until
// every PF has been looked at for the new spec.
func TestVFsOfAnOlderGeneration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, 4)
		asks := func(generation int64, n int32) pool.Pool {
			p := wants("made", n, "ens0")
			p.Generation = generation
			return p
		}

		is := func(generation int64, reason string) {
			t.Helper()
			synctest.Wait()
			if s := h.supply("made"); s.Generation != generation {
				t.Errorf("what is said is about generation %d, want %d", s.Generation, generation)
			}
			h.short("made", reason, "")
		}

		h.run()
		h.declare(asks(1, 4))
		is(1, "")
		h.declare(asks(2, 4)) // another field of the spec changed
		is(2, "")

		h.held = function.ID{Address: pf0}
		h.declare(asks(3, 6))
		is(2, "") // still waiting for the lock
		h.declare(asks(4, 5))
		time.Sleep(lockTimeout)
		is(2, "") // the answer was about 6
		time.Sleep(lockTimeout)
		is(4, v1alpha1.ReasonInUse)
		h.declare(asks(5, 5))
		is(5, v1alpha1.ReasonInUse)
		h.declare(asks(6, 4))
		is(6, "")
	})
}

// TestPlanPF checks what becomes of the known state of a PF, and when the PF is looked at again.
func TestPlanPF(t *testing.T) {
	const made = 4
	changing := problemf(v1alpha1.ReasonMaking, "is being changed from 2 to 4 VFs")
	refused := &problem{reason: v1alpha1.ReasonRefused, tried: true}
	busy := &problem{reason: v1alpha1.ReasonInUse}
	state := func(change func(*pfState)) *pfState {
		s := &pfState{numVFs: made, driver: "igb", pool: "old"}
		change(s)
		return s
	}
	fresh := pfState{numVFs: made, driver: "igb", pool: "new"}

	for name, test := range map[string]struct {
		before *pfState
		numVFs int // of the PF
		want   pfState
		// now says that the PF is looked at immediately, and soon that it is looked at after a
		// pause.
		now, soon bool
	}{
		"unknown": {want: fresh, now: true},
		"another number is wanted": {
			before: state(func(s *pfState) { s.numVFs, s.problem = 2, busy }),
			want:   fresh, now: true,
		},
		"another driver": {
			before: state(func(s *pfState) { s.driver, s.problem = "ixgbe", refused }),
			want:   fresh, now: true,
		},
		"being changed, with its VFs already": {
			before: state(func(s *pfState) { s.making = changing }), numVFs: made,
			want: pfState{numVFs: made, driver: "igb", pool: "new", making: changing},
		},
		"being changed": {
			before: state(func(s *pfState) { s.making = changing }),
			want:   pfState{numVFs: made, driver: "igb", pool: "new", making: changing},
		},
		"has its VFs after a problem": {
			before: state(func(s *pfState) { s.problem = busy }), numVFs: made,
			want: pfState{numVFs: made, driver: "igb", pool: "new", answered: true},
		},
		"lost its VFs": {
			before: state(func(s *pfState) { s.answered = true }),
			want:   pfState{numVFs: made, driver: "igb", pool: "new", answered: true}, soon: true,
		},
		"was in use": {
			before: state(func(s *pfState) { s.problem = busy }),
			want:   pfState{numVFs: made, driver: "igb", pool: "new", problem: busy}, soon: true,
		},
		"refused": {
			before: state(func(s *pfState) { s.problem = refused }),
			want:   pfState{numVFs: made, driver: "igb", pool: "new", problem: refused},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v := &VFs{queue: workqueue.NewTypedRateLimitingQueue(
					workqueue.NewTypedItemExponentialFailureRateLimiter[pci.Address](time.Hour,
						time.Hour))}
				defer v.queue.ShutDown()
				v.queue.AddRateLimited(pf0) // after an hour, as the last problem

				f := function.Function{PF: pf0, Driver: "igb", NumVFs: test.numVFs}
				if got := v.planPF(f, test.before, made, "new"); *got != test.want {
					t.Errorf("the state is %+v, want %+v", *got, test.want)
				}

				synctest.Wait()
				if now := v.queue.Len() == 1; now != test.now {
					t.Errorf("queued at once: %t, want %t", now, test.now)
				}
				if forgot := v.queue.NumRequeues(pf0) == 0; forgot != test.now {
					t.Errorf("the pauses begin anew: %t, want %t", forgot, test.now)
				}

				time.Sleep(pause)
				synctest.Wait()
				if queued := v.queue.Len() == 1; queued != (test.now || test.soon) {
					t.Errorf("queued after a pause: %t, want %t", queued, test.now || test.soon)
				}
			})
		})
	}
}
