// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	card  pci.Address = "0000:3b:00.0"
	other pci.Address = "0000:3b:00.1"
)

// kernel is a devlink whose drivers behave as the test says.
type kernel struct {
	mutex     sync.Mutex
	reporters []devlink.Reporter
	ports     []devlink.Port
	hangs     <-chan time.Time // when the first read ends
	refuses   error            // error of each read
	looks     int
	changed   func()
}

func (k *kernel) Reporters() ([]devlink.Reporter, error) {
	if k.hangs != nil {
		<-k.hangs
		k.hangs = nil
	}
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.looks++
	return slices.Clone(k.reporters), k.refuses
}

func (k *kernel) Ports() ([]devlink.Port, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return slices.Clone(k.ports), k.refuses
}

func (k *kernel) follow(ctx context.Context, changed func()) {
	k.mutex.Lock()
	k.changed = changed
	k.mutex.Unlock()
	changed()
	<-ctx.Done()
}

// set makes a change, and reports it if a Follow listens.
func (k *kernel) set(change func()) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	change()
	if k.changed != nil {
		k.changed()
	}
}

func failed(d devlink.Device, port int, name string) devlink.Reporter {
	return devlink.Reporter{Device: d, Port: port, Name: name, Failed: true, Errors: 1}
}

func functions() []function.Function {
	vf := func(pf, address pci.Address, index int) function.Function {
		return function.Function{
			ID: function.ID{Address: address}, Kind: function.VF, PF: pf, Index: index,
		}
	}

	sf := func(sfnum uint32, device string) function.Function {
		return function.Function{
			ID: function.SubfunctionID(card, sfnum), Kind: function.SF, PF: card, Index: int(sfnum),
			AuxDevice: device,
		}
	}

	potential := sf(90, "")
	potential.Potential = true
	return []function.Function{
		{ID: function.ID{Address: card}, Kind: function.PF, PF: card, Index: -1},
		vf(card, "0000:3b:00.2", 0), vf(card, "0000:3b:00.3", 1),
		sf(0, "mlx5_core.sf.2"), sf(88, "mlx5_core.sf.4"), potential,
		{ID: function.ID{Address: other}, Kind: function.PF, PF: other, Index: -1},
		vf(other, "0000:3b:01.2", 0),
	}
}

// auxiliary returns a sysfs with auxiliary devices as mlx5 makes them.
func auxiliary(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	bus := filepath.Join(root, "bus/auxiliary/devices")
	if err := os.MkdirAll(bus, 0o755); err != nil {
		t.Fatal(err)
	}

	for _, dir := range []string{
		"0000:3b:00.0/mlx5_core.eth.0", "0000:3b:00.2/mlx5_core.eth.2",
		"0000:3b:00.0/mlx5_core.sf.4", "0000:3b:00.0/mlx5_core.sf.4/mlx5_core.eth.4",
	} {
		dir = filepath.Join("devices/pci0000:3a", dir)
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join("../../..", dir),
			filepath.Join(bus, filepath.Base(dir))); err != nil {
			t.Fatal(err)
		}
	}

	return root
}

