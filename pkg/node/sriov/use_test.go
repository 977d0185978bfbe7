package sriov

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestNetdevUse: what the kernel says of netdevs that are used in one way or another.
func TestNetdevUse(t *testing.T) {
	host := netns.New(t)
	handle := host.Handle()
	done := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	named := func(name string) netlink.LinkAttrs {
		attributes := netlink.NewLinkAttrs()
		attributes.Name = name
		return attributes
	}
	link := func(name string) netlink.Link {
		t.Helper()
		found, err := handle.LinkByName(name)
		done(err)
		return found
	}
	use := func(name, want string) {
		t.Helper()
		var got string
		done(host.Do(func() (err error) {
			got, err = NetdevUse(name)
			return err
		}))
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("netdev %s is used: %q, want %q", name, got, want)
		}
	}
	use("gone", "")

	done(handle.LinkAdd(&netlink.Veth{LinkAttrs: named("vf0"), PeerName: "peer0"}))
	use("vf0", "")
	done(handle.LinkSetUp(link("vf0")))
	use("vf0", "") // no carrier yet, whatever addresses IPv6 makes up
	done(handle.LinkSetUp(link("peer0")))
	carrier := func() bool { return link("vf0").Attrs().OperState == netlink.OperUp }
	for end := time.Now().Add(10 * time.Second); !carrier(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no carrier")
		}
	}
	use("vf0", "is up and has a carrier")
	done(handle.LinkSetDown(link("vf0")))
	use("vf0", "")

	for _, address := range []string{"192.0.2.7/24", "2001:db8::7/64"} {
		ip, network, err := net.ParseCIDR(address)
		done(err)
		a := &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: network.Mask}}
		done(handle.AddrAdd(link("vf0"), a))
		use("vf0", "has address "+address)
		done(handle.AddrDel(link("vf0"), a))
		use("vf0", "")
	}

	done(handle.LinkAdd(&netlink.Bridge{LinkAttrs: named("br0")}))
	done(handle.LinkSetMaster(link("vf0"), link("br0")))
	use("vf0", "is in a bridge or bond")
}
