// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// killedSupply is set in the environment of a process that must kill itself while it changes the PF
// in the value.
const killedSupply = "SUPPLY_KILLED"

// declared is the DevicePool of the tests.
const declared = "made"

// supplier gives one PF its VFs, by the parts and events of an agent.
type supplier struct {
	pf        pci.Address
	inventory *inventory.Inventory
	tracker   *pool.Tracker
	journal   *journal.Journal
	kubelet   *kubelettest.Pods
	pods      *podresources.Client
	vfs       *sriov.VFs

	inputs, outputs, all notify.Signal

	mutex  sync.Mutex
	numVFs int32
	writes []int
	before func(n int) // called once, before a write
}

// newSupplier returns a supplier for a PF that watches the node. It makes no VFs before run.
func newSupplier(t *testing.T, pf pci.Address) *supplier {
	t.Helper()
	s := &supplier{pf: pf}
	dir := must.SocketDir(t)
	var err error
	s.journal, err = journal.Open(filepath.Join(dir, "journal.db"))
	must.Succeed(t, err)
	t.Cleanup(func() { s.journal.Close() })

	s.kubelet, err = kubelettest.ServePods(dir)
	must.Succeed(t, err)
	t.Cleanup(s.kubelet.Stop)

	s.pods, err = podresources.NewClient(podresources.Options{KubeletDir: dir, Log: testr.New(t)})
	must.Succeed(t, err)
	t.Cleanup(func() { _ = s.pods.Close() })

	s.inventory = inventory.New(inventory.Options{SysRoot: "/sys", Log: testr.New(t),
		Changed: func() {
			s.inputs.Notify()
			s.all.Notify()
		}})

	must.Run(t, s.inventory.Run)
	if !s.inventory.Synced(t.Context()) {
		t.Fatal("the inventory is not there")
	}

	return s
}

// run starts the part that makes VFs, as an agent's start does; end ends it.
func (s *supplier) run(t *testing.T) (end func()) {
	t.Helper()
	s.tracker = pool.NewTracker(s.inventory, s, nil, testr.New(t))
	s.vfs = &sriov.VFs{
		SysRoot: "/sys", Functions: s.inventory, Pools: s.tracker, Journal: s.journal,
		Assignments: s.pods,
		HostNetdevs: func() (hostuse.Netdevs, error) {
			return hostuse.Read("")
		}, Writing: s.writing, Metrics: sriov.NewMetrics(prometheus.NewRegistry()),
		Log: testr.New(t), Changed: func() {
			s.outputs.Notify()
			s.all.Notify()
		},
	}

	ctx, cancel := context.WithCancel(context.Background())
	forTracker, functions, pools := s.inputs.Subscribe(ctx), s.inputs.Subscribe(
		ctx,
	), s.outputs.Subscribe(ctx)
	track := must.Run(t, func(ctx context.Context) error {
		return s.tracker.Run(ctx, forTracker, func() {
			s.outputs.Notify()
			s.all.Notify()
		})
	})

	work := must.Run(t, func(ctx context.Context) error { return s.vfs.Run(ctx, functions, pools) })
	return func() { track(); work(); cancel() }
}

// DevicePools implements [pool.Declarations].
func (s *supplier) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	p := v1alpha1.DevicePool{}
	p.Name = declared
	p.Spec.NumVFs = ptr.To(s.numVFs)
	p.Spec.Selectors = []v1alpha1.FunctionSelector{{RootDevices: []string{string(s.pf) + "#0-1"}}}
	return []v1alpha1.DevicePool{p}, nil
}

// NodeLabels implements [pool.Declarations].
func (s *supplier) NodeLabels(context.Context) (map[string]string, error) { return nil, nil }

func (s *supplier) set(change func()) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	change()
}

// want declares numVFs from now on.
func (s *supplier) want(n int32) {
	s.set(func() { s.numVFs, s.writes = n, nil })
	s.inputs.Notify()
}

func (s *supplier) writing(_ pci.Address, n int) {
	var before func(int)
	s.set(func() {
		s.writes = append(s.writes, n)
		before, s.before = s.before, nil
	})
	if before != nil {
		before(n)
	}
}

// wrote checks the numbers that were written since numVFs was declared.
func (s *supplier) wrote(t *testing.T, want ...int) {
	t.Helper()
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if !slices.Equal(s.writes, want) {
		t.Errorf("%v was written to sriov_numvfs, want %v", s.writes, want)
	}
}

// until waits for a state; state describes the present state if it differs.
func (s *supplier) until(t *testing.T, what string, is func() (ok bool, state any)) {
	t.Helper()
	// the context is also used after the test has ended
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	defer cancel()

	changes := s.all.Subscribe(ctx)
	begin, late := time.Now(), time.NewTimer(2*patience)
	defer late.Stop()

	for {
		ok, state := is()
		if ok {
			t.Logf("%s after %s", what, time.Since(begin).Round(time.Millisecond))
			return
		}

		select {
		case <-changes:
		case <-late.C:
			t.Fatalf("never: %s; but %+v", what, state)
		}
	}
}

