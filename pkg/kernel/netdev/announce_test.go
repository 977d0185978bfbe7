// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestAnnounce checks that neighbours learn the new owner of an address without delay: when the
// interface comes up, or when it gets its carrier later. The pod does not wait for the carrier.
func TestAnnounce(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(map[bool]string{false: "carrier at once", true: "carrier comes late"}[late],
			func(t *testing.T) {
				host, xpu, pod := netns.New(t), netns.New(t), netns.New(t)
				netns.Connect(t, host, "vf0", xpu, "rep0")
				rep, err := xpu.Handle().LinkByName("rep0")
				must.Succeed(t, err)

				if late {
					must.Succeed(t, xpu.Handle().LinkSetDown(rep))
				}

				heard := listen(t, xpu, rep.Attrs().Index)
				engine, err := netdev.New(netdev.Options{HostNetNS: host.Path()})
				must.Succeed(t, err)
				defer engine.Close()

				want := function.Interface{Name: "net1", MAC: "02:00:00:00:00:01",
					Addresses: []netip.Prefix{
						netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00:1::5/64"),
					}}

				device := netdev.Device{Name: "vf0"}
				before, place, err := engine.Plan(t.Context(), device, pod.Path(), want)
				must.Succeed(t, err)
				observed, err := engine.Attach(t.Context(), device, before, place, want)
				must.Succeed(t, err)
				place.Index = observed.Index
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()

				done := make(chan error, 1)
				go func() { done <- engine.Announce(ctx, netdev.Attached{Place: place, Observed: observed}) }()

				if late {
					must.Succeed(t, xpu.Handle().LinkSetUp(rep))
				}

				must.Succeed(t, <-done)
				for _, what := range []string{"ARP of 10.1.0.5", "advertisement of fd00:1::5"} {
					for got := ""; got != what; {
						select {
						case got = <-heard:
						case <-ctx.Done():
							t.Fatalf("no %s was heard", what)
						}
					}
				}
			})
	}
}

// listen receives gratuitous ARP and unsolicited advertisements of 02:00:00:00:00:01 at a link, and
// returns what it received in the order of the test.
func listen(t *testing.T, n *netns.Namespace, index int) <-chan string {
	t.Helper()
	socket := -1
	must.Succeed(t, n.Do(func() (err error) {
		all := uint16(unix.ETH_P_ALL)
		socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC,
			int(all>>8|all<<8))
		if err != nil {
			return err
		}
		return unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: all>>8 | all<<8, Ifindex: index})
	}))

	must.Succeed(t,
		unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO,
			&unix.Timeval{Usec: 100_000}))
	arp, na := make(chan string, 100), make(chan string, 100)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		frame := make([]byte, 2000)
		for {
			select {
			case <-stop:
				return
			default:
			}

			size, _, err := unix.Recvfrom(socket, frame, 0)
			if err != nil || size < 42 || frame[11] != 1 {
				continue
			}

			switch f := frame[:size]; {
			case f[12] == 0x08 && f[13] == 0x06 && string(f[28:32]) == string(f[38:42]):
				arp <- "ARP of " + netip.AddrFrom4([4]byte(f[28:32])).String()
			case f[12] == 0x86 && f[13] == 0xdd && size >= 78 && f[54] == 136:
				na <- "advertisement of " + netip.AddrFrom16([16]byte(f[62:78])).String()
			}
		}
	}()

	t.Cleanup(func() {
		close(stop)
		<-stopped
		unix.Close(socket)
	})

	heard := make(chan string)
	go func() {
		for _, source := range []<-chan string{arp, na} {
			for wanted := true; wanted; {
				select {
				case <-stop:
					return
				case text := <-source:
					select {
					case heard <- text:
						wanted = text == "advertisement of fe80::ff:fe00:1"
					case <-stop:
						return
					}
				}
			}
		}
	}()

	return heard
}
