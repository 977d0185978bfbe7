// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// Attach with real namespaces is tested in life_test.go, together with the way back.

var (
	vf = function.ID{Address: "0000:3b:02.1"}
	pf = function.ID{Address: "0000:3b:00.0"}
)

func claimedVF() journal.Attachment {
	return journal.Attachment{
		Function: vf, PF: pf.Address, PFName: "old", VFIndex: 1,
		Claim:     journal.Claim{Namespace: "default", Name: "c", UID: "claim-1"},
		Interface: function.Interface{Name: "net1"},
	}
}

// netdevs has the names of netdevs by Function.
type netdevs map[function.ID]string

func (n netdevs) Netdev(id function.ID) (string, error) {
	name, ok := n[id]
	if !ok {
		return "", fmt.Errorf("Function %s is gone", id)
	}
	return name, nil
}

// engine stands for one netdev and records its calls.
type engine struct {
	// parent is the device of the netdev, on the PCI bus.
	parent string
	// fail is the error of Attach.
	fail error
	// restore is the error of Restore. dead says that the namespace does not exist any more.
	restore error
	dead    bool
	// rebinding, if set, replaces Restore.
	rebinding func(*netdev.Rebinding) error
	// taken has the names that other interfaces of the pod have.
	taken  []string
	calls  []string
	device netdev.Device
	// restores counts the calls of Restore, for tests that read it while the manager runs.
	restores int64

	// differences is the result of Check.
	differences []string
}

func (e *engine) Plan(
	_ context.Context, device netdev.Device, netNS string, want function.Interface,
) (netdev.Snapshot, netdev.Place, error) {
	e.device = device
	if slices.Contains(e.taken, want.Name) {
		return netdev.Snapshot{}, netdev.Place{}, fmt.Errorf("interface name %q: %w", want.Name,
			netdev.ErrNameTaken)
	}
	return netdev.Snapshot{
		Name: device.Name, Identity: netdev.Identity{Parent: e.parent, Bus: "pci"},
	}, netdev.Place{NetNS: netNS, Cookie: 7, Index: 3}, nil
}

func (e *engine) Attach(
	_ context.Context, _ netdev.Device, _ netdev.Snapshot, _ netdev.Place, want function.Interface,
) (netdev.Observed, error) {
	e.calls = append(e.calls, "attach")
	return netdev.Observed{Name: want.Name, Index: 5}, e.fail
}

func (e *engine) Add(
	_ context.Context, a netdev.Attached, addresses []netip.Prefix, _ []function.Route,
) (netdev.Observed, error) {
	e.calls = append(e.calls, fmt.Sprintf("add %v", addresses))
	observed := a.Observed
	observed.Addresses = append(slices.Clone(observed.Addresses), addresses...)
	return observed, e.fail
}

func (e *engine) Check(
	_ context.Context, device netdev.Device, _ netdev.Attached,
) ([]string, error) {
	e.device = device
	return e.differences, e.fail
}

func (e *engine) Alive(netdev.Place) (bool, error) { return !e.dead, nil }

func (e *engine) Holds(netdev.Place, netdev.Identity) (bool, error) { return !e.dead, nil }

func (e *engine) Restore(
	_ context.Context, device netdev.Device, before netdev.Snapshot, _ netdev.Place,
) (netdev.Restored, error) {
	e.calls = append(e.calls, "restore")
	atomic.AddInt64(&e.restores, 1)
	if e.rebinding != nil && before.Name != "" {
		return netdev.Restored{}, e.rebinding(device.Rebinding)
	}
	return netdev.Restored{}, e.restore
}

// failingJournal refuses to write one state.
type failingJournal struct {
	*journal.Journal
	refuses journal.State
}

var errDiskFull = errors.New("disk full")

func (j failingJournal) Put(a journal.Attachment) error {
	if a.State == j.refuses {
		return errDiskFull
	}
	return j.Journal.Put(a)
}

