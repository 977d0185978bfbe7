// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"encoding/json"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

func TestResult(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	pod := netns.New(t)
	add := request(wire.Add, 0, "c1", pod, nil)
	add.IPAM = json.RawMessage(ipamResult)
	result := request(wire.Result, 0, "c1", pod, nil)
	n.serve(func(r *running) {
		r.mustFail(result, types.ErrUnknownContainer, "is not attached as net1 of container c1")
		first := r.must(add)
		if got := r.must(result); string(got.Result) != string(first.Result) {
			t.Errorf("result %s, that of ADD was %s", got.Result, first.Result)
		}

		r.mustFail(request(wire.Result, 0, "c2", pod, nil), types.ErrUnknownContainer,
			"container c2")
		r.must(request(wire.Del, 0, "c1", pod, nil))
		r.mustFail(result, types.ErrUnknownContainer, "is not attached")
	})
}

// TestResultsWithNull: lists of a result may be null in JSON, which the conversions of
// containernetworking/cni do not survive.
func TestResultsWithNull(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		for _, list := range []string{"ips", "interfaces", "routes"} {
			raw := json.RawMessage(`{"cniVersion":"` + version + `","` + list + `":[null]}`)
			if _, err := cni.DecodeResult(raw, version); err == nil {
				t.Errorf("version %s: %s with null is taken", version, list)
			}
			if _, err := parseIPAM(raw); err == nil {
				t.Errorf("version %s: %s with null is taken of an IPAM plugin", version, list)
			}
		}
	}
}
