// SPDX-License-Identifier: Apache-2.0

package sriovdp

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

func TestConvert(t *testing.T) {
	got, warnings, err := Convert([]byte(`{"resourceList": [
		{"resourceName": "Fast_NICs", "ExcludeTopology": true, "additionalInfo": {"*": {"a": "b"}, "0000:3b:00.2": {"c": "d"}},
			"selectors": {"PFNAMES": ["ens3f0#+0-3,07"], "needVhostNet": true}},
		{"resourceName": "sf", "resourcePrefix": "example.com", "deviceType": "auxNetDevice", "selectors": [{"auxTypes": ["sf", "sf"]}]}]}`), "intel.com")
	if err != nil {
		t.Fatal(err)
	}

	kind := metav1.TypeMeta{APIVersion: "xpu.opiproject.org/v1alpha1", Kind: "DevicePool"}
	want := []v1alpha1.DevicePool{
		{TypeMeta: kind, ObjectMeta: metav1.ObjectMeta{Name: "fast-nics"},
			Spec: v1alpha1.DevicePoolSpec{
				DeviceType: v1alpha1.DeviceTypeNet, Priority: 2,
				Selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f0#0-3,7"}}},
				Publish:   v1alpha1.PublishDevicePlugin, Provision: v1alpha1.ProvisionOnPrepare,
				Allow: ofSRIOVCNI,
				DevicePlugin: &v1alpha1.DevicePluginSpec{
					ResourcePrefix: "intel.com", ResourceName: "Fast_NICs",
					ProvisionAt: v1alpha1.ProvisionAtAdd, PreferredAllocation: v1alpha1.PreferPack,
					ExcludeTopology: true, NeedVhostNet: true,
					AdditionalInfo: map[string]map[string]string{
						"*": {"a": "b"}, "0000:3b:00.2": {"c": "d"},
					},
				},
			}},
		{TypeMeta: kind, ObjectMeta: metav1.ObjectMeta{Name: "sf"}, Spec: v1alpha1.DevicePoolSpec{
			DeviceType: v1alpha1.DeviceTypeAuxNet, Priority: 1,
			Selectors: []v1alpha1.FunctionSelector{{AuxTypes: []string{"sf"}}},
			Publish:   v1alpha1.PublishDevicePlugin, Provision: v1alpha1.ProvisionOnPrepare,
			Allow: ofSRIOVCNI,
			DevicePlugin: &v1alpha1.DevicePluginSpec{
				ResourcePrefix: "example.com", ResourceName: "sf",
				ProvisionAt: v1alpha1.ProvisionAtAdd, PreferredAllocation: v1alpha1.PreferPack,
			},
		}},
	}

	if diff := cmp.Diff(want, got); diff != "" || len(warnings) > 0 {
		t.Errorf("warnings %q, -want +got:\n%s", warnings, diff)
	}
}

// ofSRIOVCNI are the privileged fields of sriov-cni's network configurations, which have none of
// ethtool and no driver.
var ofSRIOVCNI = []v1alpha1.PrivilegedField{
	"mac", "addresses", "vf.vlan", "vf.qos", "vf.trust", "vf.spoofCheck", "vf.minTxRate",
	"vf.maxTxRate", "vf.linkState",
}

// TestSplitKeys: if keys differ only in the case of letters, the last one counts, as in
// encoding/json.
func TestSplitKeys(t *testing.T) {
	known, unknown := splitKeys(
		[]byte(`{"B": [1, {}], "z": 1, "a": "x", "b": null, "A" : 2, "y": 1, "z": 2}`),
		[]string{"a", "b"},
	)
	if want := `{"b":[1, {}],"a":"x","b":null,"a":2}`; string(known) != want {
		t.Errorf("known: %s, want %s", known, want)
	}
	if diff := cmp.Diff([]string{"y", "z"}, unknown); diff != "" {
		t.Errorf("unknown: -want +got\n%s", diff)
	}

	for _, text := range []string{`null`, `"a"`, `[{"z": 1}]`, `1`} {
		if known, unknown := splitKeys([]byte(text), nil); string(known) != text || unknown != nil {
			t.Errorf("of %s: known %s, unknown %q, want it unchanged", text, known, unknown)
		}
	}

	if known, unknown := splitKeys([]byte(`{}`), nil); string(known) != `{}` || unknown != nil {
		t.Errorf("of {}: known %s, unknown %q", known, unknown)
	}
}

