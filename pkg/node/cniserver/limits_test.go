// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
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
		"name":         {config: map[string]any{"name": huge}, says: "name: has 307200 bytes"},
		"network":      {config: map[string]any{"network": huge}, says: "network \"xxx"},
		"mac":          {config: map[string]any{"mac": huge}, says: "mac"},
		"deviceID":     {config: map[string]any{"deviceID": huge}, says: "deviceID"},
		"vlanProto":    {config: map[string]any{"vlan": 5, "vlanProto": huge}, says: "vlanProto"},
		"trust":        {config: map[string]any{"trust": huge}, says: "trust"},
		"unknown keys": {config: unknown, says: "is unknown"},
		"version":      {config: map[string]any{"cniVersion": huge}, says: `...": is not known`},
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
