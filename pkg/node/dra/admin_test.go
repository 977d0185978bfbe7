// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// looking gives all results of a claim adminAccess.
func looking(c *resourceapi.ResourceClaim) {
	for i := range c.Status.Allocation.Devices.Results {
		c.Status.Allocation.Devices.Results[i].AdminAccess = new(true)
	}
}

// TestAdminAccess: pods with adminAccess see Functions that another pod has, and how many are in
// use, and take nothing.
func TestAdminAccess(t *testing.T) {
	n := newNode(t)
	d := n.driver()
	p := pooltest.DRA("fast", pooltest.VFs(0x3b, 4)...)
	d.Pools = func() ([]pool.Pool, bool) { return []pool.Pool{p}, true }
	n.wantPrepared(of("pod1", "net", claimtest.Result("vf", fastPool, "0000-3b-00-2")))
	before := n.journal.All()
	c := of("monitor-1", "all", claimtest.Result("all", fastPool, "0000-3b-00-2"),
		claimtest.Result("all", fastPool, "0000-3b-00-3"),
		claimtest.ReservedFor("monitor-2"), looking)
	result := prepare(t, d, c)[c.UID]
	if result.Err != nil || len(result.Devices) != 2 {
		t.Fatalf("prepared %+v, want two devices", result)
	}

	for i, device := range result.Devices {
		a := device.Metadata.Attributes
		if len(device.CDIDeviceIDs) > 0 || *a["index"].IntValue != int64(i) ||
			*a["kind"].StringValue != "VF" || !*a["adminAccess"].BoolValue ||
			*a["functions"].IntValue != 4 || *a["functionsInUse"].IntValue != 1 {
			t.Errorf("device %s: %v, %v", device.DeviceName, device.CDIDeviceIDs, a)
		}
	}

	if after := n.journal.All(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("reserved %+v", after)
	}
	if !n.journal.HasAdminAccess("default", "all", function.ID{Address: "0000:3b:00.2"}) {
		t.Error("it is not written down that the claim only looks")
	}

	results, err := d.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{
		NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID,
	}})
	if err != nil || results[c.UID] != nil ||
		n.journal.HasAdminAccess("default", "all", function.ID{Address: "0000:3b:00.2"}) {
		t.Errorf("unprepared: %v, %v; the claim still looks", err, results[c.UID])
	}

	gone := of("monitor-1", "gone", claimtest.Result("all", fastPool, "0000-3b-07-0"), looking)
	if err := prepare(t, d, gone)[gone.UID].Err; err == nil ||
		!strings.Contains(err.Error(),
			"request all, Function 0000:3b:07.0: is gone from this node") {
		t.Errorf("a Function that is gone: error %v", err)
	}
}

// TestExcluded: a cluster without counters or shares allocates devices that exclude each other. The
// error names the missing feature.
func TestExcluded(t *testing.T) {
	pf := function.ID{Address: "0000:3b:00.0"}
	for name, test := range map[string]struct {
		model v1alpha1.DeviceModel
		// has is what another pod has.
		has    function.ID
		device string
		want   string
	}{
		"PF of a VF": {v1alpha1.ModelCounters, pooltest.VF(0x3b, 1).ID, "0000-3b-00-0",
			"pod default/other has its VF or SF 0000:3b:00.3"},
		"VF of a PF": {
			v1alpha1.ModelCounters, pf, "0000-3b-00-2",
			"pod default/other has its PF 0000:3b:00.0 as a whole",
		},
		"PF instead of port": {
			v1alpha1.ModelPorts, function.ID{Address: "0000:5e:00.2"}, "0000-3b-00-0",
			"feature gate DRAConsumableCapacity is off",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.specs["fast"] = v1alpha1.DevicePoolSpec{Model: test.model}
			n.functions[pf] = function.Function{
				ID: pf, Kind: function.PF, PF: pf.Address, Index: -1,
			}
			must.Succeed(t, n.journal.Put(journal.Attachment{
				Function: test.has,
				PF:       pci.Address(strings.Replace(string(test.has.Address), "00.3", "00.0", 1)),
				State:    journal.Reserved,
				Pod:      journal.Pod{Namespace: "default", Name: "other"},
				Claim:    journal.Claim{UID: "other"},
			}))

			c := of("pod1", "net", claimtest.Result("nic", fastPool, test.device))
			if err := prepare(t, n.driver(), c)[c.UID].Err; err == nil ||
				!strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}
