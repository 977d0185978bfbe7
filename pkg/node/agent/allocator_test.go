// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// workshop sets up Functions, and is an inventory that has them afterwards.
type workshop struct {
	makes   map[function.ID]*journal.Setup
	deleted int
	err     error
}

func (w *workshop) Plan(_ context.Context, want journal.Attachment) (*journal.Setup, error) {
	return want.Setup, nil
}

func (w *workshop) SetUp(_ context.Context, a journal.Attachment) error {
	w.makes[a.Function] = a.Setup
	return w.err
}

func (w *workshop) TearDown(_ context.Context, a journal.Attachment) error {
	delete(w.makes, a.Function)
	w.deleted++
	return nil
}

func (w *workshop) Get(id function.ID) (function.Function, bool) {
	_, made := w.makes[id]
	return function.Function{ID: id, Kind: function.SF, Netdev: "eth7"}, made ||
		id.Subfunction == ""
}

// newAllocations returns an allocator for a pool whose SFs are made when they are allocated.
func newAllocations(t *testing.T) (*podAllocator, *journal.Journal, *workshop, pool.Pool) {
	t.Helper()
	records, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { records.Close() })

	w, log := &workshop{makes: map[function.ID]*journal.Setup{}}, testr.New(t)
	pf := function.Function{ID: function.ID{Address: "0000:3b:00.0"}, PFName: "ens3f0"}
	return &podAllocator{
			mac:    func(id function.ID) function.MAC { return provisioning.MAC("node1", id) },
			portID: func(function.ID) string { return "" },
			find:   w.Get, rdma: &rdmaMoves{}, log: log,
			lifecycle: lifecycle.New(records, nil, nil, lifecycle.Options{Setup: w}, log),
		}, records, w, pool.Pool{
			Name: "fast", Functions: []function.Function{function.PotentialSF(pf, 1)},
			Spec: v1alpha1.DevicePoolSpec{
				Publish: v1alpha1.PublishDevicePlugin,
				SFs:     &v1alpha1.SFSpec{FirstNumber: 1, Count: 1},
			},
		}
}

// TestAllocateMakesSF: an SF that the kubelet allocates is made with the MAC that the xPU will
// know, and deleted if no container gets it.
func TestAllocateMakesSF(t *testing.T) {
	a, records, w, p := newAllocations(t)
	f := p.Functions[0]
	got, err := a.Reserve(t.Context(), f, p)
	if err != nil || got.Potential || got.Netdev != "eth7" {
		t.Fatalf("Reserve = %+v, %v, want the SF as it is once it is made", got, err)
	}

	want := &journal.Setup{SF: true, MAC: provisioning.MAC("node1", f.ID)}
	if diff := cmp.Diff(want, w.makes[f.ID]); diff != "" {
		t.Errorf("made: -want +got\n%s", diff)
	}

	record, _ := records.Get(f.ID)
	if record.State != journal.Reserved || record.Resource != "xpu.opiproject.org/fast" ||
		record.Port != nil {
		t.Errorf("record %+v, want a reservation without Port: the pool provisions at ADD", record)
	}
	if _, err := a.Reserve(t.Context(), f, p); err != nil {
		t.Errorf("Reserve again: %v", err)
	}

	a.GiveUp(t.Context(), f, p)
	if len(w.makes) > 0 || len(records.All()) > 0 {
		t.Errorf("given up, there are still SFs %v and records %+v", w.makes, records.All())
	}
}

// TestAllocateCannotMakeSF: a partially made SF is deleted.
func TestAllocateCannotMakeSF(t *testing.T) {
	a, records, w, p := newAllocations(t)
	w.err = errors.New("no netdev")
	if _, err := a.Reserve(t.Context(), p.Functions[0], p); !errors.Is(err, w.err) {
		t.Errorf("Reserve = %v, want %v", err, w.err)
	}

	a.GiveUp(t.Context(), p.Functions[0], p)
	if len(w.makes) > 0 || len(records.All()) > 0 {
		t.Errorf("given up, there are still SFs %v and records %+v", w.makes, records.All())
	}
}

// TestAllocateAfterThePoolChanged: the next pod does not get the setup of an earlier Allocate whose
// pod never asked for the Function.
func TestAllocateAfterThePoolChanged(t *testing.T) {
	a, records, w, p := newAllocations(t)
	f := function.Function{ID: function.ID{Address: "0000:3b:02.0"}, Netdev: "ens3f0v0"}
	p.Spec = v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDevicePlugin, Driver: v1alpha1.DriverVFIO,
	}
	if _, err := a.Reserve(t.Context(), f, p); err != nil {
		t.Fatal(err)
	}
	if w.makes[f.ID].Driver != "vfio-pci" {
		t.Fatalf("set up with %+v, want vfio-pci", w.makes[f.ID])
	}

	p.Spec.Driver = ""
	if _, err := a.Reserve(t.Context(), f, p); err != nil {
		t.Fatal(err)
	}
	if w.makes[f.ID] != nil || len(records.All()) > 0 {
		t.Errorf("set up with %+v, records %+v, want neither", w.makes[f.ID], records.All())
	}
}

