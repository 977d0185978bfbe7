// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var comparePrefixes = cmp.Options{
	cmp.Comparer(func(a, b netip.Prefix) bool {
		return a == b
	}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
}

func TestParseIPAM(t *testing.T) {
	t.Parallel()
	gateway4, gateway6 := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("2001:db8::1")
	got, err := parseIPAM(json.RawMessage(`{"cniVersion":"1.1.0",
		"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"2001:db8::5/64","gateway":"2001:db8::1"},{"address":"10.3.0.5/24","gateway":"10.3.0.1"}],
		"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"},{"dst":"10.2.7.0/16","gw":"10.1.0.9","mtu":1400,"advmss":1300,"priority":7,"table":100,"scope":0}]}`))
	must.Succeed(t, err)

	addresses := []netip.Prefix{
		netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("2001:db8::5/64"),
		netip.MustParsePrefix("10.3.0.5/24"),
	}

	routes := []function.Route{
		{To: netip.MustParsePrefix("0.0.0.0/0"), Via: gateway4, Yield: true},
		{To: netip.MustParsePrefix("::/0"), Via: gateway6, Yield: true},
		{
			To: netip.MustParsePrefix("10.2.0.0/16"), Via: netip.MustParseAddr("10.1.0.9"),
			Yield: true,
			MTU:   1400, AdvMSS: 1300, Metric: 7, Table: 100, Scope: new(0),
		},
	}

	if diff := cmp.Diff(addresses, got.addresses, comparePrefixes); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(routes, got.routes, comparePrefixes); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}

	for _, nothing := range []string{"", "null"} {
		if got, err := parseIPAM(json.RawMessage(nothing)); err != nil || got.result != nil {
			t.Errorf("%q: %+v, %v", nothing, got, err)
		}
	}

	for text, want := range map[string]string{
		`{"cniVersion":"1.1.0","ips":[{"gateway":"10.1.0.1"}]}`: "ips[0]",
		`{"cniVersion":"1.1.0","ips":[{"address":"224.0.0.1/24"}]}`: "addresses[0] " +
			"224.0.0.1/24: must be a unicast address",
		`{"cniVersion":"1.1.0","routes":[{"gw":"10.1.0.1"}]}`: "routes[0]",
		`{"cniVersion":"1.1.0","routes":[{"dst":"::/0","gw":"1.2.3.4"}]}`: "routes[0]: via " +
			"1.2.3.4: must be of the same family",
		`{"cniVersion":"1.1.0","ips":[null],"routes":[null]}`: "ips[0]",
		`{"cniVersion":"2.0.0"}`:                              "2.0.0",
		`[]`:                                                  "result of the IPAM plugin",
	} {
		_, err := parseIPAM(json.RawMessage(text))
		coded, ok := errors.AsType[*types.Error](err)
		if !ok || coded.Code != types.ErrDecodingFailure || !strings.Contains(coded.Msg, want) {
			t.Errorf("%s: error %v, want %q", text, err, want)
		}
	}
}

