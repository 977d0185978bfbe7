// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// requested returns a reservation by a CNI request.
func requested(containerID string) journal.Attachment {
	return journal.Attachment{
		Function: vf, PF: pf.Address, PFName: "old", VFIndex: 1,
		Resource:  "xpu.opiproject.org/fast",
		Pod:       journal.Pod{Namespace: "default", Name: "p", UID: "pod-1"},
		Port:      &journal.Port{Network: "blue", MAC: "02:00:00:00:00:01"},
		CNI:       &journal.CNI{ContainerID: containerID, IfName: "net1", Network: "sriov"},
		Interface: function.Interface{Name: "net1"},
	}
}

// A reservation by CNI belongs to a container and an interface. A reservation by the device plugin
// belongs to a pod that is not known yet.
func TestReserveByRequest(t *testing.T) {
	allocated := requested("")
	allocated.CNI, allocated.Pod = nil, journal.Pod{}
	allocatedAgain := allocated
	allocatedAgain.Port = nil
	attached := requested("c1")
	attached.State, attached.Sandbox, attached.BootID = journal.Attached, "c1", "boot-1"
	attached.Before, attached.Observed = &netdev.Snapshot{}, &netdev.Observed{}
	claimed := claimedVF()
	claimed.CNI = requested("c1").CNI
	claimedByOther := claimedVF()
	claimedByOther.CNI = requested("c2").CNI
	claimAttached := claimed
	claimAttached.State, claimAttached.Sandbox = journal.Attached, "c1"
	claimAttached.Before, claimAttached.Observed = &netdev.Snapshot{}, &netdev.Observed{}
	other := requested("c1")
	other.CNI.IfName = "net2"
	tests := map[string]struct {
		have, want journal.Attachment
		err        string
		check      func(journal.Attachment) bool
	}{
		"allocated, then added": {
			allocated, requested("c1"), "", func(a journal.Attachment) bool {
				return a.CNI != nil &&
					a.Pod.Name == "p"
			},
		},
		"allocated again, the pool has no network by now": {
			allocated, allocatedAgain, "", func(a journal.Attachment) bool { return a.Port == nil },
		},
		"added again": {
			requested("c1"), requested("c1"), "", func(a journal.Attachment) bool {
				return a.CNI.ContainerID == "c1"
			},
		},
		"added to another container": {
			requested("c1"), requested("c2"), "", func(a journal.Attachment) bool {
				return a.CNI.ContainerID == "c2"
			},
		},
		"added as another interface": {
			requested("c1"), other, "", func(a journal.Attachment) bool {
				return a.CNI.IfName == "net2"
			},
		},
		"allocated while it is added": {
			requested("c1"), allocated, "", func(a journal.Attachment) bool { return a.CNI == nil },
		},
		"added while attached": {
			attached, requested("c1"), "", func(a journal.Attachment) bool {
				return a.State == journal.Attached
			},
		},
		"claim's, added": {
			claimedVF(), claimed, "", func(a journal.Attachment) bool {
				return a.CNI != nil &&
					a.Claim.UID == "claim-1"
			},
		},
		"claim's, added to another sandbox": {
			claimAttached, claimedByOther, "", func(a journal.Attachment) bool {
				return a.CNI.ContainerID == "c2" && a.State == journal.Reserved
			},
		},
		"attached, added as another interface": {
			attached, other, "is Attached in pod default/p (sandbox c1)", nil,
		},
		"claim's, added without claim": {
			claimedVF(), requested("c1"), "belongs to claim default/c", nil,
		},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := openJournal(t)
			a := New(j, &engine{}, netdevs{}, Options{BootID: "boot-1"}, logr.Discard())

			if test.have.State == "" {
				test.have.State = journal.Reserved
			}
			if err := j.Put(test.have); err != nil {
				t.Fatal(err)
			}

			err := a.Reserve(t.Context(), test.want)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want one with %q", err, test.err)
				}
				return
			}

			if err != nil {
				t.Fatal(err)
			}
			if record, _ := j.Get(vf); !test.check(record) {
				t.Errorf("record %+v", record)
			}
		})
	}
}

// A Function that another container reserved is not attached to this container's sandbox.
func TestAttachOfAnotherRequest(t *testing.T) {
	t.Parallel()
	j := openJournal(t)
	engine := &engine{parent: string(vf.Address)}
	a := New(j, engine, netdevs{vf: "v", pf: "p"}, Options{BootID: "boot-1"}, logr.Discard())
	if err := a.Reserve(t.Context(), requested("c1")); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Attach(t.Context(), vf, sandbox()); err == nil ||
		!strings.Contains(err.Error(), "not for sandbox s1") {
		t.Errorf("error %v", err)
	}
	if len(engine.calls) > 0 {
		t.Errorf("engine did %q", engine.calls)
	}
}

