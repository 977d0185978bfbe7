// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

const wholeConfig = `
xpus:
- name: card
  endpoint: 192.168.100.1:50151
  dialect: evpn-gw
  vtep: 198.51.100.1
  pfs: ["0000:3B:00.0", "0000:3b:00.1"]
  tls: {certFile: /tls/tls.crt, keyFile: /tls/tls.key, caFile: /tls/ca.crt, serverName: card}
- name: other
  endpoint: "[fd00::1]:50151"
  insecure: true
networks:
  blue: {vlan: 100, vni: 1000, mtu: 1450, allowedNamespaces: {from: All}}
  green:
    vlan: 200
    allowedNamespaces: {from: Selector, selector: {matchLabels: {kubernetes.io/metadata.name: lab}}}
pools:
  fast: blue
`

func TestParseConfig(t *testing.T) {
	got, err := ParseConfig([]byte(wholeConfig))
	if err != nil {
		t.Fatal(err)
	}

	want := &Config{
		XPUs: []XPU{
			{
				Name: "card", Endpoint: "192.168.100.1:50151", Dialect: "evpn-gw",
				PFs:  []pci.Address{"0000:3b:00.0", "0000:3b:00.1"},
				VTEP: "198.51.100.1",
				TLS: &TLSFiles{
					CertFile: "/tls/tls.crt", KeyFile: "/tls/tls.key", CAFile: "/tls/ca.crt",
					ServerName: "card",
				},
			},
			{Name: "other", Endpoint: "[fd00::1]:50151", Insecure: true},
		},
		Networks: map[string]Network{
			"blue": {
				VLAN: 100, AllowedNamespaces: v1alpha1.AllowedNamespaces{
					From: v1alpha1.NamespacesFromAll,
				}, VNI: new(int32(1000)), MTU: 1450,
			},
			"green": {VLAN: 200, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromSelector,
				Selector: &metav1.LabelSelector{
					MatchLabels: map[string]string{"kubernetes.io/metadata.name": "lab"},
				},
			}},
		},
		Pools: map[string]string{"fast": "blue"},
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if empty, err := ParseConfig(nil); err != nil || len(empty.XPUs) > 0 {
		t.Errorf("ParseConfig of nothing = %+v, %v; want a node without xPUs", empty, err)
	}
}