// TestNoResources: sriov-network-operator writes this configuration for a node without a policy.
func TestNoResources(t *testing.T) {
	for _, config := range []string{`{"resourceList": null}`, `{"resourceList": []}`} {
		if pools, warnings, err := Convert([]byte(config),
			"openshift.io"); len(pools)+len(warnings) > 0 || err != nil {
			t.Errorf("%s: %v, %q, %v, want nothing", config, pools, warnings, err)
		}
	}
}

// TestErrors: if sriov-network-device-plugin would not start, the error names the entry, the field
// and what would be right.
func TestErrors(t *testing.T) {
	for _, tt := range []struct{ config, want string }{
		{``, `line 1, column 1: is not JSON`},
		{"{\"resourceList\": [\n  {\"resourceName\": \"a\",}]}", `line 2, column 24: is not JSON`},
		{`[]`, `configuration: must be an object, not array`},
		{`null`, `configuration: must be an object`},
		{`{}`, `resourceList: is missing`},
		{`{"resourceList": {}}`, `resourceList: must be a list, not object`},
		{`{"resourceList": [null]}`, `resourceList[0]: must be an object`},
		{`{"resourceList": ["a"]}`, `resourceList[0]: must be an object, not string`},
		{`{"resourceList": [{"resourceName": 1}]}`,
			`resourceList[0].resourceName: must be a string, not number`},
		{`{"resourceList": [{"resourceName": "a", "excludeTopology": "yes"}]}`,
			`resourceList[0].excludeTopology: must be true or false, not string`},
		{`{"resourceList": [{"resourceName": "a", "additionalInfo": {"*": "b"}}]}`,
			`resourceList[0].additionalInfo: must be an object, not string`},
		{`{"resourceList": [{"resourceName": "a"}]}`,
			`resourceList[0].selectors: must be an object or a list of objects`},
		{`{"resourceList": [{"resourceName": "a", "selectors": null}]}`,
			`resourceList[0].selectors: must be an object or a list of objects`},
		{`{"resourceList": [{"resourceName": "a", "selectors": []}]}`,
			`resourceList[0].selectors: must have at least one entry`},
		{`{"resourceList": [{"resourceName": "a", "selectors": "all"}]}`,
			`resourceList[0].selectors: must be an object or a list of objects`},
		{`{"resourceList": [{"resourceName": "a", "selectors": [null]}]}`,
			`resourceList[0].selectors[0]: must be an object`},
		{`{"resourceList": [{"resourceName": "a", "selectors": {"vendors": "8086"}}]}`,
			`resourceList[0].selectors.vendors: must be a list, not string`},
		{`{"resourceList": [{"resourceName": "a", "selectors": [{}, {"devices": [1]}]}]}`,
			`resourceList[0].selectors[1].devices: must be a string, not number`},
		{`{"resourceList": [{"resourceName": "a", "deviceType": "nic", "selectors": {}}]}`,
			`resourceList[0].deviceType: "nic": must be netDevice, accelerator or auxNetDevice`},
		{`{"resourceList": [{"resourceName": "a.b", "selectors": {}}]}`,
			`resourceList[0].resourceName: "a.b": must be of the characters`},
		{`{"resourceList": [{"resourceName": "a", "selectors": {}}, {"resourcePrefix": "intel.com", "resourceName": "a", "selectors": {}}]}`,
			`resourceList[1].resourceName: intel.com/a belongs to resourceList[0] already`},
		{
			`{"resourceList": [{"resourceName": "a", "selectors": [{"isRdma": true, "vdpaType": "vhost"}]}]}`, `resourceList[0].selectors[0].vdpaType: cannot be together with isRdma`,
		},
		{`{"resourceList": [{"resourceName": "a", "deviceType": "auxNetDevice", "selectors": {}}]}`,
			`resourceList[0].selectors.auxTypes: []: must be ["sf"]`},
		{
			`{"resourceList": [{"resourceName": "a", "deviceType": "auxNetDevice", "selectors": {"auxTypes": ["sf", "eth"]}}]}`, `resourceList[0].selectors.auxTypes: ["sf" "eth"]: must be ["sf"]`,
		},
	} {
		got, _, err := Convert([]byte(tt.config), DefaultPrefix)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Convert(%s): %+v, error %v, want %q in it", tt.config, got, err, tt.want)
		}
	}
}