// TestAllocateReleasesTheLastTenant: a Function that was allocated to a pod which never asked for
// it by CNI, and which the kubelet does not know any more, is released with its hooks before the
// next pod gets it. The last tenant's port is down then.
func TestAllocateReleasesTheLastTenant(t *testing.T) {
	a, records, _, p := newAllocations(t)
	queue := &oneHook{journal: records}
	a.lifecycle = lifecycle.New(records, nil, nil, lifecycle.Options{Hooks: queue}, testr.New(t))
	f := function.Function{ID: function.ID{Address: "0000:3b:02.0"}, Netdev: "ens3f0v0"}

	p.Spec = v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDevicePlugin, Network: "blue",
		DevicePlugin: &v1alpha1.DevicePluginSpec{ProvisionAt: v1alpha1.ProvisionAtAllocate},
	}

	put(t, records, journal.Attachment{
		Function: f.ID, Resource: p.ResourceName(), State: journal.Reserved,
		Port: &journal.Port{Network: "red"},
	})

	if _, err := a.Reserve(t.Context(), f, p); err != nil {
		t.Fatal(err)
	}
	if want := []string{"red"}; !slices.Equal(queue.ran, want) {
		t.Errorf("hooks ran for ports in %q, want %q", queue.ran, want)
	}
	if have, _ := records.Get(f.ID); have.State != journal.Reserved || have.Port == nil ||
		have.Port.Network != "blue" {
		t.Errorf("record %+v, want the next pod's reservation", have)
	}
}

// TestAllocateForTheSamePod: nothing happens if the kubelet allocates the Function of an init
// container again for a container of the same pod. A Function that a pod may have used, or that was
// allocated long ago, is released first.
func TestAllocateForTheSamePod(t *testing.T) {
	provisioned := v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDevicePlugin, Network: "blue",
		DevicePlugin: &v1alpha1.DevicePluginSpec{ProvisionAt: v1alpha1.ProvisionAtAllocate},
	}

	vf := function.Function{
		ID: function.ID{Address: "0000:3b:02.0"}, Kind: function.VF, Netdev: "ens3f0v0",
	}
	vfio := vf
	vfio.Netdev, vfio.Driver = "", "vfio-pci"
	for name, test := range map[string]struct {
		function function.Function
		// change changes the record between the Allocates.
		change func(*journal.Attachment)
		hooks  int
	}{
		"netdev":       {vf, func(*journal.Attachment) {}, 0},
		"device nodes": {vfio, func(*journal.Attachment) {}, 1},
		"long ago": {vf, func(a *journal.Attachment) {
			a.ReservedAt = a.ReservedAt.Add(-time.Minute)
		}, 1},
		"clock set back": {vf, func(a *journal.Attachment) {
			a.ReservedAt = a.ReservedAt.Add(time.Hour)
		}, 1},
		"a pod had it": {vf, func(a *journal.Attachment) {
			a.Ended = &journal.Ended{Sandbox: "s1"}
		}, 1},
		"another network": {vf, func(a *journal.Attachment) {
			a.Port = &journal.Port{Network: "red"}
		}, 1},
		"another resource": {vf, func(a *journal.Attachment) {
			a.Resource = "example.com/slow"
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			a, records, _, p := newAllocations(t)
			p.Spec = provisioned
			queue := &oneHook{journal: records}
			a.lifecycle = lifecycle.New(records, nil, nil, lifecycle.Options{Hooks: queue},
				testr.New(t))
			if _, err := a.Reserve(t.Context(), test.function, p); err != nil {
				t.Fatal(err)
			}

			record, _ := records.Get(test.function.ID)
			test.change(&record)
			put(t, records, record)

			if _, err := a.Reserve(t.Context(), test.function, p); err != nil {
				t.Fatal(err)
			}
			if len(queue.ran) != test.hooks {
				t.Errorf("%d hooks ran, want %d", len(queue.ran), test.hooks)
			}

			now, _ := records.Get(test.function.ID)
			if now.State != journal.Reserved || now.Port == nil || now.Port.Network != "blue" ||
				now.ReservedAt.Before(record.ReservedAt) && name != "clock set back" {
				t.Errorf("record %+v, before %+v", now, record)
			}
		})
	}
}

// TestAllocateKeepsSF: a container gets the SF that was made for an init container of the same pod.
func TestAllocateKeepsSF(t *testing.T) {
	a, records, w, p := newAllocations(t)
	f := p.Functions[0]
	if _, err := a.Reserve(t.Context(), f, p); err != nil {
		t.Fatal(err)
	}

	made := w.makes[f.ID]
	if _, err := a.Reserve(t.Context(), f, p); err != nil {
		t.Fatal(err)
	}
	if record, _ := records.Get(f.ID); w.deleted > 0 || !cmp.Equal(made, w.makes[f.ID]) ||
		record.State != journal.Reserved {
		t.Errorf("deleted %d times, made %+v, record %+v", w.deleted, w.makes[f.ID], record)
	}
}

// oneHook is a queue that records for which Functions hooks run.
type oneHook struct {
	journal *journal.Journal
	ran     []string
}

func (q *oneHook) First(journal.Attachment) string { return "port" }

func (q *oneHook) Add(id function.ID) {
	a, _ := q.journal.Get(id)
	q.ran = append(q.ran, a.Port.Network)
	_ = q.journal.Delete(id)
}

// TestGiveUpLeavesOthersAlone: GiveUp does not release a Function that another pod has in the
// meantime.
func TestGiveUpLeavesOthersAlone(t *testing.T) {
	a, records, _, p := newAllocations(t)
	id := p.Functions[0].ID
	for i, record := range []journal.Attachment{
		{State: journal.Reserved, Resource: "xpu.opiproject.org/fast",
			CNI: &journal.CNI{ContainerID: "c1", IfName: "net1"}},
		{State: journal.Reserved, Claim: journal.Claim{UID: "u"}},
		{State: journal.Reserved, Resource: "xpu.opiproject.org/other"},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			record.Function = id
			if err := records.Put(record); err != nil {
				t.Fatal(err)
			}
			a.GiveUp(t.Context(), p.Functions[0], p)
			if _, exists := records.Get(id); !exists {
				t.Errorf("%+v was released", record)
			}
		})
	}
}
