// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

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

		// A rule of before there were limits would give its client all segments.
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
		"no number": {rule + "vlans: [], vnis: [], mostNetworks: many}]", "mostNetworks"},
	} {
		_, err := ParseAuthorization([]byte(test.text))
		if test.says == "" && err != nil || test.says != "" &&
			(err == nil || !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%s: error %v, want one with %q", name, err, test.says)
		}
	}
}

// as is the context of a call by the client that a rule is for.
func as(t *testing.T, rule string) context.Context {
	t.Helper()
	a, err := ParseAuthorization([]byte("rules: [" + rule + "]"))
	must.Succeed(t, err)
	who := client{subject: a.Rules[0].Subject, restricted: true, rule: a.Rules[0]}
	return context.WithValue(t.Context(), clientKey{}, who)
}

const tenantA = "{subject: CN=a, networks: ['net-a-*', 'net-shared'], ports: ['vf-*'], " +
	"vlans: [100-199], vnis: [1000-1999], mostNetworks: 3, mostPorts: 2}"

func segmentOf(vlan uint32, vni ...uint32) *evpn.LogicalBridgeSpec {
	spec := &evpn.LogicalBridgeSpec{VlanId: vlan}
	if len(vni) > 0 {
		spec.Vni = proto.Uint32(vni[0])
	}
	return spec
}

// TestSegmentsOfClients: a client gives its networks the segments of its rule, and makes no more
// objects than that says.
func TestSegmentsOfClients(t *testing.T) {
	a, plane := onPaper(t)
	plane.vlans = true
	ctx := as(t, tenantA)
	create := func(id string, spec *evpn.LogicalBridgeSpec) error {
		_, err := a.networks.create(ctx, id, spec)
		return err
	}

	update := func(id string, spec *evpn.LogicalBridgeSpec, mask ...string) error {
		to := &evpn.LogicalBridge{Name: networkKind.prefix + id, Spec: spec}
		_, err := a.networks.update(ctx, to, &fieldmaskpb.FieldMask{Paths: mask}, false)
		return err
	}

	const has, hasVNIs = `the rule of --authorization for the client "CN=a" has 100-199`, `for the client "CN=a" has 1000-1999`

	wantCode(t, create("net-a-1", segmentOf(100, 1000)), codes.OK, "")
	wantCode(t, create("net-a-1", segmentOf(100, 1000)), codes.OK, "")

	for _, vlan := range []uint32{1, 20, 99, 200, 4094} {
		wantCode(t, create("net-a-2", segmentOf(vlan)), codes.PermissionDenied,
			fmt.Sprintf("net-a-2: vlan_id %d: %s", vlan, has))
	}

	for _, vni := range []uint32{1, 200, 999, 2000, 1<<24 - 1} {
		wantCode(t, create("net-a-2", segmentOf(101, vni)), codes.PermissionDenied,
			fmt.Sprintf("net-a-2: vni %d", vni))
	}

	wantCode(t, update("net-a-1", segmentOf(20), "spec.vlan_id"), codes.PermissionDenied, has)
	wantCode(t, update("net-a-1", segmentOf(100, 200), "spec.vni"), codes.PermissionDenied, hasVNIs)
	wantCode(t, update("net-a-1", segmentOf(199, 1999)), codes.OK, "")
	_, err := a.networks.create(as(t, "{subject: CN=none, networks: ['*'], vlans: [], vnis: []}"),
		"net-none", segmentOf(100))
	wantCode(t, err, codes.PermissionDenied, `for the client "CN=none" has none`)

	// What a network has, it keeps under a rule that is narrower than the one of before.
	all := as(t, "{subject: CN=c, networks: ['*'], vlans: [1-4094], vnis: [1-16777215]}")
	_, err = a.networks.create(all, "net-a-2", segmentOf(300, 3000))
	must.Succeed(t, err)
	wantCode(t, create("net-a-2", segmentOf(300, 3000)), codes.OK, "")
	wantCode(t, update("net-a-2", segmentOf(300, 1001)), codes.OK, "")
	wantCode(t, update("net-a-2", segmentOf(301, 1001)), codes.PermissionDenied, "vlan_id 301")

	wantCode(t, create("net-a-3", segmentOf(103)), codes.OK, "")
	wantCode(t, create("net-a-4", segmentOf(104)), codes.ResourceExhausted,
		"lets it have 3, and it has 3")
	_, err = a.networks.delete(ctx, networkKind.prefix+"net-a-3", false)
	must.Succeed(t, err)
	wantCode(t, create("net-a-4", segmentOf(104)), codes.OK, "")

	port := func(id string, mac string) error {
		_, err := a.ports.create(ctx, id, access(mac, networkKind.prefix+"net-a-1"))
		return err
	}

	must.Succeed(t, errors.Join(port("vf-1", mac1), port("vf-2", mac2)))
	wantCode(t, port("vf-3", "02:00:00:00:00:03"), codes.ResourceExhausted, "bridge port vf-3")
	wantCode(t, port("vf-2", mac2), codes.OK, "")
}

