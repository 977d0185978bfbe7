// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestPortCounters(t *testing.T) {
	a, _ := newTestAgent(t)
	const uncounted = "vf-0000-03-00-3"
	for id, mac := range map[string]string{p1: mac1, uncounted: mac2} {
		if _, err := a.create(t, id, accessPort(mac, blue)); err != nil {
			t.Fatal(err)
		}
	}

	read := func(name string) (*opibridge.PortCounters, error) {
		return countersServer{Agent: a}.GetPortCounters(t.Context(),
			&opibridge.GetPortCountersRequest{Name: name})
	}

	got, err := read("bridgePorts/" + p1)
	want := &opibridge.PortCounters{
		Name: portNames.prefix + p1, TransmittedFrames: 1, TransmittedBytes: 2, ReceivedFrames: 3,
		ReceivedBytes: 4, DroppedFrames: 5, FilteredFrames: 6,
	}
	if err != nil || !proto.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}

	_, err = read("bridgePorts/" + uncounted)
	wantCode(t, err, codes.FailedPrecondition, "has no netdev at this time")
	_, err = read("bridgePorts/vf-0000-03-00-4")
	wantCode(t, err, codes.NotFound, "does not exist")

	a.counters = brokenCounters{}
	_, err = read("bridgePorts/" + p1)
	wantCode(t, err, codes.Internal, "no answer")
	if reason := refusal.Of(err); reason != refusal.CountersFail {
		t.Errorf("reason %s", reason)
	}
}

// brokenCounters cannot be read.
type brokenCounters struct{}

func (brokenCounters) All() (map[plane.Object]plane.Traffic, error) {
	return nil, errors.New("no answer")
}

func (brokenCounters) Port(string) (plane.Traffic, bool, error) {
	return plane.Traffic{}, false, errors.New("no answer")
}

func TestTrafficMetrics(t *testing.T) {
	a, _ := newTestAgent(t)
	a.cfg.Tenant = func(port string, networks []string) string {
		return fmt.Sprintf("%s in %s", port, networks)
	}
	if _, err := a.create(t, p1, accessPort(mac1, blue)); err != nil {
		t.Fatal(err)
	}

	want := map[string]string{
		"transmit_frames": "1 11", "transmit_bytes": "2 0", "receive_frames": "3 0",
		"receive_bytes": "4 0", "device_dropped_frames": "5 0", "dropped_frames": "6 12",
	}
	for name, values := range want {
		name = "opi_bridge_" + name + "_total"
		ofPort, ofNetwork, _ := strings.Cut(values, " ")
		metric := name + `{network="net-blue",port="` + p1 + `",tenant="` + p1 + ` in [net-blue]"} ` +
			ofPort + "\n" + name + `{network="net-blue",port="",tenant=""} ` + ofNetwork + "\n"
		if got := textOf(t, a, name); !slices.Equal(slices.Sorted(strings.Lines(got)),
			slices.Sorted(strings.Lines(metric))) {
			t.Errorf("got\n%swant\n%s", got, metric)
		}
	}

	must.Succeed(t, a.delete(t, p1, false))
	if got := textOf(t, a, "opi_bridge_transmit_frames_total"); !strings.Contains(got,
		`{network="",port="`+p1+`",tenant=""} 1`) {
		t.Errorf("of a port that was just deleted: %s", got)
	}

	a.counters = brokenCounters{}
	if err := testutil.CollectAndCompare(a, strings.NewReader("")); err == nil {
		t.Error("counters that cannot be read are no error")
	}
}

// textOf returns the series of a metric, without its description.
func textOf(t *testing.T, c prometheus.Collector, name string) string {
	t.Helper()
	text, err := testutil.CollectAndFormat(c, expfmt.TypeTextPlain, name)
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(string(text), "")
}

func TestTrunkHasSeveralNetworks(t *testing.T) {
	a := open(t, filepath.Join(t.TempDir(), "state.db"), newFakePlane(true))
	for i, id := range []string{"net-blue", "net-red"} {
		if _, err := (networkServer{Agent: a}).CreateLogicalBridge(t.Context(),
			&evpn.CreateLogicalBridgeRequest{
				LogicalBridgeId: id, LogicalBridge: &evpn.LogicalBridge{
					Spec: &evpn.LogicalBridgeSpec{VlanId: uint32(10 + i)},
				},
			}); err != nil {
			t.Fatal(err)
		}
	}

	trunk := accessPort(mac1, blue, red)
	trunk.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	if _, err := a.create(t, p1, trunk); err != nil {
		t.Fatal(err)
	}

	if got := textOf(t, a, "opi_bridge_transmit_frames_total"); !strings.Contains(got,
		`{network="_several",port="`+p1+`",tenant=""} 1`) {
		t.Error(got)
	}
}