// TestWarnings: configurations that sriov-network-device-plugin accepts are accepted, with a
// warning.
func TestWarnings(t *testing.T) {
	const other = `{"resourceName": "other", "selectors": {"vendors": ["8086"]}}`
	for _, tt := range []struct {
		entry string
		// pools is the number of DevicePools besides the other one.
		pools int
		want  []string
	}{
		{`{"resourceName": "a", "selectors": {"vendors": "8086"}}`,
			0, []string{"resourceList[0].selectors.vendors: must be a list, not string; the " +
				"entry is left out"}},
		{`{"resourceName": "a", "selectors": []}`, 0,
			[]string{
				"resourceList[0].selectors: must have at least one entry; the entry is left out",
			}},
		{`{"resourceName": "a", "pool": 1, "selectors": {"pfName": ["x"]}}`, 1, []string{
			"resourceList[0].pool: is ignored: no such field here",
			"resourceList[0].selectors.pfName: is ignored: no such field here"}},
		{`{"resourceName": "a", "deviceType": "accelerator", "selectors": [{"acpiIndexes": 1}]}`,
			1, []string{
				"resourceList[0].selectors[0].acpiIndexes: is ignored: no such field here"}},
		{`{"resourceName": "a", "selectors": {"vendors": ["8086", "0x15b3", "15B3"]}}`, 1, []string{
			`resourceList[0].selectors.vendors[1]: "0x15b3" matches nothing: must be four hex digits`, `vendors[2]: "15B3" matches nothing`}},
		{`{"resourceName": "a", "selectors": [{"pfNames": ["a#3-1"]}, {"pfNames": ["b#1", "B#2", "c#0,2-1,x"]}]}`, 1, []string{
			`resourceList[0].selectors[0].pfNames[0]: "a#3-1" matches nothing: "3-1" is an empty range`,
			`resourceList[0].selectors[1].pfNames[1]: "B#2" matches nothing: only the first entry of B counts`,
			`resourceList[0].selectors[1].pfNames[2]: "c#0,2-1,x" matches only indexes 0: "2-1" is an empty range` + "\n" + `"x" is no index or range`}},
		{`{"resourceName": "a", "selectors": {"rootDevices": ["0000:3b:00.0#1#2", "3b:00.0"]}}`,
			0, []string{
				`rootDevices[0]: "0000:3b:00.0#1#2" matches nothing`,
				`rootDevices[1]: "3b:00.0" matches nothing: "3b:00.0" is no name of a PF`,
				"resourceList[0]: left out: none of its selectors can match"}},
		{`{"resourceName": "a", "selectors": {"pciAddresses": ["0000:3B:00.2", "0000:3b:00.2"], "linkTypes": ["eth", "ether"], "pKeys": ["0x1", "0x8001"], "drivers": ["", "x"], "acpiIndexes": ["x", "1"]}}`, 1, []string{
			`drivers[0]: "" matches nothing`, `pciAddresses[0]: "0000:3B:00.2" matches nothing`,
			`acpiIndexes[0]: "x" matches nothing`,
			`linkTypes[0]: "eth" matches nothing: must be ether or infiniband`,
			`pKeys[0]: "0x1" matches nothing`}},
		{`{"resourceName": "a", "selectors": {"vdpaType": "vhost-user"}}`,
			0, []string{`vdpaType: "vhost-user" matches nothing`, "left out"}},
		{`{"resourceName": "a", "selectors": {"ddpProfiles": ["x"]}}`, 1,
			[]string{"ddpProfiles: is compared with what devlink tells"}},
		{`{"resourceName": "a-", "selectors": {}}`,
			0, []string{"resourceList[0]: left out: the kubelet refuses it"}},
		{`{"resourcePrefix": "Intel", "resourceName": "a", "selectors": {}}`,
			0, []string{"resourceList[0]: left out: the kubelet refuses it"}},
		{`{"resourceName": "a", "selectors": [{"vendors": ["8086"]}, {"needVhostNet": true}]}`,
			1, []string{"needVhostNet is for all of intel.com/a"}},
	} {
		got, warnings, err := Convert([]byte(`{"resourceList": [`+tt.entry+`,`+other+`]}`),
			DefaultPrefix)
		if err != nil {
			t.Errorf("%s: %v", tt.entry, err)
			continue
		}
		if len(got) != tt.pools+1 {
			t.Errorf("%s: %d pools, want %d", tt.entry, len(got)-1, tt.pools)
		}
		if len(warnings) != len(tt.want) {
			t.Errorf("%s: warnings %q, want %q", tt.entry, warnings, tt.want)
			continue
		}

		for i, want := range tt.want {
			if !strings.Contains(warnings[i], want) {
				t.Errorf("%s: warning %q, want %q in it", tt.entry, warnings[i], want)
			}
		}
	}
}