// TestOthersAreNotNamed: whatever a client calls, no answer has the id of an object that its rule
// does not have, or tells whether there is one.
func TestOthersAreNotNamed(t *testing.T) {
	a, plane := onPaper(t)
	plane.vlans = true
	ctx := as(t, tenantA)
	owner := t.Context()
	for id, spec := range map[string]*evpn.LogicalBridgeSpec{
		"net-b-secret": segmentOf(150, 1500), "net-a-1": segmentOf(100),
		"net-shared": segmentOf(30),
	} {
		_, err := a.networks.create(owner, id, spec)
		must.Succeed(t, err)
	}

	name := func(id string) string { return networkKind.prefix + id }
	trunk := access(mac1, name("net-b-secret"), name("net-a-1"))
	trunk.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	for id, spec := range map[string]*evpn.BridgePortSpec{
		"vf-9-secret": access(mac2, name("net-b-secret")),
		"sf-9-secret": access(mac2, name("net-shared")), "sf-8-secret": trunk,
	} {
		_, err := a.ports.create(owner, id, spec)
		must.Succeed(t, err)
	}

	networks, ports := networkServer{Agent: a}, portServer{Agent: a}
	createNetwork := func(spec *evpn.LogicalBridgeSpec) error {
		_, err := a.networks.create(ctx, "net-a-2", spec)
		return err
	}

	createPort := func(id string, spec *evpn.BridgePortSpec) error {
		_, err := a.ports.create(ctx, id, spec)
		return err
	}

	_, deleteInUse := networks.DeleteLogicalBridge(ctx,
		&evpn.DeleteLogicalBridgeRequest{Name: name("net-a-1")})
	_, badToken := networks.ListLogicalBridges(ctx, &evpn.ListLogicalBridgesRequest{PageToken: "!"})
	for what, test := range map[string]struct {
		err  error
		code codes.Code
		says string
	}{
		"VLAN in use": {
			createNetwork(segmentOf(150)), codes.AlreadyExists,
			"in use by a logical bridge of another client",
		},
		"VNI in use": {createNetwork(segmentOf(101, 1500)), codes.AlreadyExists,
			"in use by a logical bridge of another client"},
		"MAC in use": {
			createPort("vf-1", access(mac2, name("net-shared"))), codes.AlreadyExists,
			"by a bridge port of another client",
		},
		"MAC of a trunk": {
			createPort("vf-1", access(mac1, name("net-a-1"))), codes.AlreadyExists,
			"by a bridge port of another client",
		},
		"port in another network": {createPort("vf-9-secret", access(mac1, name("net-shared"))),
			codes.PermissionDenied, "does not have it"},
		"network in use": {
			deleteInUse, codes.FailedPrecondition, "in use by a bridge port of another client",
		},
		"page token": {badToken, codes.InvalidArgument, "page_token"},
	} {
		t.Run(what, func(t *testing.T) {
			wantCode(t, test.err, test.code, test.says)
			text := test.err.Error()
			if what == "port in another network" {
				text = strings.ReplaceAll(text, "vf-9-secret", "") // the client said it itself
			}
			if strings.Contains(text, "secret") || strings.Contains(text, mac2) &&
				what != "MAC in use" {
				t.Errorf("%v tells of others", test.err)
			}
		})
	}

	// An id that is not the client's says the same, whether there is such an object or not.
	for _, ids := range [][2]string{
		{"net-b-secret", "net-b-absent"}, {"sf-9-secret", "sf-9-absent"},
	} {
		var said [2]string
		for i, id := range ids {
			var errs []error
			if strings.HasPrefix(id, "net") {
				_, get := networks.GetLogicalBridge(ctx,
					&evpn.GetLogicalBridgeRequest{Name: name(id)})
				_, remove := networks.DeleteLogicalBridge(ctx,
					&evpn.DeleteLogicalBridgeRequest{Name: name(id), AllowMissing: true})
				_, update := a.networks.update(ctx,
					&evpn.LogicalBridge{Name: name(id), Spec: segmentOf(9999)}, nil, true)
				_, create := a.networks.create(ctx, id, segmentOf(9999))
				errs = append(errs, get, remove, update, create,
					createPort("vf-1", access(mac1, name(id))))
			} else {
				port := portKind.prefix + id
				_, get := ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: port})
				_, remove := ports.DeleteBridgePort(ctx,
					&evpn.DeleteBridgePortRequest{Name: port, AllowMissing: true})
				_, update := a.ports.update(ctx,
					&evpn.BridgePort{Name: port, Spec: access("", name("net-a-1"))}, nil, true)
				errs = append(errs, get, remove, update,
					createPort(id, access("", name("net-a-1"))))
			}

			for _, err := range errs {
				if code := status.Code(err); code != codes.PermissionDenied {
					t.Errorf("%s: %v, want PermissionDenied", id, err)
				}
				said[i] += strings.ReplaceAll(err.Error(), id, "<id>") + "\n"
			}
		}

		if said[0] != said[1] {
			t.Errorf("one that is there is told apart:\n%s%s", said[0], said[1])
		}
	}

	// Pages have the client's own objects, and so do their tokens.
	for _, token := range []string{"", pageToken("net-b-secret")} {
		list, err := networks.ListLogicalBridges(ctx,
			&evpn.ListLogicalBridgesRequest{PageSize: 1, PageToken: token})
		must.Succeed(t, err)
		last, err := base64.RawURLEncoding.DecodeString(list.GetNextPageToken())
		if err != nil || strings.Contains(list.String()+string(last), "secret") {
			t.Errorf("page %v with token %q, %v", list, last, err)
		}
	}

	// The reason why an object is down names others to those who may know of them only.
	plane.failure = fmt.Errorf("bridge: %w", errors.Join(errors.New("full"), reference{
		to: task{taskNetwork, "net-b-secret"}, text: "VLAN 150 is in use by net-b-secret",
		instead: "VLAN 150 is in use",
	}, reference{
		to: task{taskPort, "vf-9-secret"}, text: "is port vf-9-secret", instead: "is a port",
	}))

	got, err := a.networks.create(ctx, "net-a-2", segmentOf(102))
	must.Succeed(t, err)
	details := func(n *evpn.LogicalBridge) string {
		return n.GetStatus().GetComponents()[0].GetDetails()
	}
	if said := details(got); said != "bridge: full\nVLAN 150 is in use\nis a port" {
		t.Errorf("the client is told %q", said)
	}

	got, err = a.networks.get(owner, name("net-a-2"))
	must.Succeed(t, err)
	if said := details(got); !strings.Contains(said, "net-b-secret") ||
		!strings.Contains(said, "vf-9-secret") {
		t.Errorf("who may know of all is told %q", said)
	}
}