// The device plugin reserves a Function without knowing its interface. Such a Function cannot be
// attached.
func TestAttachAllocated(t *testing.T) {
	t.Parallel()
	j := openJournal(t)
	a := New(j, &engine{parent: string(vf.Address)}, netdevs{vf: "v", pf: "p"},
		Options{BootID: "boot-1"}, logr.Discard())
	allocated := requested("")
	allocated.CNI, allocated.Interface = nil, function.Interface{}
	if err := a.Reserve(t.Context(), allocated); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Attach(t.Context(), vf, sandbox()); err == nil ||
		!strings.Contains(err.Error(), "no CNI request has asked for an interface yet") {
		t.Errorf("error %v", err)
	}

	allocated.CNI = requested("c1").CNI
	if err := a.Reserve(t.Context(), allocated); err == nil ||
		!strings.Contains(err.Error(), "interface name: is empty") {
		t.Errorf("error %v", err)
	}
}

// A Function with a driver for userspace programs is attached without a netdev.
func TestAttachUserspace(t *testing.T) {
	t.Parallel()
	j := openJournal(t)
	engine := &engine{}
	a := New(j, engine, netdevs{vf: "", pf: "p"}, Options{BootID: "boot-1"}, logr.Discard())
	want := requested("s1")
	want.Interface.Userspace = true
	if err := a.Reserve(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Attach(t.Context(), vf, sandbox()); err != nil {
		t.Fatal(err)
	}

	wantDevice := netdev.Device{
		PF: &netdev.PF{Name: "p", Address: "0000:3b:00.0", VF: 1}, Port: &function.EswitchPort{
			PF: "0000:3b:00.0", Number: 1,
		},
	}

	if diff := cmp.Diff(wantDevice, engine.device); diff != "" {
		t.Errorf("device (-want +got):\n%s", diff)
	}
}

func TestAddress(t *testing.T) {
	t.Parallel()
	add := Addresses{
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")},
		Routes:    []function.Route{{To: netip.MustParsePrefix("10.2.0.0/16")}},
		Result:    json.RawMessage(`{"ips":[]}`),
	}

	mine, foreign := journal.ContainerIs("s1", "net1"), journal.ContainerIs("s2", "net1")
	j := openJournal(t)
	engine := &engine{parent: string(vf.Address)}
	a := New(j, engine, netdevs{vf: "v", pf: "p"}, Options{BootID: "boot-1"}, logr.Discard())
	address := func(belongs func(journal.Attachment) bool) error {
		return a.Address(t.Context(), vf, belongs, add)
	}
	if err := address(mine); err == nil {
		t.Error("addresses for a Function that is free")
	}
	if differences, err := a.Check(t.Context(), vf, nil); err != nil || len(differences) != 1 {
		t.Errorf("check of a Function that is free: %q, %v", differences, err)
	}
	if err := a.Reserve(t.Context(), requested("s1")); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Attach(t.Context(), vf, sandbox()); err != nil {
		t.Fatal(err)
	}
	if err := address(foreign); err == nil {
		t.Error("addresses for another container's interface")
	}

	for range 2 { // the second is a repetition
		if err := address(mine); err != nil {
			t.Fatal(err)
		}
	}

	record, _ := j.Get(vf)
	if len(record.Interface.Addresses) != 1 || len(record.Interface.Routes) != 1 ||
		string(record.CNI.IPAM) != `{"ips":[]}` ||
		len(record.Observed.Addresses) == 0 {
		t.Errorf("record %+v", record)
	}

	engine.differences = []string{"mtu is 1400, was 1500"}
	if differences, err := a.Check(t.Context(), vf, nil); err != nil ||
		!cmp.Equal(differences, engine.differences) {
		t.Errorf("check: %q, %v", differences, err)
	}

	engine.fail = errors.New("refused")
	if err := address(mine); !errors.Is(err, engine.fail) ||
		!strings.HasPrefix(err.Error(), "Function "+vf.String()) {
		t.Errorf("error %v", err)
	}
	if _, err := a.Check(t.Context(), vf, nil); !errors.Is(err, engine.fail) {
		t.Errorf("error %v", err)
	}
}
