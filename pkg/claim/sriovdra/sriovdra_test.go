// SPDX-License-Identifier: Apache-2.0

package sriovdra_test

import (
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/claim/conversion"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/sriovdra"
)

// FuzzConvert checks that any configuration of a NetworkAttachmentDefinition is converted to an
// InterfaceConfig and an XPUNetwork that can be read.
func FuzzConvert(f *testing.F) {
	for _, config := range []string{
		`{"type": "sriov", "vlan": 5, "vlanQoS": 3, "trust": "on"}`,
		`{"type": "sriov", "ipam": {"type": "host-local", "subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9",
			"rangeEnd": "10.0.0.99", "routes": [{"dst": "::/0"}, {"dst": "10.1.0.0/16", "gw": "x"}]}}`,
		`{"type": "sriov", "ipam": {"type": "host-local", "ranges": [[{"subnet": "255.255.255.255/32",
			"rangeStart": "::", "rangeEnd": "0.0.0.0"}], [{"subnet": "fd00::/127"}], null]}}`,
		`{"plugins": [{"type": "tuning", "sysctl": {"a": "b"}}, {"type": "sriov", "ipam": {"type": "static",
			"addresses": [{"address": "10.0.0.1/24", "gateway": "10.0.0.254"}]}}]}`,
		`{"plugins": null}`, `{"plugins": [{}]}`, `[]`, ``,
	} {
		f.Add(config, "", "net1")
		f.Add(config, "vfio-pci", "eth0")
	}

	f.Fuzz(func(t *testing.T, config, driver, name string) {
		text := ""
		for _, object := range []map[string]any{
			{"kind": "NetworkAttachmentDefinition", "metadata": map[string]any{"name": "n"},
				"spec": map[string]any{"config": config}},
			{"kind": "VfConfig", "netAttachDefName": "n", "driver": driver, "ifName": name},
		} {
			one, err := yaml.Marshal(object)
			if err != nil {
				t.Skip()
			}
			text += "---\n" + string(one) + "\n"
		}

		documents, _, err := conversion.Convert([]byte(text), sriovdra.Driver())
		if err != nil {
			t.Fatal(err)
		}
		if len(documents) != 2 {
			t.Fatalf("%d documents: %q", len(documents), documents)
		}
		for _, d := range documents {
			var object map[string]any
			if err := yaml.Unmarshal([]byte(d), &object); err != nil || object["kind"] == nil {
				t.Errorf("%v: %s", err, d)
			}
			if strings.Contains(d, "invalid IP") {
				t.Errorf("an address that is none: %s", d)
			}
		}
	})
}
