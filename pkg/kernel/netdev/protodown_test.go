// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestProtoDownReturns covers a pod that holds its netdev down with a reason. It uses a macvlan,
// because few kinds of virtual netdevs support this.
func TestProtoDownReturns(t *testing.T) {
	w := newWorld(t, nil)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = "ens1f0v1", get(t, w.host, hostName).Attrs().Index
	must.Succeed(t,
		w.host.Handle().LinkAdd(&netlink.Macvlan{
			LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE,
		}))

	dev, want := netdev.Device{Name: attrs.Name}, function.Interface{Name: "net1"}
	before, place, err := w.engine.Plan(t.Context(), dev, w.pod.Path(), want)
	must.Succeed(t, err)
	_, err = w.engine.Attach(t.Context(), dev, before, place, want)
	must.Succeed(t, err)

	reason := nl.NewRtAttr(unix.IFLA_PROTO_DOWN_REASON|unix.NLA_F_NESTED, nil)
	reason.AddRtAttr(unix.IFLA_PROTO_DOWN_REASON_MASK, nl.Uint32Attr(8))
	reason.AddRtAttr(unix.IFLA_PROTO_DOWN_REASON_VALUE, nl.Uint32Attr(8))
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(get(t, w.pod, "net1").Attrs().Index)
	must.Succeed(t, w.pod.Do(func() error {
		req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
		req.AddData(header)
		req.AddData(reason)
		req.AddData(nl.NewRtAttr(unix.IFLA_PROTO_DOWN, []byte{1}))
		_, err := req.Execute(unix.NETLINK_ROUTE, 0)
		return err
	}))

	_, err = w.engine.Restore(t.Context(), dev, before, place)
	must.Succeed(t, err)
	if left := netdev.Diff(before, w.snapshot(t, attrs.Name)); len(left) > 0 {
		t.Errorf("after restore: %q", left)
	}

	sysfs := filepath.Join(w.sysRoot, "class/net", attrs.Name, "proto_down")
	if text, err := os.ReadFile(sysfs); err != nil || strings.TrimSpace(string(text)) != "0" {
		t.Errorf("proto_down %q, %v", text, err)
	}
}
