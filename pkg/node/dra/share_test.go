// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// shareOf gives a claim a share of the PF, with the bandwidth in Mbit/s if it is not 0.
func shareOf(id string, bandwidth int64) claimtest.Option {
	return func(c *resourceapi.ResourceClaim) {
		claimtest.Result("nic", fastPool, "0000-3b-00-0")(c)
		result := &c.Status.Allocation.Devices.Results[len(c.Status.Allocation.Devices.Results)-1]
		share := types.UID(id)
		result.ShareID, result.ConsumedCapacity = &share, map[resourceapi.QualifiedName]resource.Quantity{}
		if bandwidth > 0 {
			result.ConsumedCapacity[claim.CapacityBandwidth] = *resource.NewQuantity(
				bandwidth*1_000_000, resource.DecimalSI,
			)
		}
	}
}

// sharing returns the driver of a node whose claims share a PF with four VFs and a link of 10
// Gbit/s. reported has the claims for which a VF was chosen.
func (n *node) sharing(broken ...int) (d *Driver, reported *[]journal.Claim) {
	n.t.Helper()
	spec := n.specs["fast"]
	spec.Model = v1alpha1.ModelPorts
	n.specs["fast"] = spec
	pf := function.ID{Address: "0000:3b:00.0"}
	n.functions[pf] = function.Function{
		ID: pf, Kind: function.PF, PF: pf.Address, Index: -1, LinkSpeed: 10_000, LinkUp: true,
	}
	p := pooltest.DRA("fast", pooltest.VFs(0x3b, 4)...)
	p.Spec = spec
	d = n.driver()
	d.Pools = func() ([]pool.Pool, bool) { return []pool.Pool{p}, true }
	d.Health = &health.Checker{Lost: func(id function.ID) string {
		for _, index := range broken {
			if id == pooltest.VF(0x3b, index).ID {
				return "broken"
			}
		}
		return ""
	}}

	reported = &[]journal.Claim{}
	d.Report = func(c journal.Claim) {
		n.mutex.Lock()
		defer n.mutex.Unlock()
		*reported = append(*reported, c)
	}

	return d, reported
}

// TestShares: claims that are prepared at once get different VFs that work, and each VF is limited
// to the claim's bandwidth.
func TestShares(t *testing.T) {
	n := newNode(t)
	d, reported := n.sharing(1)
	both := of("pod0", "both", shareOf("s1", 2000), shareOf("s2", 3000))
	one := of("pod1", "one", shareOf("s3", 4000))
	results := prepare(t, d, both, one)
	for uid, result := range results {
		if result.Err != nil {
			t.Fatalf("claim %s: %v", uid, result.Err)
		}
	}

	rates, devices := map[types.UID]int{}, sets.New[string]()
	for _, a := range n.journal.All() {
		if a.Function == pooltest.VF(0x3b, 1).ID {
			t.Errorf("share %s has a VF that is broken", a.Claim.Share)
		}
		rates[a.Claim.Share] = *a.Interface.VF.MaxTxRate
		devices.Insert(a.Function.String() + " " + a.Interface.Name + " " + a.Pod.Name)
	}

	if fmt.Sprint(rates) != "map[s1:2000 s2:3000 s3:4000]" || len(devices) != 3 {
		t.Errorf("rates %v of %v, want those that the claims have, each of its own VF", rates,
			sets.List(devices))
	}

	for _, device := range results[both.UID].Devices {
		if device.DeviceName != "0000-3b-00-0" || device.ShareID == nil ||
			!strings.Contains(device.CDIDeviceIDs[0], "both-uid-0000-3b-0") {
			t.Errorf("prepared %+v, want a share of the PF", device)
		}
	}

	if len(*reported) != 3 {
		t.Errorf("%d claims were reported, want 3", len(*reported))
	}

	full := of("pod2", "full", shareOf("s4", 0))
	if err := prepare(t, d, full)[full.UID].Err; err == nil ||
		!strings.Contains(err.Error(), "none of the 4 VFs of DevicePool fast is free") {
		t.Errorf("no VF is left: error %v", err)
	}

	before := n.journal.All()
	again := prepare(t, d, both)
	if again[both.UID].Err != nil || fmt.Sprint(n.journal.All()) != fmt.Sprint(before) {
		t.Errorf("prepared again: %v, %v; want all as it was", again[both.UID].Err, n.journal.All())
	}
}