// TestPoolNames: resources get different names if they differ only in characters that a DNS label
// cannot have.
func TestPoolNames(t *testing.T) {
	long := strings.Repeat("x", 63)
	var entries []string
	for _, resource := range []string{
		"intel.com/a_b", "intel.com/A_b", "example.com/a_b", "intel.com/a-b", "intel.com/" +
			long, "example.com/" + long, "intel.com/" + strings.ToUpper(long),
	} {
		prefix, name, _ := strings.Cut(resource, "/")
		entries = append(entries,
			fmt.Sprintf(`{"resourcePrefix": %q, "resourceName": %q, "selectors": {}}`,
				prefix, name))
	}

	devicePools, _, err := Convert([]byte(`{"resourceList": [`+strings.Join(entries, ",")+`]}`),
		DefaultPrefix)
	if err != nil {
		t.Fatal(err)
	}

	var got []string
	for _, p := range devicePools {
		got = append(got, p.Name)
	}

	want := []string{"a-b", "a-b-intel-com", "a-b-example-com", "a-b-intel-com-2", long, long[:61] +
		"-2", long[:61] + "-3"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
}

func TestIs(t *testing.T) {
	for config, want := range map[string]bool{
		`{"resourceList": []}`:            true,
		`{"RESOURCELIST": 1}`:             true,
		` {"resourceList": [{"a": 1,}]}`:  true, // no valid JSON, but nothing else either
		`{"kind": "DevicePool"}`:          false,
		"kind: DevicePool\nresourceList:": false,
		`{"kind": "resourceList"}`:        false,
		``:                                false,
		`[]`:                              false,
	} {
		if got := Is([]byte(config)); got != want {
			t.Errorf("Is(%q) = %t, want %t", config, got, want)
		}
	}
}

// FuzzConvert: every DevicePool of a result can be used, for any input.
func FuzzConvert(f *testing.F) {
	for _, seed := range []string{
		`{"resourceList": [{"resourceName": "a_b", "selectors": [{"pfNames": ["ens3f0#0-3,7", "p0"], "rootDevices": ["0000:3b:00.0#1"]}]}]}`,
		`{"resourceList": [{"resourceName": "A", "resourcePrefix": "x.y", "deviceType": "auxNetDevice", "selectors": {"auxTypes": ["sf"], "isRdma": true}}]}`,
		`{"resourceList": [{"resourceName": "f", "deviceType": "accelerator", "selectors": {"pciAddresses": ["0000:00:01.0"]}}, {"resourceName": "F", "selectors": {}}]}`,
		`{"resourceList": [{"resourceName": "v", "selectors": [{"vdpaType": "vhost", "pKeys": ["0x7fff"], "acpiIndexes": ["1"], "linkTypes": ["ether"], "ddpProfiles": ["x"]}]}]}`,
		`{"resourceList": [{"resourceName": "x", "selectors": [{"vendors": ["8086"], "needVhostNet": true}, {"drivers": [""]}], "additionalInfo": {"*": {}}}]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, config []byte) {
		devicePools, _, err := Convert(config, DefaultPrefix)
		if err != nil {
			return
		}
		if !Is(config) {
			t.Errorf("%q is converted but not recognised", config)
		}

		names := map[string]bool{}
		for _, p := range devicePools {
			if err := pool.Check(p); err != nil {
				t.Errorf("%q: %v", config, err)
			}
			if names[p.Name] {
				t.Errorf("%q: two DevicePools %s", config, p.Name)
			}
			names[p.Name] = true
		}

		for _, p := range pool.Assign(nil, devicePools, nil, nil) {
			if p.Err != nil {
				t.Errorf("%q: %v", config, p.Err)
			}
		}
	})
}