// TestMetricsOfOthers: metrics name objects, so they are for clients that may know of all.
func TestMetricsOfOthers(t *testing.T) {
	for text, want := range map[string]int{
		"":                            http.StatusOK, // no authorization
		"{subject: CN=other}":         http.StatusForbidden,
		"{subject: ''}":               http.StatusForbidden,
		"{subject: '', ports: ['*']}": http.StatusForbidden,
		"{subject: '', networks: ['*'], ports: ['*'], readOnly: true}": http.StatusOK,
	} {
		c := &Credentials{}
		now := &credentialsNow{}
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

// FuzzParseAuthorization: a rule that is taken gives its client no segment beside those that it
// has, and does not end the agent.
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
				t.Error("a rule for nobody")
			}

			who := client{restricted: true, rule: r}
			who.sees("vf-0000-3b-00-2", []string{"net-blue"})

			spec := segmentOf(segment, segment)
			allowed := who.checkSegment("net-blue", nil, spec) == nil
			if allowed && (len(r.VLANs) == 0 || len(r.VNIs) == 0 || validNetwork(spec) != nil) {
				t.Errorf("segment %d is allowed by %+v", segment, r)
			}
		}
	})
}

func certificateOf(name string) []*x509.Certificate {
	return []*x509.Certificate{{Subject: pkix.Name{CommonName: name}}}
}