func openJournal(t *testing.T) *journal.Journal {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func sandbox() Sandbox {
	return Sandbox{
		ID: "s1", NetNS: "/run/netns/x",
		Pod: journal.Pod{Namespace: "default", Name: "p", UID: "pod-1"},
	}
}

func TestAttach(t *testing.T) {
	refusal := errors.New("refused")
	tests := map[string]struct {
		engine  engine
		netdevs netdevs
		refuses journal.State
		err     error
		calls   []string // of the engine
		state   journal.State
	}{
		"works": {
			engine: engine{parent: "0000:3b:02.1"}, netdevs: netdevs{vf: "ens3f0v1", pf: "ens3f0"},
			calls: []string{"attach"}, state: journal.Attached,
		},
		"refused by the engine": {
			engine:  engine{parent: "0000:3b:02.1", fail: refusal},
			netdevs: netdevs{vf: "ens3f0v1", pf: "ens3f0"},
			err:     refusal, calls: []string{"attach", "restore"}, state: journal.Reserved,
		},
		"intent cannot be written": {
			engine: engine{parent: "0000:3b:02.1"}, netdevs: netdevs{vf: "ens3f0v1", pf: "ens3f0"},
			refuses: journal.Attaching,
			err:     errDiskFull, state: journal.Reserved,
		},
		"result cannot be written": {
			engine: engine{parent: "0000:3b:02.1"}, netdevs: netdevs{vf: "ens3f0v1", pf: "ens3f0"},
			refuses: journal.Attached,
			err:     errDiskFull, calls: []string{"attach", "restore"}, state: journal.Reserved,
		},
		"another Function's netdev under the name": {
			engine: engine{parent: "0000:3b:02.2"}, netdevs: netdevs{vf: "ens3f0v1", pf: "ens3f0"},
			err: netdev.ErrNoNetdev, state: journal.Reserved,
		},
		"no netdev": {netdevs: netdevs{vf: "", pf: "ens3f0"}, err: netdev.ErrNoNetdev,
			state: journal.Reserved},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := openJournal(t)
			a := New(failingJournal{j, test.refuses}, &test.engine, test.netdevs,
				Options{BootID: "boot-1"}, logr.Discard())
			if err := a.Reserve(t.Context(), claimedVF()); err != nil {
				t.Fatal(err)
			}

			observed, err := a.Attach(t.Context(), vf, sandbox())
			if !errors.Is(err, test.err) ||
				err != nil && !strings.HasPrefix(err.Error(), "Function 0000:3b:02.1: ") {
				t.Errorf("error %v, want %v of the Function", err, test.err)
			}

			record, _ := j.Get(vf)
			if record.State != test.state {
				t.Errorf("state %s, want %s", record.State, test.state)
			}
			if diff := cmp.Diff(test.calls, test.engine.calls); diff != "" {
				t.Errorf("engine (-want +got):\n%s", diff)
			}
			if test.err != nil {
				return
			}

			wantDevice := netdev.Device{
				Name: "ens3f0v1", PF: &netdev.PF{Name: "ens3f0", Address: "0000:3b:00.0", VF: 1},
				Port: &function.EswitchPort{PF: "0000:3b:00.0", Number: 1},
			}
			if diff := cmp.Diff(wantDevice, test.engine.device); diff != "" {
				t.Errorf("device (-want +got):\n%s", diff)
			}

			if record.Sandbox != "s1" || record.BootID != "boot-1" || record.Pod.UID != "pod-1" ||
				record.AttachedAt.IsZero() ||
				record.Place != (netdev.Place{NetNS: "/run/netns/x", Cookie: 7, Index: 5}) ||
				record.Observed.Name != observed.Name {
				t.Errorf("record %+v", record)
			}
		})
	}
}