// made waits until the PF has n VFs: at the kernel, in the inventory, and in the pool, which has
// the first two VFs.
func (s *supplier) made(t *testing.T, n int) {
	t.Helper()
	s.until(t, "the PF has its VFs", func() (bool, any) {
		lacks, known := s.vfs.Supply(declared)
		pf, _ := s.inventory.Get(function.ID{Address: s.pf})
		pools, _ := s.tracker.Pools()
		return known && lacks.PFs == 1 && len(lacks.Shortages) == 0 && pf.NumVFs == n &&
			len(pools[0].Functions) == min(n, 2), lacks
	})

	if got := card.Number(t, s.pf, "sriov_numvfs"); got != n {
		t.Errorf("the kernel has %d VFs, want %d", got, n)
	}
}

// short waits until the PF lacks VFs for this reason.
func (s *supplier) short(t *testing.T, reason, text string) {
	t.Helper()
	s.until(t, reason, func() (bool, any) {
		lacks, _ := s.vfs.Supply(declared)
		return len(lacks.Shortages) == 1 && lacks.Shortages[0].PF == string(s.pf) &&
			lacks.Shortages[0].Reason == reason &&
			strings.Contains(lacks.Shortages[0].Message, text), lacks
	})

	lacks, _ := s.vfs.Supply(declared)
	t.Log(lacks.Shortages[0].Message)
}

// identities returns the inode numbers of the VFs' directories, which the kernel never uses twice.
func identities(t *testing.T, pf pci.Address) []uint64 {
	t.Helper()
	var inodes []uint64
	for i := range card.Number(t, pf, "sriov_numvfs") {
		var stat unix.Stat_t
		must.Succeed(t, unix.Stat(filepath.Join(card.Devices, string(card.VF(t, pf, i))), &stat))
		inodes = append(inodes, stat.Ino)
	}
	return inodes
}

// TestSupply checks DevicePool.spec.numVFs on a real PF.
func TestSupply(t *testing.T) {
	card.InGuest(t, "igb")
	if pf := os.Getenv(killedSupply); pf != "" {
		dieBetween(t, pci.Address(pf))
	}

	pfs := card.PFs(t)
	pf := pfs[len(pfs)-1] // not the first, which other tests use
	first := card.Number(t, pf, "sriov_numvfs")
	card.SetAttribute(t, pf, "sriov_numvfs", "0")
	s := newSupplier(t, pf)
	t.Cleanup(func() {
		s.want(int32(first))
		end := s.run(t)
		s.made(t, first)
		end()
	})

	t.Run("VFs are made at a PF without VFs", func(t *testing.T) {
		defer s.run(t)()
		s.want(2)
		s.made(t, 2)
		s.wrote(t, 2)
	})

	t.Run("nothing is written where there are as many", func(t *testing.T) {
		before := identities(t, pf)
		defer s.run(t)()
		s.want(2)
		s.made(t, 2)
		s.wrote(t)
		if now := identities(t, pf); !slices.Equal(before, now) {
			t.Errorf("VFs %v are new, before they were %v", now, before)
		}
	})

	t.Run("a PF in use is not changed until it is free", func(t *testing.T) { supplyInUse(t, s) })

	t.Run("more VFs than the PF can have (ERANGE)", func(t *testing.T) {
		before := identities(t, pf)
		defer s.run(t)()

		s.want(9)
		s.short(t, v1alpha1.ReasonOutOfRange, "can have 7 VFs at most, not 9")
		s.wrote(t)
		if now := identities(t, pf); !slices.Equal(before, now) {
			t.Errorf("VFs %v are new, before they were %v", now, before)
		}

		card.SetAttribute(t, pf, "sriov_numvfs", "0")
		err := os.WriteFile(filepath.Join(card.Devices, string(pf), "sriov_numvfs"), []byte("9"), 0)
		if !errors.Is(err, unix.ERANGE) {
			t.Errorf("the kernel answers %v, want %v", err, unix.ERANGE)
		}
	})

	t.Run("somebody else makes VFs at the same moment (EBUSY)", func(t *testing.T) {
		defer s.run(t)()
		s.set(func() { s.before = func(int) { card.SetAttribute(t, pf, "sriov_numvfs", "1") } })
		s.want(2)
		s.short(t, v1alpha1.ReasonBusy, "does somebody else change its VFs?")
		s.made(t, 2)
		s.wrote(t, 2, 0, 2)
	})

	t.Run("killed between taking VFs away and making them", func(t *testing.T) {
		child := exec.Command("/proc/self/exe", "-test.run=^TestSupply$", "-test.v")
		child.Env = append(os.Environ(), killedSupply+"="+string(pf))
		output, err := child.CombinedOutput()
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != -1 {
			t.Fatalf("the other process was not killed: %v\n%s", err, output)
		}
		if n := card.Number(t, pf, "sriov_numvfs"); n != 0 {
			t.Fatalf("the other process left %d VFs, want 0", n)
		}

		s.want(3)
		defer s.run(t)()

		s.made(t, 3)
		s.wrote(t, 3)
	})

	t.Run("a driver that makes no VFs refuses", func(t *testing.T) {
		defer s.run(t)()
		s.want(0)
		s.made(t, 0)
		card.Set(t, "/sys/bus/pci/drivers/igb/unbind", string(pf))
		s.want(1)
		s.short(t, v1alpha1.ReasonNotSupported, "has no driver")
		card.SetAttribute(t, pf, "driver_override", "vfio-pci")
		card.Set(t, "/sys/bus/pci/drivers_probe", string(pf))
		s.short(t, v1alpha1.ReasonNotSupported, "has driver vfio-pci, which makes no VFs")
		card.Set(t, "/sys/bus/pci/drivers/vfio-pci/unbind", string(pf))
		card.SetAttribute(t, pf, "driver_override", "\n")
		card.Set(t, "/sys/bus/pci/drivers_probe", string(pf))
		s.made(t, 1) // another driver is bound, so the supply tries without a request
		must.Succeed(t, netlink.LinkSetUp(linkOf(t, card.Netdev(pf))))
	})
}

