// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// as returns the context of a call by the client of a rule, whose subject is "CN=" and a name.
func as(t *testing.T, rule string) context.Context {
	t.Helper()
	a, err := access.ParseAuthorization([]byte("rules: [" + rule + "]"))
	must.Succeed(t, err)
	name := strings.TrimPrefix(a.Rules[0].Subject, "CN=")
	certificate := &x509.Certificate{Subject: pkix.Name{CommonName: name}}
	return access.NewContext(t.Context(), a.Client([]*x509.Certificate{certificate}))
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

// TestSegmentsOfClients checks that a client can give its networks only the segments of its rule,
// and cannot make more objects than the rule allows.
func TestSegmentsOfClients(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.vlanAware = true
	ctx := as(t, tenantA)
	create := func(id string, spec *evpn.LogicalBridgeSpec) error {
		_, err := a.networks.create(ctx, id, spec)
		return err
	}

	update := func(id string, spec *evpn.LogicalBridgeSpec, mask ...string) error {
		to := &evpn.LogicalBridge{Name: networkNames.prefix + id, Spec: spec}
		_, err := a.networks.update(ctx, to, &fieldmaskpb.FieldMask{Paths: mask}, false)
		return err
	}

	const has = `the rule of --authorization for the client "CN=a" has 100-199`
	const hasVNIs = `for the client "CN=a" has 1000-1999`

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

	// A network keeps its segments under a rule that does not allow them.
	all := as(t, "{subject: CN=c, networks: ['*'], vlans: [1-4094], vnis: [1-16777215]}")
	_, err = a.networks.create(all, "net-a-2", segmentOf(300, 3000))
	must.Succeed(t, err)
	wantCode(t, create("net-a-2", segmentOf(300, 3000)), codes.OK, "")
	wantCode(t, update("net-a-2", segmentOf(300, 1001)), codes.OK, "")
	wantCode(t, update("net-a-2", segmentOf(301, 1001)), codes.PermissionDenied, "vlan_id 301")

	wantCode(t, create("net-a-3", segmentOf(103)), codes.OK, "")
	wantCode(t, create("net-a-4", segmentOf(104)), codes.ResourceExhausted,
		"lets it have 3, and it has 3")
	_, err = a.networks.delete(ctx, networkNames.prefix+"net-a-3", false)
	must.Succeed(t, err)
	wantCode(t, create("net-a-4", segmentOf(104)), codes.OK, "")

	port := func(id string, mac string) error {
		_, err := a.ports.create(ctx, id, accessPort(mac, networkNames.prefix+"net-a-1"))
		return err
	}

	must.Succeed(t, errors.Join(port("vf-1", mac1), port("vf-2", mac2)))
	wantCode(t, port("vf-3", "02:00:00:00:00:03"), codes.ResourceExhausted, "bridge port vf-3")
	wantCode(t, port("vf-2", mac2), codes.OK, "")
}

// TestOthersAreNotNamed checks that no answer to a client has the id of an object that its rule
// does not allow, and that no answer shows whether such an object exists.
func TestOthersAreNotNamed(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.vlanAware = true
	ctx := as(t, tenantA)
	owner := t.Context()
	for id, spec := range map[string]*evpn.LogicalBridgeSpec{
		"net-b-secret": segmentOf(150, 1500), "net-a-1": segmentOf(100),
		"net-shared": segmentOf(30),
	} {
		_, err := a.networks.create(owner, id, spec)
		must.Succeed(t, err)
	}

	name := func(id string) string { return networkNames.prefix + id }
	trunk := accessPort(mac1, name("net-b-secret"), name("net-a-1"))
	trunk.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	for id, spec := range map[string]*evpn.BridgePortSpec{
		"vf-9-secret": accessPort(mac2, name("net-b-secret")),
		"sf-9-secret": accessPort(mac2, name("net-shared")), "sf-8-secret": trunk,
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
			createPort("vf-1", accessPort(mac2, name("net-shared"))), codes.AlreadyExists,
			"by a bridge port of another client",
		},
		"MAC of a trunk": {
			createPort("vf-1", accessPort(mac1, name("net-a-1"))), codes.AlreadyExists,
			"by a bridge port of another client",
		},
		"port in another network": {createPort("vf-9-secret", accessPort(mac1, name("net-shared"))),
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
				text = strings.ReplaceAll(text, "vf-9-secret", "") // the client has named it itself
			}
			if strings.Contains(text, "secret") || strings.Contains(text, mac2) &&
				what != "MAC in use" {
				t.Errorf("%v names objects of others", test.err)
			}
		})
	}

	// The answers for an id that is not the client's are the same whether the object exists or not.
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
					createPort("vf-1", accessPort(mac1, name(id))))
			} else {
				port := portNames.prefix + id
				_, get := ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: port})
				_, remove := ports.DeleteBridgePort(ctx,
					&evpn.DeleteBridgePortRequest{Name: port, AllowMissing: true})
				_, update := a.ports.update(ctx,
					&evpn.BridgePort{Name: port, Spec: accessPort("", name("net-a-1"))}, nil, true)
				errs = append(errs, get, remove, update,
					createPort(id, accessPort("", name("net-a-1"))))
			}

			for _, err := range errs {
				if code := status.Code(err); code != codes.PermissionDenied {
					t.Errorf("%s: %v, want PermissionDenied", id, err)
				}
				said[i] += strings.ReplaceAll(err.Error(), id, "<id>") + "\n"
			}
		}

		if said[0] != said[1] {
			t.Errorf("the answers for an object that exists differ:\n%s%s", said[0], said[1])
		}
	}

	// Pages and their tokens have only the client's own objects.
	for _, token := range []string{"", pageToken("net-b-secret")} {
		list, err := networks.ListLogicalBridges(ctx,
			&evpn.ListLogicalBridgesRequest{PageSize: 1, PageToken: token})
		must.Succeed(t, err)
		last, err := base64.RawURLEncoding.DecodeString(list.GetNextPageToken())
		if err != nil || strings.Contains(list.String()+string(last), "secret") {
			t.Errorf("page %v with token %q, %v", list, last, err)
		}
	}

	// The reason why an object is down names other objects only to clients that may know of them.
	fake.failure = fmt.Errorf("bridge: %w", errors.Join(errors.New("full"), plane.ObjectError{
		Object:    plane.Object{Kind: plane.KindNetwork, ID: "net-b-secret"},
		Text:      "VLAN 150 is in use by net-b-secret",
		Anonymous: "VLAN 150 is in use",
	}, plane.ObjectError{
		Object: plane.Object{Kind: plane.KindPort, ID: "vf-9-secret"},
		Text:   "is port vf-9-secret", Anonymous: "is a port",
	}))

	got, err := a.networks.create(ctx, "net-a-2", segmentOf(102))
	must.Succeed(t, err)
	details := func(n *evpn.LogicalBridge) string {
		return n.GetStatus().GetComponents()[0].GetDetails()
	}
	if said := details(got); said != "bridge: full\nVLAN 150 is in use\nis a port" {
		t.Errorf("the client gets the reason %q", said)
	}

	got, err = a.networks.get(owner, name("net-a-2"))
	must.Succeed(t, err)
	if said := details(got); !strings.Contains(said, "net-b-secret") ||
		!strings.Contains(said, "vf-9-secret") {
		t.Errorf("a client that may know of all gets the reason %q", said)
	}
}