// TestAttachWithoutDriver checks that the error for a Function whose driver has just gone says so,
// although the inventory does not know it yet.
func TestAttachWithoutDriver(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		driver string
		err    error
		want   bool
	}{
		"no driver":      {"", nil, true},
		"driver":         {"igbvf", nil, false},
		"cannot be read": {"", errDiskFull, false},
	} {
		a := New(openJournal(t), &engine{}, netdevs{vf: "", pf: "ens3f0"}, Options{
			BootID: "boot-1", Driver: func(function.ID) (string, error) { return test.driver, test.err },
		}, logr.Discard())
		must.Succeed(t, a.Reserve(t.Context(), claimedVF()))
		_, err := a.Attach(t.Context(), vf, sandbox())
		unusable, says := errors.AsType[UnusableError](err)
		if !errors.Is(err, netdev.ErrNoNetdev) || says != test.want ||
			says && !strings.Contains(unusable.Error(), "has no driver") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestAttachIsTraced: an attach without a claim is traced by its pod.
func TestAttachIsTraced(t *testing.T) {
	t.Parallel()
	exporter := tracetest.NewInMemoryExporter()
	tracer, err := tracing.New(sdktrace.NewSimpleSpanProcessor(exporter), "xpu-agent",
		logr.Discard())
	if err != nil {
		t.Fatal(err)
	}

	a := New(openJournal(t), &engine{fail: errDiskFull}, netdevs{vf: "ens3f0v1", pf: "ens3f0"},
		Options{BootID: "boot-1", Tracer: tracer}, logr.Discard())
	of := sandbox()
	of.Pod.UID = "4b1a7e9c-52d3-4c1e-9f00-0123456789ab"
	wanted := claimedVF()
	wanted.Claim, wanted.Pod, wanted.CNI = journal.Claim{}, of.Pod, &journal.CNI{
		ContainerID: "s1", IfName: "net1",
	}
	if err := a.Reserve(t.Context(), wanted); err != nil {
		t.Fatal(err)
	}

	_, err = a.Attach(t.Context(), vf, of)
	spans := exporter.GetSpans()
	if err == nil || len(spans) != 1 || spans[0].Name != "attach Function" ||
		spans[0].Status.Code != codes.Error ||
		spans[0].SpanContext.TraceID().String() != "4b1a7e9c52d34c1e9f000123456789ab" {
		t.Errorf("error %v, spans %v; want a failed attach Function of the pod's trace", err, spans)
	}
}

func TestReserve(t *testing.T) {
	t.Parallel()
	j := openJournal(t)
	a := New(j, &engine{}, netdevs{}, Options{BootID: "boot-1"}, logr.Discard())
	first := claimedVF()
	if err := a.Reserve(t.Context(), first); err != nil {
		t.Fatal(err)
	}

	had, _ := j.Get(vf)
	changed := first
	changed.Interface.Name = "net2"
	changed.State, changed.Sandbox = journal.Attached, "not the caller's to say"
	if err := a.Reserve(t.Context(), changed); err != nil {
		t.Fatal(err)
	}

	has, _ := j.Get(vf)
	if has.Interface.Name != "net2" || has.State != journal.Reserved || has.Sandbox != "" ||
		!has.ReservedAt.Equal(had.ReservedAt) {
		t.Errorf("record %+v", has)
	}

	for want, owner := range map[string]func(*journal.Attachment){
		"belongs to claim default/c (UID claim-1)": func(*journal.Attachment) {},
		"belongs to pod default/p (UID pod-1)": func(a *journal.Attachment) {
			a.Claim, a.Pod = journal.Claim{}, journal.Pod{
				Namespace: "default", Name: "p", UID: "pod-1",
			}
		},
		"belongs to a pod by an extended resource": func(a *journal.Attachment) {
			a.Claim = journal.Claim{}
		},
	} {
		mine := has
		owner(&mine)
		if err := j.Put(mine); err != nil {
			t.Fatal(err)
		}

		other := claimedVF()
		other.Claim.UID = "claim-2"
		if err := a.Reserve(t.Context(), other); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

// TestReserveForTheNextPod: the kubelet allocates a Function again whose last pod never asked for
// it by CNI. This makes a new reservation, and a sweep that is just releasing the old reservation
// must not touch the new one.
func TestReserveForTheNextPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := openJournal(t)
		a := New(j, &engine{}, netdevs{}, Options{BootID: "boot-1"}, logr.Discard())
		next := claimedVF()
		next.Claim, next.Pod, next.Interface.Name = journal.Claim{}, journal.Pod{}, ""
		next.Resource = "xpu.opiproject.org/fast"
		for i := range 2 {
			if err := a.Reserve(t.Context(), next); err != nil {
				t.Fatal(err)
			}
			if has, _ := j.Get(vf); !has.ReservedAt.Equal(time.Now()) {
				t.Errorf("reservation %d is of %v, want now", i, has.ReservedAt)
			}
			time.Sleep(time.Minute)
		}

		had, _ := j.Get(vf)
		taken := next
		taken.Interface.Name, taken.CNI = "net1", &journal.CNI{ContainerID: "s1", IfName: "net1"}
		if err := a.Reserve(t.Context(), taken); err != nil {
			t.Fatal(err)
		}
		if has, _ := j.Get(vf); !has.ReservedAt.Equal(had.ReservedAt) {
			t.Errorf("the pod that came changed the time to %v, want %v", has.ReservedAt,
				had.ReservedAt)
		}
	})
}

