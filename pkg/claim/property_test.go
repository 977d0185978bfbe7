// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// wrong has values of each field that the validation refuses, with a part of the message.
var wrong = map[string][][2]string{
	"interfaceName":        {{`"sixteen-bytes-xx"`, "must be at most 15"}, {`"a/b"`, "must not contain"}},
	"mtu":                  {{`67`, "must be 68-9216"}, {`9217`, "must be 68-9216"}},
	"mac":                  {{`"01:00:5e:00:00:01"`, "must be a unicast"}, {`"x"`, "must be"}},
	"addresses":            {{`["10.1.0.5"]`, "must be an address with prefix length"}},
	"routes":               {{`[{"to": "10.2.0.0"}]`, "must be a prefix"}},
	"neighbors":            {{`[{"address": "x", "mac": "02:00:00:00:00:01"}]`, "must be an address"}},
	"networks":             {{`[{"name": ""}]`, "must be the name of an XPUNetwork"}},
	"rules":                {{`[{"priority": 0, "table": 5, "incoming": true}]`, "must be 1-32765"}},
	"bond":                 {{`{"name": "b0", "mode": "lacp"}`, "must be one of"}},
	"vrf":                  {{`{"name": "red", "table": 0}`, "must be 1-"}},
	"allMulticast":         {{`"on"`, "bool"}},
	"sysctls":              {{`{"net.ipv4.ip_forward": "1"}`, "cannot be set"}},
	"offload.gsoMaxSize":   {{`0`, "must be 1-524280"}, {`524281`, "must be 1-524280"}},
	"offload.groMaxSize":   {{`0`, "must be 1-524280"}},
	"ethtool.features":     {{`{"": true}`, "must be 1-31 printable"}},
	"ethtool.privateFlags": {{`{"": true}`, "must be 1-31 printable"}},
	"ethtool.channels":     {{`{"rx": -1}`, "must be a number"}},
	"ethtool.rings":        {{`{"rx": -1}`, "must be a number"}},
	"ethtool.coalescing":   {{`{"rx-usecs": -1}`, "must be a number"}},
	"ethtool.pause":        {{`{"": true}`, "must be 1-31 printable"}},
	"ethtool.rss": {
		{`{"equal": 0}`, "equal \"0\": must be 1-1024"},
		{`{"weights": [0, 0]}`, "weights: must have one that is not 0"},
		{`{"hashKey": "6d5a"}`, "hashKey: must be a key in hexadecimal"},
		{`{"hashFunction": "md5"}`, "hashFunction \"md5\": must be one of crc32, toeplitz, xor"},
	},
	"vf.vlan":         {{`4095`, "must be 0-4094"}},
	"vf.vlanProtocol": {{`"802.1x"`, "must be one of 802.1q, 802.1ad"}},
	"vf.qos":          {{`8`, "must be 0-7"}},
	"vf.trust":        {{`"on"`, "bool"}},
	"vf.spoofCheck":   {{`"on"`, "bool"}},
	"vf.minTxRate":    {{`-1`, "must be 0-"}},
	"vf.maxTxRate":    {{`-1`, "must be 0-"}},
	"vf.linkState":    {{`"up"`, "must be one of auto, enable, disable"}},
	"vf.nodeGUID":     {{`"00:11:22:33:44:55"`, "must be 8 bytes"}, {`"ff:ff:ff:ff:ff:ff:ff:ff"`, "all ones"}},
	"vf.portGUID":     {{`"0011.2233.4455.6677"`, "must be 8 bytes"}, {`"00:00:00:00:00:00:00:00"`, "zeros"}},

	"offload.gsoIPv4MaxSize": {{`0`, "must be 1-524280"}},
	"offload.groIPv4MaxSize": {{`0`, "must be 1-524280"}},
}

// TestEveryFieldIsAProperty checks that the table of properties names each field of an
// InterfaceConfig that changes the Function or the pod, and no other fields. Each of these fields is
// validated, with a message that begins with its name, or has it if the decoder refuses the type,
// and stands in the page that explains them.
func TestEveryFieldIsAProperty(t *testing.T) {
	// The network is the xPU's, and the driver belongs to the pool's Function.
	want := map[string]bool{"network": false, "driver": false}
	for path := range leaves(reflect.TypeFor[v1alpha1.InterfaceConfig](), "") {
		if _, apart := want[path]; !apart {
			want[path] = true
		}
	}

	named := map[string]bool{}
	for _, p := range netdev.Properties() {
		for _, field := range p.Fields {
			if named[field] = true; !want[field] {
				t.Errorf("property %q: there is no field %s", p.Name, field)
			}
		}
	}

	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "how-to", "configure-interface.md"))
	must.Succeed(t, err)
	for path, wanted := range want {
		if !wanted {
			continue
		}
		if !named[path] {
			t.Errorf("no property has the field %s", path)
		}
		if word := path[strings.LastIndex(path, ".")+1:]; !strings.Contains(string(page), word+":") &&
			!strings.Contains(string(page), "`"+word+"`") {
			t.Errorf("configure-interface.md does not have the field %s", path)
		}
		testRefused(t, path)
	}
}

func testRefused(t *testing.T, path string) {
	t.Helper()
	if len(wrong[path]) == 0 {
		t.Errorf("no value of %s is known to be refused", path)
	}
	for _, of := range wrong[path] {
		begin := "spec.devices.config[0].opaque.parameters." + path
		err := validated(with(path, of[0]))
		names := func(text string) bool {
			ofDecoder := of[1] == "bool" && strings.Contains(text, "."+path+" of type bool")
			return ofDecoder || strings.HasPrefix(text, begin) && strings.Contains(text, of[1])
		}
		if err == nil || !names(err.Error()) {
			t.Errorf("%s of %s: error %v, want %q after %s", of[0], path, err, of[1], begin)
		}
	}
}

// leaves yields the paths of the fields of a configuration. The fields of vf, offload and ethtool
// are fields of their own.
func leaves(of reflect.Type, prefix string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range of.NumField() {
			field := of.Field(i)
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			nested := slices.Contains([]string{"vf", "offload", "ethtool"}, name)
			switch {
			case field.Anonymous:
			case nested:
				leaves(field.Type.Elem(), name+".")(yield)
			default:
				yield(prefix + name)
			}
		}
	}
}