func TestParseConfigRefuses(t *testing.T) {
	for _, test := range []struct {
		name, old, new string
		want           []string // texts that the error must all contain
	}{
		{"an unknown field", "dialect:", "dialekt:", []string{`unknown field "xpus[0].dialekt"`}},
		{"a field twice", "  dialect: evpn-gw", "  dialect: evpn-gw\n  dialect: evpn-gw",
			[]string{`"dialect" already set`}},
		{"another type", "vlan: 200", "vlan: many", []string{"vlan", "int32"}},
		{"no name", "name: card", `name: ""`, []string{"xpus[0].name: Required"}},
		{"a name twice", "name: other", "name: card",
			[]string{`xpus[1].name: Duplicate value: "card"`}},
		{"no port", "192.168.100.1:50151", "192.168.100.1",
			[]string{`xpus[0].endpoint: Invalid value: "192.168.100.1": must be host:port`}},
		{"another dialect", "dialect: evpn-gw", "dialect: klingon",
			[]string{`xpus[0].dialect: Unsupported value: "klingon"`, `"evpn-gw"`}},
		{"no address", "vtep: 198.51.100.1", "vtep: 198.51.100.1/24",
			[]string{`xpus[0].vtep: Invalid value: "198.51.100.1/24": must be an address`}},
		{"no PCI address", "0000:3b:00.1", "3b:00.1",
			[]string{`xpus[0].pfs[1]: Invalid value: "3b:00.1": must be an address`}},
		{"a PF twice", "0000:3b:00.1", "0000:3b:00.0",
			[]string{`xpus[0].pfs[1]: Duplicate value: "0000:3b:00.0"`}},
		{"two that take every PF", `  pfs: ["0000:3B:00.0", "0000:3b:00.1"]`, "",
			[]string{"xpus[1].pfs: Required"}},
		{"neither TLS nor insecure", "  insecure: true",
			"", []string{"xpus[1].tls", "insecure: true"}},
		{"both", "  dialect: evpn-gw", "  insecure: true", []string{"xpus[0].tls"}},
		{"a file left away", "keyFile: /tls/tls.key, ",
			"", []string{"xpus[0].tls.keyFile: Required"}},
		{"an odd name of a network", "  green:", "  Green:",
			[]string{`networks[Green]: Invalid value: "Green"`}},
		{"no VLAN", "    vlan: 200\n", "",
			[]string{"networks[green].vlan: Invalid value: 0: must be 1-4094"}},
		{"a VLAN twice", "vlan: 200", "vlan: 100",
			[]string{"networks[green].vlan: Invalid value: 100: belongs to network blue"}},
		{"a VNI twice", "vlan: 200", "vlan: 200\n    vni: 1000",
			[]string{"networks[green].vni: Invalid value: 1000: belongs to network blue"}},
		{"no VNI", "vni: 1000", "vni: 0", []string{"networks[blue].vni: Invalid value: 0"}},
		{"a small MTU", "mtu: 1450", "mtu: 68",
			[]string{"networks[blue].mtu: Invalid value: 68: must be 1280-9216"}},
		{"a pool in no network", "fast: blue", "fast: red",
			[]string{`pools[fast]: Not found: "red"`}},
		{"a gateway in the xPU", "mtu: 1450", "routed: {vrf: one}", []string{
			"networks[blue].routed: Forbidden: gateways in the xPU need xpu-controller",
		}},
		{"two mistakes", "mtu: 1450, allowedNamespaces: {from: All}", "mtu: 68",
			[]string{"networks[blue].mtu", "networks[blue].allowedNamespaces.from: Required"}},
		{"other namespaces", "{from: All}", "{from: Same}",
			[]string{`networks[blue].allowedNamespaces.from: Unsupported value: "Same"`}},
		{"a selector for all", "{from: All}", "{from: All, selector: {}}",
			[]string{"networks[blue].allowedNamespaces.selector: Invalid value"}},
		{"no selector", "{from: All}", "{from: Selector}",
			[]string{"networks[blue].allowedNamespaces.selector: Invalid value"}},
		{"another label", "kubernetes.io/metadata.name", "team",
			[]string{"networks[green].allowedNamespaces.selector.matchLabels",
				"must be kubernetes.io/metadata.name"}},
		{"an expression about another label", "{matchLabels: {kubernetes.io/metadata.name: lab}}",
			"{matchExpressions: [{key: team, operator: Exists}]}",
			[]string{"networks[green].allowedNamespaces.selector.matchExpressions[0]",
				"must be kubernetes.io/metadata.name"}},
		{"a wrong expression", "{matchLabels: {kubernetes.io/metadata.name: lab}}",
			"{matchExpressions: [{key: kubernetes.io/metadata.name, operator: In}]}",
			[]string{"networks[green].allowedNamespaces.selector",
				"for 'in', 'notin' operators, values set can't be empty"}},
	} {
		if !strings.Contains(wholeConfig, test.old) {
			t.Fatalf("%s: %q is not in the example", test.name, test.old)
		}

		_, err := ParseConfig([]byte(strings.Replace(wholeConfig, test.old, test.new, 1)))
		if err == nil {
			t.Errorf("%s: no error", test.name)
			continue
		}

		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %q, want %q in it", test.name, err, want)
			}
		}
	}
}

func TestLoadConfigNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "direct.yaml")
	if _, err := LoadConfig(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v, want one with %s", err, path)
	}
	if err := os.WriteFile(path, []byte("pools: {fast: blue}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadConfig(path); err == nil ||
		!strings.Contains(err.Error(), path+": pools[fast]") {
		t.Errorf("error %v, want one with %s and the field", err, path)
	}
}

// FuzzParseConfig checks that every accepted configuration can be used.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(wholeConfig))
	f.Add([]byte("{}"))
	f.Add([]byte("xpus: [{}]"))
	f.Add([]byte("networks: {a: null}"))

	f.Fuzz(func(t *testing.T, text []byte) {
		config, err := ParseConfig(text)
		if err != nil {
			return
		}
		if again := config.check(); len(again) > 0 {
			t.Fatalf("accepted at first, refused then: %v", again)
		}

		for pool, network := range config.Pools {
			if _, known := config.Networks[network]; !known {
				t.Fatalf("pool %s has network %q, which is not there", pool, network)
			}
		}

		direct, err := NewDirect(config, nil,
			DirectOptions{
				Installation: "net", Changed: func() {}, Registry: prometheus.NewRegistry(),
				Log: logr.Discard(),
			})

		if err != nil {
			t.Fatal(err)
		}

		ended, end := context.WithCancel(t.Context())
		end()
		if err := direct.Run(ended); err != nil { // closes the connections
			t.Fatal(err)
		}
	})
}