func TestReportersSpeakFor(t *testing.T) {
	pf, vf := devlink.OfPCI(card), devlink.OfPCI("0000:3b:00.3")
	aux := func(name string) devlink.Device { return devlink.Device{Bus: "auxiliary", Name: name} }
	ports := []devlink.Port{
		{Device: pf, Index: 0, Flavour: devlink.Physical},
		{Device: pf, Index: 1, Flavour: devlink.PCIVF, VF: 0},
		{Device: pf, Index: 2, Flavour: devlink.PCISF, SF: 88},
		{Device: pf, Index: 3, Flavour: devlink.PCIVF, VF: 1, Controller: 1, External: true},
		{Device: pf, Index: 4, Flavour: devlink.PCIPF, Controller: 1, External: true},
		{Device: pf, Index: 5, Flavour: devlink.PCIPF},
		{Device: vf, Index: 0, Flavour: "virtual"},
		{Device: aux("mlx5_core.sf.4"), Index: 0, Flavour: "virtual"},
		{Device: aux("mlx5_core.eth.0"), Index: 65535, Flavour: devlink.Physical},
	}

	root := auxiliary(t)
	for _, test := range []struct {
		name     string
		reporter devlink.Reporter
		want     []string
	}{
		{"the PF's device", failed(pf, -1, "fw_fatal"), []string{
			"0000:3b:00.0", "0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.0/sf0", "0000:3b:00.0/sf88",
			"0000:3b:00.0/sf90"}},
		{"a VF's device", failed(vf, -1, "fw"), []string{"0000:3b:00.3"}},
		{"a VF's netdev", failed(vf, 0, "tx"), []string{"0000:3b:00.3"}},
		{"the PF's netdev", failed(pf, 0, "tx"), []string{"0000:3b:00.0"}},
		{"the port of a VF", failed(pf, 1, "vnic"), []string{"0000:3b:00.2"}},
		{"the port of an SF", failed(pf, 2, "vnic"), []string{"0000:3b:00.0/sf88"}},
		{"the port of another host's VF", failed(pf, 3, "vnic"), nil},
		{"the port of another host's PF", failed(pf, 4, "vnic"), nil},
		{"the port of the PF", failed(pf, 5, "vnic"), []string{"0000:3b:00.0"}},
		{"a port that is gone", failed(pf, 9, "vnic"), nil},
		{"an SF's device", failed(aux("mlx5_core.sf.4"), -1, "fw"), []string{"0000:3b:00.0/sf88"}},
		{"an SF's port", failed(aux("mlx5_core.sf.4"), 0, "tx"), []string{"0000:3b:00.0/sf88"}},
		{"the device of an SF's netdev", failed(aux("mlx5_core.eth.4"), -1, "tx"),
			[]string{"0000:3b:00.0/sf88"}},
		{"the device of a VF's netdev", failed(aux("mlx5_core.eth.2"), -1, "tx"),
			[]string{"0000:3b:00.2"}},
		{"the device of the PF's netdev", failed(aux("mlx5_core.eth.0"), -1, "tx"),
			[]string{"0000:3b:00.0"}},
		{"the port of the PF's netdev", failed(aux("mlx5_core.eth.0"), 65535, "tx"),
			[]string{"0000:3b:00.0"}},
		{"an auxiliary device that is gone", failed(aux("mlx5_core.eth.7"), -1, "tx"), nil},
		{"something else", failed(devlink.Device{Bus: "netdevsim", Name: "netdevsim1"}, -1, "fw"),
			nil},
		{"no error", devlink.Reporter{Device: pf, Port: -1, Name: "fw", Errors: 3, Recoveries: 3},
			nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := &kernel{reporters: []devlink.Reporter{test.reporter}, ports: ports}
			r := NewReporters(ReportersOptions{SysRoot: root, Devlink: k, Changed: func() {}})
			if err := r.look(); err != nil {
				t.Fatal(err)
			}

			var got []string
			for _, f := range functions() {
				message := r.Fault(f)
				if message == "" {
					continue
				}

				got = append(got, f.ID.String())
				if where := test.reporter.Handle() + " reporter " +
					test.reporter.Name; !strings.Contains(message, where) {
					t.Errorf("message %q lacks %q", message, where)
				}
			}

			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// following is a running Reporters.
type following struct {
	*Reporters
	kernel   *kernel
	registry *prometheus.Registry
	changes  atomic.Int32
	mutex    sync.Mutex
	logged   []string
}

func follow(t *testing.T, k *kernel) *following {
	t.Helper()
	f := &following{kernel: k, registry: prometheus.NewRegistry()}
	log := funcr.New(func(_, args string) {
		f.mutex.Lock()
		defer f.mutex.Unlock()
		f.logged = append(f.logged, args)
	}, funcr.Options{Verbosity: 1})

	f.Reporters = NewReporters(ReportersOptions{
		Devlink: k, Follow: k.follow, Changed: func() {
			f.changes.Add(1)
		}, Registry: f.registry, Log: log,
	})

	must.Run(t, f.Run)
	if !f.Synced(t.Context()) {
		t.Fatal("not synced")
	}

	synctest.Wait()
	return f
}

func (f *following) is(t *testing.T, faulty bool, changes int) {
	t.Helper()
	synctest.Wait()
	if message, n := f.Fault(functions()[0]), int(f.changes.Load()); (message != "") != faulty ||
		n != changes {
		t.Errorf("fault %q after %d changes; want %v after %d", message, n, faulty, changes)
	}
}

func TestReportersFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fw := failed(devlink.OfPCI(card), -1, "fw")
		f := follow(t, &kernel{})
		f.is(t, false, 0)
		time.Sleep(time.Hour)
		synctest.Wait()
		// One read happens at the start, and one when Follow begins to listen. They are one read if
		// Follow begins before the first.
		if f.kernel.looks < 1 || f.kernel.looks > 2 {
			t.Errorf("%d looks at a kernel that told nothing", f.kernel.looks)
		}

		f.kernel.set(func() { f.kernel.reporters = []devlink.Reporter{fw} })
		synctest.Wait() // no time passes
		f.is(t, true, 1)
		if n := testutil.ToFloat64(f.failed); n != 1 {
			t.Errorf("metric tells %v failed reporters", n)
		}

		time.Sleep(time.Second)

		f.kernel.set(func() { f.kernel.reporters[0].Errors++ })
		synctest.Wait()
		f.is(t, true, 1) // the faults did not change

		synctest.Wait()
		looks := f.kernel.looks

		for range 50 { // as if ports appeared and disappeared
			f.kernel.set(func() {})
			time.Sleep(time.Millisecond)
		}

		synctest.Wait()
		if n := f.kernel.looks - looks; n > 1 {
			t.Errorf("%d looks in 50 ms", n)
		}

		f.kernel.set(func() { f.kernel.reporters = nil })
		time.Sleep(2 * pause)
		f.is(t, false, 2)
		if n := testutil.ToFloat64(f.failed); n != 0 {
			t.Errorf("metric tells %v failed reporters", n)
		}
		if n := len(f.logged); n != 2 {
			t.Errorf("logged %q, want the error and the recovery", f.logged)
		}
	})
}