// TestSharesOfOnePod: two claims of one pod that share a PF are two interfaces, each with a VF of its
// own. So they may be in different networks.
func TestSharesOfOnePod(t *testing.T) {
	n := newNode(t)
	d, _ := n.sharing()
	one := of("pod0", "one", shareOf("s1", 2000), claimtest.FromClaim(`"network": "red"`))
	two := of("pod0", "two", shareOf("s2", 2000), claimtest.FromClaim(`"network": "blue"`))
	for uid, result := range prepare(t, d, one, two) {
		must.Succeed(t, result.Err)
		if len(result.Devices) != 1 {
			t.Errorf("claim %s has %+v, want one device", uid, result.Devices)
		}
	}

	functions, names := sets.New[function.ID](), sets.New[string]()
	for _, a := range n.journal.All() {
		functions.Insert(a.Function)
		names.Insert(a.Interface.Name)
	}
	if len(functions) != 2 || len(names) != 2 {
		t.Errorf("the pod gets %v as %v, want two VFs as two interfaces", functions, names)
	}
}

// TestShareOfSlowerLink: bandwidth that the link does not have any more is refused.
func TestShareOfSlowerLink(t *testing.T) {
	n := newNode(t)
	d, _ := n.sharing()
	c := of("pod1", "net", shareOf("s1", 25_000))
	err := prepare(t, d, c)[c.UID].Err
	if err == nil ||
		!strings.Contains(err.Error(), "request nic, PF 0000:3b:00.0: the claim has 25000 Mbit/s "+
			"of the link, which has 10000 by now") {
		t.Errorf("error %v", err)
	}

	if left := n.journal.All(); len(left) > 0 {
		t.Errorf("reserved %+v", left)
	}
}

// TestRecordedShare: an agent that lost its journal chooses the VF again that the claim's status
// names.
func TestRecordedShare(t *testing.T) {
	n := newNode(t)
	d, _ := n.sharing()
	want := pooltest.VF(0x3b, 2).ID
	data, err := claim.Choice{Function: want}.Data()
	if err != nil {
		t.Fatal(err)
	}

	c := of("pod1", "net", shareOf("s1", 0), func(c *resourceapi.ResourceClaim) {
		entry := claim.NewEntry(fastPool, "0000-3b-00-0", "s1")
		entry.Data = data
		c.Status.Devices = append(c.Status.Devices, entry)
	})

	if err := prepare(t, d, c)[c.UID].Err; err != nil {
		t.Fatal(err)
	}
	if all := n.journal.All(); len(all) != 1 || all[0].Function != want {
		t.Errorf("reserved %+v, want %s", all, want)
	}
}

// TestShareWithoutNetwork: a share without a Port has its bandwidth too, and must not have fields
// that its pool does not allow.
func TestShareWithoutNetwork(t *testing.T) {
	n := newNode(t)
	n.specs["fast"] = v1alpha1.DevicePoolSpec{}
	d, _ := n.sharing()
	c := of("pod1", "net", shareOf("s1", 2000), claimtest.FromClass(`"mtu": 1400`))
	for range 2 {
		if err := prepare(t, d, c)[c.UID].Err; err != nil {
			t.Fatal(err)
		}
		a := n.journal.All()[0]
		if a.Interface.Name != "net1" || a.Interface.MTU != 1400 || a.Interface.VF == nil ||
			*a.Interface.VF.MaxTxRate != 2000 {
			t.Errorf("reserved %+v", a.Interface)
		}
	}

	greedy := of("pod2", "greedy", shareOf("s2", 2000),
		claimtest.FromClaim(`"vf": {"trust": true}`))
	if err := prepare(t, d, greedy)[greedy.UID].Err; err == nil ||
		!strings.Contains(err.Error(), "vf.trust: Forbidden") {
		t.Errorf("a privileged field of a claim: error %v", err)
	}
}
