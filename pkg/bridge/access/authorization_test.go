// SPDX-License-Identifier: Apache-2.0

package access

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestParseAuthorization(t *testing.T) {
	const rule = "rules: [{subject: CN=a, networks: ['net-*'], "
	for name, test := range map[string]struct{ text, says string }{
		"rules": {
			rule + "ports: [], vlans: [7, 100-199], vnis: []}, {subject: CN=b, readOnly: true}]",
			"",
		},
		"all": {
			rule + "vlans: [1-4094], vnis: ['1-16777215'], mostNetworks: 0, mostPorts: 100}]", "",
		},
		"ports on networks of others": {rule + "ports: ['*'], vlans: [], vnis: []}]", ""},
		"none":                        {"rules: []", ""},
		"no subject": {
			"rules: [{networks: ['*'], vlans: [], vnis: []}]", "rules[0].subject: is missing",
		},
		"twice": {
			"rules: [{subject: CN=a}, {subject: CN=a}]",
			"rules[1].subject: CN=a has a rule already",
		},
		"pattern": {
			"rules: [{subject: CN=a, ports: ['[']}]", `rules[0].ports[0]: pattern "["`,
		},
		"empty":         {"", "rules: is missing"},
		"no rules":      {"{}", "rules: is missing"},
		"unknown field": {"rules: [{subject: CN=a, verbs: [get]}]", "verbs"},
		"no YAML":       {"rules: [", "yaml"},

		// Without its lists of segments, a rule would give its client all segments.
		"no VLANs": {rule + "vnis: [1-9]}]",
			`rules[0].vlans: is missing, want those that the client may give its networks: ` +
				`["100-199"], or ["1-4094"] for all, or [] for none`},
		"no VNIs":       {rule + "vlans: [1-9]}]", `rules[0].vnis: is missing`},
		"VLANs by null": {rule + "vlans: null, vnis: []}]", `rules[0].vlans: is missing`},
		"VLAN 4095": {
			rule + "vlans: [7, 4000-4095], vnis: []}]",
			`rules[0].vlans[1]: "4000-4095": must be in 1-4094`,
		},
		"VLAN 0": {
			rule + "vlans: [0], vnis: []}]", `rules[0].vlans[0]: "0": must be in 1-4094`,
		},
		"backwards": {rule + "vlans: [9-7], vnis: []}]", "the lowest first"},
		"VNI too large": {
			rule + "vlans: [], vnis: [16777216]}]",
			`rules[0].vnis[0]: "16777216": must be in 1-16777215`,
		},
		"no range": {
			rule + "vlans: ['*'], vnis: []}]",
			`rules[0].vlans[0]: "*": must be a number, or a range such as 100-199`,
		},
		"no list":    {rule + "vlans: 7, vnis: []}]", "vlans"},
		"a fraction": {rule + "vlans: [1.5], vnis: []}]", `"1.5": must be a number`},
		"below zero": {
			rule + "vlans: [], vnis: [], mostPorts: -1}]",
			"rules[0].mostPorts: -1: must not be negative",
		},
		"VRFs and SVIs": {
			rule + "vlans: [], vnis: [], vrfs: ['vrf-*'], svis: ['*'], mostVRFs: 1, mostSVIs: 0}]",
			"",
		},
		"SVI pattern": {
			rule + "vlans: [], vnis: [], svis: [a, '[']}]", `rules[0].svis[1]: pattern "["`,
		},
		"fewer VRFs than none": {
			rule + "vlans: [], vnis: [], mostVRFs: -1}]",
			"rules[0].mostVRFs: -1: must not be negative",
		},
		"no number": {rule + "vlans: [], vnis: [], mostNetworks: many}]", "mostNetworks"},
	} {
		_, err := ParseAuthorization([]byte(test.text))
		if test.says == "" && err != nil || test.says != "" &&
			(err == nil || !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%s: error %v, want one with %q", name, err, test.says)
		}
	}
}

// TestMetricsOfOthers checks that only clients that may know of all objects get metrics, because
// metrics name objects.
func TestMetricsOfOthers(t *testing.T) {
	for text, want := range map[string]int{
		"":                            http.StatusOK, // no authorization
		"{subject: CN=other}":         http.StatusForbidden,
		"{subject: ''}":               http.StatusForbidden,
		"{subject: '', ports: ['*']}": http.StatusForbidden,
		"{subject: '', networks: ['*'], ports: ['*'], readOnly: true}": http.StatusOK,
	} {
		c := &Credentials{}
		now := &parsed{}
		if text != "" {
			now.authorization = &Authorization{}
			text = strings.ReplaceAll(text, "''", "CN=p")
			a, err := ParseAuthorization([]byte("rules: [" + text + "]"))
			must.Succeed(t, err)
			now.authorization = a
		}

		c.current.Store(now)
		answer := httptest.NewRecorder()
		request := httptest.NewRequest(http.MethodGet, "https://xpu/metrics", nil)
		request.TLS.PeerCertificates = certificateOf("p")
		c.AuthorizeMetrics(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).
			ServeHTTP(answer, request)
		if answer.Code != want {
			t.Errorf("%s: %d %s, want %d", text, answer.Code, answer.Body, want)
		}
	}
}

// FuzzParseAuthorization checks that a rule that is accepted gives its client no other segments
// than those that it lists, and that no rule makes the agent panic.
func FuzzParseAuthorization(f *testing.F) {
	f.Add("rules: [{subject: CN=a, networks: ['net-*'], ports: [], vlans: [7, 100-199], vnis: "+
		"[1-16777215], mostPorts: 3}]", uint32(150))
	f.Add("rules: [{subject: CN=a, networks: ['net-*'], vlans: [], vnis: []}]", uint32(0))
	f.Add("rules: [{subject: CN=a, vlans: ['\"', null, true]}]", uint32(4095))

	f.Fuzz(func(t *testing.T, text string, segment uint32) {
		a, err := ParseAuthorization([]byte(text))
		if err != nil {
			return
		}

		for _, r := range a.Rules {
			if r.Subject == "" {
				t.Error("a rule without a subject")
			}

			c := Client{restricted: true, rule: r}
			c.CanSeePort("vf-0000-3b-00-2", []string{"net-blue"})

			spec := &evpn.LogicalBridgeSpec{VlanId: segment, Vni: &segment}
			allowed := c.CheckSegments("net-blue", nil, spec) == nil
			valid := 1 <= segment && segment <= maxVLAN
			if allowed && (len(r.VLANs) == 0 || len(r.VNIs) == 0 || !valid) {
				t.Errorf("segment %d is allowed by %+v", segment, r)
			}
		}
	})
}

func certificateOf(name string) []*x509.Certificate {
	return []*x509.Certificate{{Subject: pkix.Name{CommonName: name}}}
}
