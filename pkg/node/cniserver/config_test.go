// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
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
	cmp.AllowUnexported(cniRequest{}, ipConfig{}),
}

func TestParse(t *testing.T) {
	vf := function.ID{Address: "0000:3b:02.1"}
	minimal := cniRequest{conf: netConf{CNIVersion: "0.1.0"}, device: vf}

	tests := map[string]struct {
		config, args string
		want         func(*cniRequest)
	}{
		"minimal":     {`{"deviceID":"0000:3b:02.1"}`, "", func(*cniRequest) {}},
		"upper case":  {`{"deviceID":"0000:3B:02.1"}`, "", func(*cniRequest) {}},
		"device name": {`{"deviceID":"0000-3b-02-1"}`, "", func(*cniRequest) {}},
		"runtime's device": {
			`{"runtimeConfig":{"deviceID":"0000:3b:02.1"}}`, "", func(*cniRequest) {},
		},
		"SF": {`{"deviceID":"0000:3b:00.0/sf88"}`, "", func(w *cniRequest) {
			w.device = function.SubfunctionID("0000:3b:00.0", 88)
		}},
		"fields of others": {
			`{"deviceID":"0000:3b:02.1","logLevel":"debug","ipam":{"type":"x"},"Master":"eth0"}`,
			"", func(*cniRequest) {},
		},
		"null": {
			`{"deviceID":"0000:3b:02.1","vlan":null,"prevResult":null,"runtimeConfig":null}`,
			"", func(*cniRequest) {},
		},
		"vlanProto alone": {`{"deviceID":"0000:3b:02.1","vlanProto":"802.1q","vlanQoS":0}`,
			"", func(*cniRequest) {}},
		"vlan 0": {`{"deviceID":"0000:3b:02.1","vlan":0,"vlanProto":"802.1Q"}`,
			"", func(w *cniRequest) { w.vf = &function.VFConfig{VLAN: new(0)} }},
		"MAC of args": {
			`{"deviceID":"0000:3b:02.1","mac":"02:00:00:00:00:01"}`,
			"IgnoreUnknown=1;MAC=02-00-00-00-00-0A", func(w *cniRequest) {
				w.mac = "02:00:00:00:00:0a"
			},
		},
		"MAC of runtime": {
			`{"deviceID":"0000:3b:02.1","runtimeConfig":{"mac":"02:00:00:00:00:0B"}}`,
			"MAC=02:00:00:00:00:01", func(w *cniRequest) { w.mac = "02:00:00:00:00:0b" },
		},
		"pod": {
			`{"deviceID":"0000:3b:02.1"}`, ";K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=c;X=y;",
			func(w *cniRequest) { w.pod = journal.Pod{Namespace: "a", Name: "b", UID: "c"} },
		},
		"addresses": {
			`{"deviceID":"0000:3b:02.1","runtimeConfig":{"ips":["10.1.0.5/24"]}}`,
			"", func(w *cniRequest) {
				w.ipam.addresses = []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")}
			},
		},
		"device info": {
			`{"deviceID":"0000:3b:02.1","runtimeConfig":{"CNIDeviceInfoFile":"/x"}}`,
			"", func(w *cniRequest) { w.conf.Runtime.DeviceInfoFile = "/x" },
		},
		"network, MTU, names": {
			`{"cniVersion":"1.0.0","name":"n","deviceID":"0000:3b:02.1","network":"blue","mtu":9000}`, "", func(w *cniRequest) { w.conf = netConf{CNIVersion: "1.0.0", Name: "n", Network: "blue", MTU: 9000} },
		},
		"everything of sriov-cni": {`{"deviceID":"0000:3b:02.1","vlan":100,"vlanQoS":3,"vlanProto":"802.1ad","min_tx_rate":10,"max_tx_rate":100,
			"spoofchk":"off","trust":"On","link_state":"enable"}`, "", func(w *cniRequest) {
			w.vf = &function.VFConfig{
				VLAN: new(100), QoS: new(3), Proto: "802.1ad", MinTxRate: new(10),
				MaxTxRate:  new(100),
				SpoofCheck: new(false), Trust: new(true), LinkState: "enable",
			}
		}},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parser{}.parse(wire.Request{
				Config: json.RawMessage(test.config), Args: test.args,
			})
			must.Succeed(t, err)
			want := minimal
			test.want(&want)
			// The rest of the configuration is in other fields, which are checked.
			c := got.conf
			got.Request, got.conf = wire.Request{}, netConf{
				CNIVersion: c.CNIVersion, Name: c.Name, Network: c.Network, MTU: c.MTU, DNS: c.DNS,
			}
			got.conf.Runtime.DeviceInfoFile = c.Runtime.DeviceInfoFile
			if diff := cmp.Diff(want, got, comparePrefixes); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	tests := map[string]struct {
		config string // without deviceID
		want   string
	}{
		"no device":      {`"name":"x"`, "deviceID: is missing; the NetworkAttachmentDefinition"},
		"bad device":     {`"deviceID":"eth0"`, `deviceID: PCI address "eth0": must be`},
		"vlan too large": {`"vlan":4095`, "vlan 4095: must be 0-4094"},
		"vlan is text":   {`"vlan":"100"`, "vlan: is a string, must be a whole number"},
		"vlan is broken": {`"vlan":1.5`, "vlan: is a number 1.5, must be a whole number"},
		"QoS too large":  {`"vlan":1,"vlanQoS":8`, "vlanQoS 8: must be 0-7"},
		"QoS alone":      {`"vlanQoS":1`, "vlanQoS 1: needs a vlan"},
		"QoS, vlan 0":    {`"vlan":0,"vlanQoS":1`, "vlanQoS 1: needs a vlan"},
		"QinQ alone":     {`"vlanProto":"802.1ad"`, `vlanProto "802.1ad": needs a vlan`},
		"proto": {
			`"vlan":1,"vlanProto":"802.3"`, `vlanProto "802.3": must be one of 802.1q, 802.1ad`,
		},
		"rate": {`"min_tx_rate":-1`, "min_tx_rate -1: must be 0-"},
		"rates": {
			`"min_tx_rate":10,"max_tx_rate":5`, "min_tx_rate 10: must be at most max_tx_rate 5",
		},
		"spoofchk":         {`"spoofchk":"yes"`, `spoofchk "yes": must be one of on, off`},
		"trust is no text": {`"trust":true`, "trust: is a bool, must be a string"},
		"link_state": {
			`"link_state":"up"`, `link_state "up": must be one of auto, enable, disable`,
		},
		"mac": {`"mac":"xx"`, `mac "xx": must be a unicast Ethernet address`},
		"multicast": {
			`"runtimeConfig":{"mac":"01:00:00:00:00:01"}`,
			`runtimeConfig.mac "01:00:00:00:00:01": must be a unicast`,
		},
		"ips": {
			`"runtimeConfig":{"ips":["10.1.0.5"]}`,
			`runtimeConfig.ips[0] "10.1.0.5": must be an address with prefix length`,
		},
		"ips is no list": {
			`"runtimeConfig":{"ips":"10.1.0.5/24"}`,
			"runtimeConfig.ips: is a string, must be a list",
		},
		"mtu":        {`"mtu":67`, "mtu 67: must be 68 or more"},
		"prevResult": {`"prevResult":{"ips":5}`, "prevResult: "},
		"version":    {`"cniVersion":"7.0.0","prevResult":{}`, "prevResult: "},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			device := `"deviceID":"0000:3b:02.1",`
			if strings.HasSuffix(name, " device") {
				device = ""
			}

			_, err := parser{}.parse(wire.Request{
				Config: json.RawMessage("{" + device + test.config + "}"),
			})
			coded, ok := errors.AsType[*types.Error](err)
			if !ok || coded.Code != types.ErrInvalidNetworkConfig ||
				!strings.Contains(coded.Msg, test.want) {
				t.Errorf("error %v, want code %d and %q", err,
					types.ErrInvalidNetworkConfig, test.want)
			}
		})
	}

	_, err := parser{}.parse(wire.Request{
		Config: json.RawMessage(`{"vlan":5000,"trust":"maybe","deviceID":"x"}`),
	})
	for _, field := range []string{"vlan 5000", "trust", "deviceID"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("error %v does not tell about %s", err, field)
		}
	}
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

// TestUnknownKeys: a typo is reported, and keys of other programs are accepted.
func TestUnknownKeys(t *testing.T) {
	t.Parallel()
	for config, want := range map[string][]string{
		`{"deviceID":"0000:3b:02.1","vlna":100}`:              {"vlna"},
		`{"vlna":100,"Trust":"on","trunk":[]}`:                {"trunk", "vlna"},
		`{"VLAN":100,"cni.dev/attachments":[],"pciBusID":""}`: nil,
		`{"ourNote":"x"}`: nil,
		`[]`:              nil,
	} {
		if got := unknownKeys(json.RawMessage(config), []string{"ourNote"}); !slices.Equal(got,
			want) {
			t.Errorf("%s: %q, want %q", config, got, want)
		}
	}

	_, err := parser{}.parse(wire.Request{
		Config: json.RawMessage(`{"deviceID":"0000:3b:02.1","vlna":100}`),
	})
	if err == nil || !strings.Contains(err.Error(), "vlna: is unknown; known are") {
		t.Errorf("error %v, want one that names the key", err)
	}
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