// TestReportersUnreadable checks that known faults stay as long as the kernel cannot be read.
func TestReportersUnreadable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follow(t,
			&kernel{reporters: []devlink.Reporter{failed(devlink.OfPCI(card), -1, "fw")}})
		f.is(t, true, 1)
		time.Sleep(time.Second)
		f.kernel.set(func() { f.kernel.reporters, f.kernel.refuses = nil, errors.New("no memory") })
		time.Sleep(time.Second)
		f.is(t, true, 1)
		f.kernel.mutex.Lock()
		f.kernel.refuses = nil // without a report of a change
		f.kernel.mutex.Unlock()
		time.Sleep(time.Minute)
		f.is(t, false, 2)
	})
}

// TestReportersUnreadableAtFirst checks that a read that failed does not count as one that found no
// faults.
func TestReportersUnreadableAtFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kernel{
			reporters: []devlink.Reporter{failed(devlink.OfPCI(card), -1, "fw")},
			refuses:   errors.New("no memory"),
		}
		time.AfterFunc(time.Second, func() { k.set(func() { k.refuses = nil }) })

		f := follow(t, k)
		f.is(t, true, 1)
	})
}

// TestReportersHang checks that the agent does not wait for ever for a card that hangs.
func TestReportersHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		f := follow(t,
			&kernel{hangs: time.After(time.Hour),
				reporters: []devlink.Reporter{failed(devlink.OfPCI(card), -1, "fw")}})
		if took := time.Since(begin); took != lookTime {
			t.Errorf("waited %s, want %s", took, lookTime)
		}

		f.is(t, false, 0)
		time.Sleep(time.Hour)
		f.is(t, true, 1)
	})
}