// SFs and PFs have no properties that a PF enforces. A PF without a netdev cannot be asked. VFs and
// SFs may have a port on an eswitch.
func TestDevice(t *testing.T) {
	t.Parallel()
	sf := function.SubfunctionID(pf.Address, 88)
	names := netdevs{vf: "v", pf: "p", sf: "s"}
	vfPort := &function.EswitchPort{PF: "0000:3b:00.0", Number: 1}
	for name, test := range map[string]struct {
		record  journal.Attachment
		netdevs netdevs
		want    netdev.Device
	}{
		"VF": {
			journal.Attachment{Function: vf, PF: pf.Address, VFIndex: 1}, names,
			netdev.Device{
				Name: "v", PF: &netdev.PF{Name: "p", Address: "0000:3b:00.0", VF: 1}, Port: vfPort,
			},
		},
		"PF": {journal.Attachment{Function: pf, PF: pf.Address, VFIndex: -1}, names,
			netdev.Device{Name: "p"}},
		"SF": {
			journal.Attachment{Function: sf, PF: pf.Address, VFIndex: 88}, names,
			netdev.Device{
				Name: "s", Port: &function.EswitchPort{PF: "0000:3b:00.0", SF: true, Number: 88},
			},
		},
		"VF of no name": {
			journal.Attachment{Function: vf, PF: pf.Address, VFIndex: 1}, netdevs{vf: "v"},
			netdev.Device{Name: "v", Port: vfPort},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Device(test.netdevs, test.record)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("device (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAttachUnnamed: an interface without a requested name gets a name that the pod does not have
// yet, for example beside a network of Multus. A requested name that is in use is refused.
func TestAttachUnnamed(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		any  bool
		want string
	}{"any name": {true, "net4"}, "asked for": {false, ""}} {
		t.Run(name, func(t *testing.T) {
			j := openJournal(t)
			e := &engine{parent: string(vf.Address), taken: []string{"net1", "net2"}}
			m := New(j, e, netdevs{vf: "v", pf: "p"}, Options{BootID: "boot-1"}, logr.Discard())
			other := claimedVF()
			other.Function.Address, other.Interface.Name, other.Pod, other.State = "0000:3b:02.2", "net3", sandbox().Pod, journal.Reserved
			if err := j.Put(other); err != nil {
				t.Fatal(err)
			}

			want := claimedVF()
			want.AnyName, want.Pod = test.any, sandbox().Pod
			if err := m.Reserve(t.Context(), want); err != nil {
				t.Fatal(err)
			}

			observed, err := m.Attach(t.Context(), vf, sandbox())
			if test.want == "" {
				if !errors.Is(err, netdev.ErrNameTaken) {
					t.Errorf("error %v, want %v", err, netdev.ErrNameTaken)
				}
				return
			}

			record, _ := j.Get(vf)
			if err != nil || observed.Name != test.want || record.Interface.Name != test.want {
				t.Errorf("attached as %q, record says %q, error %v; want %q", observed.Name,
					record.Interface.Name, err, test.want)
			}
		})
	}
}

// containers records which Functions containers may get.
type containers struct {
	journal *journal.Journal
	calls   []string
	err     error
}

func (c *containers) Expose(a journal.Attachment) error {
	now, _ := c.journal.Get(a.Function)
	call := "withdraw"
	if a.State == journal.Attached {
		call = "offer"
	}
	c.calls = append(c.calls, fmt.Sprintf("%s while %s", call, now.State))
	return c.err
}

// TestContainersGetOnlyWhatIsAttached: a container may get a Function from the moment when it is in
// the pod until just before it leaves. A Function that cannot be exposed is not attached.
func TestContainersGetOnlyWhatIsAttached(t *testing.T) {
	t.Parallel()
	j := openJournal(t)
	e, c := &engine{parent: string(vf.Address)}, &containers{journal: j}
	m := New(j, e, netdevs{vf: "v", pf: "p"}, Options{BootID: "boot-1", Expose: c.Expose},
		logr.Discard())
	if err := m.Reserve(t.Context(), claimedVF()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Attach(t.Context(), vf, sandbox()); err != nil {
		t.Fatal(err)
	}
	if err := m.Detach(t.Context(), vf, "s1"); err != nil {
		t.Fatal(err)
	}

	if want := []string{
		"offer while Attached", "withdraw while Detaching",
	}; !slices.Equal(c.calls, want) {
		t.Errorf("told %q, want %q", c.calls, want)
	}

	c.err = errors.New("disk full")
	if _, err := m.Attach(t.Context(), vf, sandbox()); !errors.Is(err, c.err) {
		t.Errorf("error %v, want %v", err, c.err)
	}
}
