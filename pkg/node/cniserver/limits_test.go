// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// refusal returns the error of an ADD that must be refused before anything is reserved or attached.
func refusal(t *testing.T, add wire.Request) *types.Error {
	t.Helper()
	c, s := newCard(t)
	reply := s.handle(t.Context(), add, nil)
	if reply.Error == nil {
		t.Fatal("it was attached")
	}
	if a, reserved := c.Journal.Get(vf); reserved || c.attached.Name != "" {
		t.Errorf("attached %+v, record %+v", c.attached, a)
	}

	return reply.Error
}

// TestVersionsWithoutAddresses: versions before 0.3 have no result without an address, and a
// missing cniVersion means 0.1.0.
func TestVersionsWithoutAddresses(t *testing.T) {
	t.Parallel()
	for _, version := range []any{nil, "", "0.1.0", "0.2.0"} {
		said := refusal(t, addVF("c1", map[string]any{"cniVersion": version}))
		if said.Code != types.ErrInvalidNetworkConfig ||
			!strings.Contains(said.Msg, "cniVersion: 0.") {
			t.Errorf("version %v: error %v", version, said)
		}
	}

	for name, config := range map[string]map[string]any{
		"0.3.0": {"cniVersion": "0.3.0"},
		"0.2.0, the pod's": {
			"cniVersion": "0.2.0", "runtimeConfig": map[string]any{"ips": []string{"10.1.0.5/24"}},
		},
		"none, the plugins": {"cniVersion": nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, s := newCard(t)
			add := addVF("c1", config)
			if strings.HasPrefix(name, "none") {
				add.IPAM = json.RawMessage(ipamResult)
			}
			checkCode(t, s.handle(t.Context(), add, nil), 0)
		})
	}

	said := refusal(t, addVF("c1", map[string]any{"cniVersion": "7.0.0"}))
	if said.Code != types.ErrInvalidNetworkConfig ||
		!strings.Contains(said.Msg, `cniVersion "7.0.0": is not known; known are 0.1.0`) {
		t.Errorf("error %v", said)
	}
}

// TestCapabilities: an argument that has no effect is refused, because the pod would run without
// what it asked for.
func TestCapabilities(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		runtime map[string]any
		ipam    string
		// says is part of the error, "" if the argument is accepted.
		says string
	}{
		"infinibandGUID": {
			runtime: map[string]any{"infinibandGUID": "c2:11:22:33:44:55:66:77"},
			says:    "runtimeConfig.infinibandGUID: xpu-cni does not serve",
		},
		"bandwidth": {
			runtime: map[string]any{"bandwidth": map[string]any{"egressRate": 4096}},
			says:    "max_tx_rate",
		},
		"portMappings": {
			runtime: map[string]any{"portMappings": []any{map[string]any{"hostPort": 80}}},
			says:    "runtimeConfig.portMappings",
		},
		"aliases": {
			runtime: map[string]any{"aliases": []string{"db"}}, says: "runtimeConfig.aliases",
		},
		"ipRanges": {
			runtime: map[string]any{"ipRanges": []any{[]any{}}}, says: "runtimeConfig.ipRanges",
		},
		"unknown": {
			runtime: map[string]any{"speed": "high"},
			says:    "runtimeConfig.speed: xpu-cni does not serve this capability: take it out",
		},
		"ipRanges for a plugin": {
			runtime: map[string]any{"ipRanges": []any{[]any{}}}, ipam: "host-local",
		},
		"without a value": {runtime: map[string]any{
			"portMappings": []any{}, "bandwidth": nil, "aliases": []string{},
		}},
		"for information": {
			runtime: map[string]any{
				"cgroupPath":                        "/kubepods",
				"io.kubernetes.cri.pod-annotations": map[string]any{"a": "b"},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			add := addVF("c1", map[string]any{
				"runtimeConfig": test.runtime, "ipam": map[string]any{"type": test.ipam},
			})
			if test.says != "" {
				if said := refusal(t, add); !strings.Contains(said.Msg, test.says) {
					t.Errorf("error %v, want %q", said, test.says)
				}
				return
			}

			_, s := newCard(t)
			checkCode(t, s.handle(t.Context(), add, nil), 0)
		})
	}
}

// TestDNSOfTheRuntime: the result has the runtime's DNS settings, unless the IPAM plugin returns
// its own.
func TestDNSOfTheRuntime(t *testing.T) {
	t.Parallel()
	_, s := newCard(t)
	dns := map[string]any{"servers": []string{"10.0.0.10"}, "searches": []string{"svc"},
		"options": []string{"ndots:5"}}
	reply := s.handle(t.Context(),
		addVF("c1", map[string]any{"runtimeConfig": map[string]any{"dns": dns}}), nil)
	checkCode(t, reply, 0)
	want := types.DNS{
		Nameservers: []string{"10.0.0.10"}, Search: []string{"svc"}, Options: []string{"ndots:5"},
	}
	if diff := cmp.Diff(want, decodeResult(t, reply.Result).DNS); diff != "" {
		t.Errorf("DNS (-want +got):\n%s", diff)
	}
}

