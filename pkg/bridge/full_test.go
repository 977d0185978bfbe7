package bridge_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// testBridgeIsFull: a port that finds no room at its bridge says so, and comes up when there is room.
func testBridgeIsFull(t *testing.T, plane bridge.DataPlane) {
	x := newXPU(t, plane, "")
	x.start()
	x.network("net-blue", 10, 0)
	full := x.link(x.bridge("net-blue")).Attrs().Index
	last := ""
	for i := range 1023 {
		last = fmt.Sprintf("other%d", i)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MasterIndex = last, full
		must.Succeed(t, x.Handle().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: fmt.Sprintf("peer%d", i)}))
	}
	pod := newPod(t, x, rep1, 1)
	err := x.client.EnsurePort(x.ctx(), opi.Port{ID: rep1, MAC: pod.mac, Networks: []string{"net-blue"}})
	if !errors.Is(err, opi.ErrFailed) || !strings.Contains(err.Error(), "at most 1023 ports") {
		t.Errorf("got %v, want that the bridge is full", err)
	}
	must.Succeed(t, x.Handle().LinkDel(x.link(last)))
	x.up(rep1)
}