// A configuration is either refused with a code, or leads to an interface that the kernel accepts.
func FuzzParse(f *testing.F) {
	f.Add(
		[]byte(
			`{"deviceID":"0000:3b:02.1","vlan":1,"vlanQoS":1,"vlanProto":"802.1ad","trust":"on","mac":"02:00:00:00:00:01"}`,
		), "K8S_POD_UID=1;MAC=02:00:00:00:00:01",
	)

	f.Add(
		[]byte(
			`{"deviceID":"0000:3b:02.1","cniVersion":"1.0.0","prevResult":{"interfaces":[{"name":"x"}],"ips":[{"address":"10.0.0.1/8"}]}}`,
		), "",
	)

	f.Add([]byte(`[]`), "")
	f.Add([]byte(`{"cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"}]}`), ";=;")
	f.Add(
		[]byte(
			`{"deviceID":"mlx5_core.sf.4","cniVersion":"0.2.0","runtimeConfig":{"bandwidth":{"egressRate":1},"dns":{"servers":["x"]}}}`,
		), "",
	)

	f.Add(
		[]byte(
			`{"deviceID":"0000:3b:02.1","network":"..","runtimeConfig":{"ips":["10.0.0.1/8"],"infinibandGUID":[0]},"vlna":null}`,
		), "K8S_POD_NAME=",
	)

	sf := func(string) (function.ID, bool) {
		return function.SubfunctionID("0000:3b:00.0", 4), true
	}
	f.Fuzz(func(t *testing.T, config []byte, args string) {
		w, err := parser{
			auxiliary: sf,
		}.parse(wire.Request{Command: wire.Add, Config: config, Args: args})
		if reply := errorReply(types.ErrInternal,
			either(err)); len(reply.Error.Error()) > maxError+100 {
			t.Errorf("an error of %d bytes", len(reply.Error.Error()))
		}

		if err != nil {
			if _, ok := errors.AsType[*types.Error](err); !ok {
				t.Errorf("error without a code: %v", err)
			}
			return
		}

		i := function.Interface{Name: "net1", MTU: w.conf.MTU, MAC: w.mac, VF: w.vf}
		if err := i.Validate(); err != nil {
			t.Errorf("%+v: %v", i, err)
		}
		if back, err := function.ParseID(w.device.String()); err != nil || back != w.device {
			t.Errorf("device %+v", w.device)
		}

		a := journal.Attachment{
			Function: w.device, Interface: i, CNI: &journal.CNI{},
			Observed: &netdev.Observed{Name: "net1"},
		}

		raw, err := w.encode(a)
		if err == nil && !json.Valid(raw) {
			t.Errorf("result %q", raw)
		}
		if refused := w.checkResult(a); refused == nil && err != nil && !w.usesAddressBook() {
			t.Errorf("was not refused, and has no result: %v", err)
		}
	})
}

// The result of an IPAM plugin is either refused, or can be attached and returned.
func FuzzIPAM(f *testing.F) {
	f.Add([]byte(ipamResult))
	f.Add(
		[]byte(
			`{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.5/24","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0"}]}}`,
		),
	)

	f.Add([]byte(`{"cniVersion":"1.0.0","ips":[null],"routes":[{"dst":"::/0","gw":"1.2.3.4"}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, err := parseIPAM(raw)
		if err != nil {
			return
		}

		if err := (function.Interface{
			Name: "net1", Addresses: a.addresses, Routes: a.routes,
		}).Validate(); err != nil {
			t.Error(err)
		}

		if a.result == nil {
			return
		}

		record := journal.Attachment{CNI: &journal.CNI{IPAM: raw}, Observed: &netdev.Observed{}}
		if _, err := (cniRequest{conf: netConf{CNIVersion: "1.1.0"}}).encode(record); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
	})
}

// A request is read or refused, whatever the socket or a file of the spool contains.
func FuzzRequest(f *testing.F) {
	f.Add(
		[]byte(
			`{"version":1,"command":"DEL","containerID":"c","ifName":"net1","config":{},"at":"2026-01-01T00:00:00Z"}`,
		),
	)
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := readRequest(bytes.NewReader(data))
		if err != nil {
			return
		}
		if err := checkEnvironment(r); err == nil && r.Command == wire.Add &&
			(r.ContainerID == "" || r.NetNS == "") {
			t.Errorf("%+v", r)
		}
	})
}

// either returns the error, or a fixed error if it is nil.
func either(err error) error {
	if err == nil {
		return errRefused
	}
	return err
}

// TestIPAMOutput checks that routes which no plugin could return are refused, and name their field.
func TestIPAMOutput(t *testing.T) {
	t.Parallel()
	const route = `{"dst":"10.0.0.0/8"}`
	for name, test := range map[string]struct {
		routes  string
		problem string // "" for success
	}{
		"none":      {"", ""},
		"one":       {"[" + route + "]", ""},
		"no list":   {"7", "ipam.routes: "},
		"too many":  {"[" + strings.Repeat(route+",", maxRoutes) + route + "]", "ipam.routes: "},
		"as many":   {"[" + strings.Repeat(route+",", maxRoutes-1) + route + "]", ""},
		"no target": {`[{"gw":"10.0.0.1"}]`, "ipam.routes: "},
	} {
		r := cniRequest{}
		r.conf.IPAM.Routes = json.RawMessage(test.routes)
		text, err := r.ipamOutput([]netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")})
		if (err == nil) != (test.problem == "") ||
			err != nil && !strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s: error %v, want %q", name, err, test.problem)
		}
		if (text == nil) != (err != nil) {
			t.Errorf("%s: %s, error %v", name, text, err)
		}
	}
}