// dieBetween asks for 3 VFs and kills this process once the old VFs are gone.
func dieBetween(t *testing.T, pf pci.Address) {
	s := newSupplier(t, pf)
	s.want(3)

	s.set(func() {
		s.before = func(int) {
			s.set(func() { s.before = func(int) { _ = unix.Kill(os.Getpid(), unix.SIGKILL) } })
		}
	})

	s.run(t)
	s.made(t, 3)
}

// supplyInUse asks for 1 VF while a PF with 2 VFs is in use, in every known way. The PF is changed
// afterwards in one case only, because a card takes seconds.
func supplyInUse(t *testing.T, s *supplier) {
	vf := card.VF(t, s.pf, 1)
	id := function.ID{Address: vf}
	var name string
	var inside *netns.Namespace
	leave := func(t *testing.T) {
		name, inside = card.Netdev(vf), netns.New(t)
		must.Succeed(t, netlink.LinkSetNsFd(linkOf(t, name), inside.Fd()))
	}

	comeBack := func(t *testing.T) { toHost(t, inside, name) }
	for _, c := range []struct {
		name, message string
		begin, end    func(t *testing.T)
		changes       bool // the number changes when the use ends
	}{
		{
			"VF in a pod", string(vf) + " belongs to pod default/web",
			func(t *testing.T) {
				must.Succeed(t, s.journal.Put(journal.Attachment{
					Function: id, PF: s.pf, VFIndex: 1, State: journal.Reserved,
					Pod: journal.Pod{Namespace: "default", Name: "web"},
				}))
				leave(t)
			},
			func(t *testing.T) {
				comeBack(t)
				must.Succeed(t, s.journal.Delete(id))
			},
			true,
		},
		{
			"VF in a network namespace that nobody knows", "VF " + string(vf) +
				" has its netdev in another network namespace",
			leave, comeBack, false,
		},
		{
			"VF of another device plugin's pod", string(vf) +
				" belongs to pod default/other (container main)",
			func(*testing.T) {
				s.kubelet.Set(kubelettest.Pod("other", "intel.com/vf", string(vf)))
			},
			func(*testing.T) { s.kubelet.Set() },
			false,
		},
		{
			"VF with vfio-pci", "has driver vfio-pci and no netdev",
			func(t *testing.T) {
				card.Set(t, "/sys/bus/pci/drivers/igbvf/unbind", string(vf))
				card.SetAttribute(t, vf, "driver_override", "vfio-pci")
				card.Set(t, "/sys/bus/pci/drivers_probe", string(vf))
			},
			func(t *testing.T) {
				card.Set(t, "/sys/bus/pci/drivers/vfio-pci/unbind", string(vf))
				card.SetAttribute(t, vf, "driver_override", "\n")
				card.Set(t, "/sys/bus/pci/drivers_probe", string(vf))
			},
			false,
		},
		{
			"VF with an address of the host", "which has address 192.0.2.7/24",
			func(t *testing.T) {
				address, err := netlink.ParseAddr("192.0.2.7/24")
				must.Succeed(t, err)
				must.Succeed(t, netlink.AddrAdd(linkOf(t, card.Netdev(vf)), address))
			},
			func(t *testing.T) {
				address, err := netlink.ParseAddr("192.0.2.7/24")
				must.Succeed(t, err)
				must.Succeed(t, netlink.AddrDel(linkOf(t, card.Netdev(vf)), address))
			},
			false,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := identities(t, s.pf)
			c.begin(t)
			defer s.run(t)()

			s.want(1)
			s.short(t, v1alpha1.ReasonInUse, c.message)
			s.wrote(t)
			if now := identities(t, s.pf); !slices.Equal(before, now) {
				t.Errorf("VFs %v are new, before they were %v", now, before)
			}

			if c.changes {
				c.end(t)
				s.made(t, 1)
				s.wrote(t, 0, 1)
				s.want(2)
				s.made(t, 2)
				return
			}

			s.want(2)
			s.made(t, 2)
			s.wrote(t)
			c.end(t)
		})
	}
}
