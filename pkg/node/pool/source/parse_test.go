// SPDX-License-Identifier: Apache-2.0

package source

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

const (
	header = "apiVersion: xpu.opiproject.org/v1alpha1\nkind: DevicePool\n"
	fast   = header + "metadata: {name: fast}\nspec:\n  selectors: [{pfNames: ['ens3f0#0-3']}]\n"
	slow   = header + "metadata: {name: slow}\nspec:\n  selectors: [{pfNames: [ens3f1]}]\n"
)

func TestParse(t *testing.T) {
	kind := metav1.TypeMeta{APIVersion: "xpu.opiproject.org/v1alpha1", Kind: "DevicePool"}
	plugin := func(change func(*v1alpha1.DevicePool)) v1alpha1.DevicePool {
		p := v1alpha1.DevicePool{TypeMeta: kind, ObjectMeta: metav1.ObjectMeta{Name: "fast"},
			Spec: v1alpha1.DevicePoolSpec{
				Selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f0"}}},
				Publish:   v1alpha1.PublishDevicePlugin, Provision: v1alpha1.ProvisionOnPrepare,
				DevicePlugin: &v1alpha1.DevicePluginSpec{
					ProvisionAt: v1alpha1.ProvisionAtAdd, PreferredAllocation: v1alpha1.PreferPack,
				},
			}}

		change(&p)
		return p
	}

	for name, tt := range map[string]struct {
		content string
		want    []v1alpha1.DevicePool
	}{
		"YAML": {
			header + "metadata: {name: fast}\nspec: {publish: DevicePlugin, devicePlugin: " +
				"{preferredAllocation: Spread}, selectors: [{pfNames: [ens3f0]}]}\n",
			[]v1alpha1.DevicePool{plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.DevicePlugin.PreferredAllocation = v1alpha1.PreferSpread
			})},
		},
		"two documents, one of them JSON, with comments between": {
			"# pools of rack 7\n---\n" +
				`{"apiVersion": "xpu.opiproject.org/v1alpha1", "kind": "DevicePool", "metadata": {"name": "fast"}, "spec": {"publish": "DevicePlugin", "devicePlugin": {}, "selectors": [{"pfNames": ["ens3f0"]}]}}` +
				"\n---\n# nothing\n---\n" + header +
				"metadata: {name: slow}\nspec: {selectors: [{pfNames: [ens3f0]}]}\n",
			[]v1alpha1.DevicePool{plugin(func(*v1alpha1.DevicePool) {}),
				plugin(func(p *v1alpha1.DevicePool) {
					p.Name, p.Spec.Publish, p.Spec.DevicePlugin = "slow", v1alpha1.PublishDRA, nil
				})},
		},
		"SFs": {
			header + "metadata: {name: fast}\nspec: {publish: DevicePlugin, devicePlugin: {}, " +
				"selectors: [{pfNames: [ens3f0]}], sfs: {count: 4}}\n",
			[]v1alpha1.DevicePool{plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.SFs = &v1alpha1.SFSpec{Count: 4, FirstNumber: 1}
			})},
		},
		"sriov-network-device-plugin": {
			`{"resourceList": [{"resourceName": "fast", "selectors": {"pfNames": ["ens3f0"]}}]}`,
			[]v1alpha1.DevicePool{plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.DeviceType, p.Spec.Priority = v1alpha1.DeviceTypeNet, 1
				p.Spec.Allow = []v1alpha1.PrivilegedField{
					"mac", "addresses", "vf.vlan", "vf.qos", "vf.trust", "vf.spoofCheck",
					"vf.minTxRate", "vf.maxTxRate", "vf.linkState",
				}
				p.Spec.DevicePlugin.ResourcePrefix, p.Spec.DevicePlugin.ResourceName = "example.com", "fast"
			})},
		},
	} {
		got, warnings, err := Parse([]byte(tt.content), "example.com")
		if err != nil || len(warnings) != 0 {
			t.Errorf("%s: %v, warnings %q", name, err, warnings)
			continue
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ content, want string }{
		{"", "must have a resourceList"},
		{"# nothing\n", "must have a resourceList"},
		{`{"resourceList": [{"resourceName": "a"}]}`, "resourceList[0].selectors"},
		{"kind: ConfigMap\napiVersion: v1\n",
			`document 1: apiVersion "v1" and kind "ConfigMap": must be xpu.opiproject.org/v1alpha1 and DevicePool`},
		{"[]", "document 1"},
		{"a: b: c", "document 1"},
		{fast + "---\n" + fast, "document 2: metadata.name: fast belongs to an earlier document"},
		{fast + "--- x\n", "document 1: invalid Yaml document separator"},
		{strings.Replace(fast, "selectors", "selector", 1), `document 1: `},
		{strings.Replace(fast, "0-3", "3-0", 1),
			`DevicePool fast: spec.selectors[0].pfNames[0]: "ens3f0#3-0"`},
		{strings.Replace(fast, "fast", "Fast", 1), `metadata.name: "Fast": must be a DNS name`},
		{fast + "  publish: Both\n",
			`spec.publish: Unsupported value: "Both": supported values: "DRA", "DevicePlugin"`},
		{fast + "  devicePlugin: {}\n",
			"devicePlugin is only for pools with publish: DevicePlugin"},
		{fast + "  publish: DevicePlugin\n  devicePlugin: {provisionAt: Allocate}\n",
			"provisionAt: Allocate needs network"},
		{fast + "  provision: Ahead\n",
			"provision: Ahead needs network and publish: DRA, and no sfs"},
		{fast + "  model: Slices\n", `spec.model: Unsupported value: "Slices"`},
		{fast + "  model: Ports\n  provision: BeforeBind\n",
			"model: Ports needs provision: OnPrepare"},
		{fast + "  model: Counters\n  publish: DevicePlugin\n",
			"model is only for pools with publish: DRA"},
		{fast + "  portsAhead: 2\n", "portsAhead is only for pools with provision: Ahead"},
		{fast + "  provision: Ahead\n  network: blue\n  portsAhead: 65\n", "spec.portsAhead"},
		{fast + "  provision: Ahead\n  network: blue\n",
			"Ahead is only for DevicePools of the API server"},
		{fast + "  publish: DevicePlugin\n  devicePlugin: {resourceName: a/b}\n",
			`resource "xpu.opiproject.org/a/b"`},
	} {
		got, _, err := Parse([]byte(tt.content), "example.com")
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Parse(%q): %+v, error %v, want %q in it", tt.content, got, err, tt.want)
		}
	}
}

// FuzzParse: accepted DevicePools have names.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		fast, fast + "---\n" + slow, `{"resourceList": [{"resourceName": "a", "selectors": {}}]}`,
		"--- \n---\n#\n", "kind: DevicePool",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		devicePools, _, err := Parse(content, "example.com")
		if err != nil {
			return
		}

		names := map[string]bool{}
		for _, p := range devicePools {
			if p.Name == "" || names[p.Name] || len(p.Spec.Selectors) == 0 || p.Spec.Publish == "" {
				t.Errorf("%q: %+v", content, p)
			}
			names[p.Name] = true
		}
	})
}