// TestLimits: everything that a tenant can make large is refused before anything is changed, with a
// short message.
func TestLimits(t *testing.T) {
	t.Parallel()
	many := func(n int, format string) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf(format, i/250, i%250))
		}
		return all
	}

	huge := strings.Repeat("x", 300<<10)
	ipam := func(text string) func(*wire.Request) {
		return func(r *wire.Request) { r.IPAM = json.RawMessage(text) }
	}
	unknown := map[string]any{}
	for i := range 1000 {
		unknown[fmt.Sprintf("%s%d", huge[:200], i)] = i
	}

	for name, test := range map[string]struct {
		config map[string]any
		change func(*wire.Request)
		says   string
	}{
		"name":    {config: map[string]any{"name": huge}, says: "name: has 307200 bytes"},
		"network": {config: map[string]any{"network": huge}, says: "network \"xxx"},
		"network, path": {
			config: map[string]any{"network": "../blue"}, says: "must be the name of an XPUNetwork",
		},
		"mac":          {config: map[string]any{"mac": huge}, says: "mac"},
		"deviceID":     {config: map[string]any{"deviceID": huge}, says: "deviceID"},
		"vlanProto":    {config: map[string]any{"vlan": 5, "vlanProto": huge}, says: "vlanProto"},
		"trust":        {config: map[string]any{"trust": huge}, says: "trust"},
		"unknown keys": {config: unknown, says: "is unknown"},
		"version":      {config: map[string]any{"cniVersion": huge}, says: "cniVersion"},
		"ips": {config: map[string]any{
			"runtimeConfig": map[string]any{"ips": many(65, "10.1.%d.%d/16")},
		},
			says: "runtimeConfig.ips: has 65 addresses, at most 64"},
		"bad ips": {config: map[string]any{"runtimeConfig": map[string]any{"ips": []string{huge}}},
			says: "runtimeConfig.ips[0]"},
		"routes": {config: map[string]any{"ipam": map[string]any{"type": "xpu", "routes": huge}},
			says: "ipam.routes: has 307202 bytes"},
		"IPAM's result": {change: ipam(`{"cniVersion":"1.1.0","dns":{"domain":"` + huge + `"}}`),
			says: "the plugin's result has"},
		"IPAM's addresses": {change: ipam(`{"cniVersion":"1.1.0","ips":[` +
			strings.TrimSuffix(strings.Join(many(65, `{"address":"10.1.%d.%d/16"},`), ""), ",") +
			`]}`), says: "has 65 addresses"},
		"IPAM's routes": {change: ipam(`{"cniVersion":"1.1.0","routes":[` +
			strings.TrimSuffix(strings.Join(many(257, `{"dst":"10.%d.%d.0/24"},`), ""), ",") +
			`]}`), says: "257 routes"},
		"pod's name": {change: func(r *wire.Request) {
			r.Args = "K8S_POD_NAME=" + huge
		}, says: "K8S_POD_NAME: has 307200 bytes"},
		"arguments": {change: func(r *wire.Request) { r.Args = huge }, says: "must be KEY=value"},
		"netns": {change: func(r *wire.Request) {
			r.NetNS = "/" + huge
		}, says: "CNI_NETNS: has 307201 bytes"},
		"prevResult": {config: map[string]any{"dns": map[string]any{"domain": huge},
			"prevResult": map[string]any{
				"cniVersion": "1.1.0",
				"interfaces": []any{map[string]any{"name": huge + huge + huge + huge[:90<<10]}},
			}}, says: "prevResult and ipam: make a result of"},
	} {
		t.Run(name, func(t *testing.T) {
			add := addVF("c1", test.config)
			if test.change != nil {
				test.change(&add)
			}
			said := refusal(t, add)
			if !strings.Contains(said.Msg, test.says) || len(said.Error()) > maxError+100 {
				t.Errorf("error of %d bytes %v, want %q", len(said.Error()), said, test.says)
			}
		})
	}
}

// TestDELNeedsNoConfiguration: a container's interface is released whatever the configuration is.
func TestDELNeedsNoConfiguration(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]string{
		"none": "", "null": "null", "text": `"x"`, "wrong": `{"vlan":"x","cniVersion":7}`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			before := n.Snapshot(0)
			n.run(func(r *running) {
				r.must(request(wire.Add, 0, "c1", netns.New(t), nil))
				del := request(wire.Del, 0, "c1", nil, nil)
				del.Config, del.Args = json.RawMessage(config), "K8S_POD_NAME="+
					strings.Repeat("x", 1<<16)
				r.must(del)
				r.checkFree(0, before)
			})
		})
	}
}

// TestAuxiliaryDevice: other plugins name an SF by its auxiliary device.
func TestAuxiliaryDevice(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	sf := function.SubfunctionID("0000:3b:00.0", 88)
	c.function = function.Function{
		ID: sf, Kind: function.SF, PF: "0000:3b:00.0", Index: 88, AuxDevice: "mlx5_core.sf.4",
	}
	s.Auxiliary = func(name string) (function.ID, bool) { return sf, name == c.function.AuxDevice }
	checkCode(t,
		s.handle(t.Context(), addVF("c1", map[string]any{"deviceID": "mlx5_core.sf.4"}), nil), 0)
	if a, _ := c.Journal.Get(sf); a.State != journal.Attached {
		t.Errorf("record %+v", a)
	}

	reply := s.handle(t.Context(), addVF("c2", map[string]any{"deviceID": "mlx5_core.sf.5"}), nil)
	checkCode(t, reply, types.ErrInvalidNetworkConfig)
	if !strings.Contains(reply.Error.Msg,
		"deviceID: no SF of this node has the auxiliary device mlx5_core.sf.5") {
		t.Errorf("error %v", reply.Error)
	}

	for _, text := range []string{"mlx5_core.eth.4", "mlx5_core.sf.", "../sf.4", "a.sf.4.b"} {
		var m fieldErrors
		if m.device(text, s.Auxiliary); len(m) == 0 {
			t.Errorf("%s was taken", text)
		}
	}

	must.Succeed(t, c.Journal.Delete(sf))
}
