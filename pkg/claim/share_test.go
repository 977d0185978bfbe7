// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// withShare allocates a share of a PF, with bandwidth if not empty.
func withShare(id types.UID, bandwidth string) claimtest.Option {
	return func(c *resourceapi.ResourceClaim) {
		claimtest.Result("nic", testPool, "0000-3b-00-0")(c)
		results := c.Status.Allocation.Devices.Results
		result := &results[len(results)-1]
		result.ShareID = &id
		result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
			claim.CapacityPorts: resource.MustParse("1"),
		}
		if bandwidth != "" {
			result.ConsumedCapacity[claim.CapacityBandwidth] = resource.MustParse(bandwidth)
		}
	}
}

// withChoice adds the data that the agent wrote for a share.
func withChoice(id types.UID, data string) claimtest.Option {
	return func(c *resourceapi.ResourceClaim) {
		entry := claim.NewEntry(testPool, "0000-3b-00-0", id)
		entry.Data = &runtime.RawExtension{Raw: []byte(data)}
		c.Status.Devices = append(c.Status.Devices, entry)
	}
}

// TestShares checks that each share has the Function that was chosen for it, or none.
func TestShares(t *testing.T) {
	choice, err := claim.Choice{Function: function.ID{Address: "0000:3b:00.3"}}.Data()
	if err != nil {
		t.Fatal(err)
	}

	devices, err := claim.Devices(claimtest.Allocated("net", withShare("one", ""),
		withShare("two", "25G"),
		withShare("three", ""), withShare("four", ""),
		withChoice("two", string(choice.Raw)), withChoice("three", `{"function": "eth0"}`),
		withChoice("four", `[]`)))
	if err != nil {
		t.Fatal(err)
	}

	for i, want := range []function.ID{{}, {Address: "0000:3b:00.3"}, {}, {}} {
		if devices[i].Function != want || devices[i].Name != "0000-3b-00-0" ||
			devices[i].Share == "" {
			t.Errorf("share %s has Function %q, want %q", devices[i].Share,
				devices[i].Function, want)
		}
	}

	if devices[1].Bandwidth != 25000 || devices[0].Bandwidth != 0 {
		t.Errorf("bandwidth %d and %d Mbit/s, want 0 and 25000", devices[0].Bandwidth,
			devices[1].Bandwidth)
	}
}

// TestBandwidthByItsFullName checks that a claim's part of the link is found by each name that
// Kubernetes may give it: without the limit, a VF could take what other claims were promised.
func TestBandwidthByItsFullName(t *testing.T) {
	const full = resourceapi.QualifiedName(v1alpha1.GroupName) + "/" + claim.CapacityBandwidth
	for _, short := range []string{"", "1G"} {
		allocated := claimtest.Allocated("net", withShare("one", short))
		result := &allocated.Status.Allocation.Devices.Results[0]
		result.ConsumedCapacity[full] = resource.MustParse("25G")

		devices, err := claim.Devices(allocated)
		if err != nil {
			t.Fatal(err)
		}
		vf := ptr.Deref(devices[0].Interface.VF, function.VFConfig{})
		if devices[0].Bandwidth != 25000 || ptr.Deref(vf.MaxTxRate, 0) != 25000 {
			t.Errorf("beside bandwidth %q: %d Mbit/s, and the VF's maximum is %d, want 25000", short,
				devices[0].Bandwidth, ptr.Deref(vf.MaxTxRate, 0))
		}
	}
}

// TestBandwidth checks that the VF's maximum rate is the claim's bandwidth, or less if the claim
// says so, and never more.
func TestBandwidth(t *testing.T) {
	for _, test := range []struct {
		bandwidth, fields string
		max, min          *int
		wrong             string
	}{
		{"", ``, nil, nil, ""},
		{"", `"vf": {"maxTxRate": 99000}`, ptr.To(99000), nil, ""},
		{"25G", ``, ptr.To(25000), nil, ""},
		{"25G", `"vf": {"maxTxRate": 0}`, ptr.To(25000), nil, ""},
		{"25G", `"vf": {"maxTxRate": 10000, "minTxRate": 5000}`, ptr.To(10000), ptr.To(5000), ""},
		{"25G", `"vf": {"maxTxRate": 25001}`, nil, nil,
			"vf.maxTxRate 25001: is more than the 25000 Mbit/s of the link that the claim has"},
		{"25G", `"vf": {"minTxRate": 25001}`, nil, nil,
			"vf.minTxRate 25001: is more than the 25000 Mbit/s"},
	} {
		devices, err := claim.Devices(claimtest.Allocated("net", withShare("one", test.bandwidth),
			claimtest.FromClass(test.fields)))
		if err != nil {
			t.Fatal(err)
		}

		d := devices[0]
		if (d.ConfigErr == nil) != (test.wrong == "") || d.ConfigErr != nil &&
			!strings.Contains(d.ConfigErr.Error(), test.wrong) {
			t.Errorf("%+v: error %v", test, d.ConfigErr)
		}
		if test.wrong != "" {
			continue
		}

		vf := ptr.Deref(d.Interface.VF, function.VFConfig{})
		if !ptr.Equal(vf.MaxTxRate, test.max) || !ptr.Equal(vf.MinTxRate, test.min) {
			t.Errorf("%+v: rates %v to %v", test, vf.MinTxRate, vf.MaxTxRate)
		}
	}
}
