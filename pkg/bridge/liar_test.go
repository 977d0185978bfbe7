package bridge_test

import (
	"bytes"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge"
)

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// send puts an Ethernet frame on the wire of a pod's eth0, whatever its source address.
func (p *pod) send(t *testing.T, dst, src net.HardwareAddr, etherType uint16, payload []byte) {
	t.Helper()
	eth0, err := p.Handle().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	var socket int
	err = p.Do(func() (err error) {
		socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(socket) }()
	frame := slices.Concat(dst, src, []byte{byte(etherType >> 8), byte(etherType)}, payload)
	if err := unix.Sendto(socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: eth0.Attrs().Index, Halen: 6}); err != nil {
		t.Fatal(err)
	}
}

// etherTypeTest is one of those that IEEE 802 leaves for experiments.
const etherTypeTest = 0x88b5

// pretend sends frames that have another pod's MAC address as their source.
func (p *pod) pretend(t *testing.T, victim *pod) {
	t.Helper()
	for range 3 {
		p.send(t, broadcast, victim.mac, etherTypeTest, bytes.Repeat([]byte{0}, 46))
	}
}

// TestMACStaysWithItsPort: no other port and no other xPU takes over the MAC address of a port by sending from it.
func TestMACStaysWithItsPort(t *testing.T) { overDataPlanes(t, testMACStaysWithItsPort) }

func testMACStaysWithItsPort(t *testing.T, plane bridge.DataPlane) {
	a, b := wired(t, plane)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}
	victim, client, liar := newPod(t, a, rep1, 1), newPod(t, a, rep2, 2), newPod(t, a, rep3, 3)
	remote := newPod(t, b, rep1, 4)
	a.port(rep1, "net-blue", victim.mac)
	a.port(rep2, "net-blue", client.mac)
	a.port(rep3, "net-blue", liar.mac)
	b.port(rep1, "net-blue", remote.mac)
	reach(t, client, victim)
	reach(t, client, liar)
	reach(t, client, remote)

	for who, p := range map[string]*pod{"a port of the same xPU": liar, "a port of another xPU": remote} {
		p.pretend(t, victim)
		q := client.pinger(t)
		for range 5 {
			if ok, err := q.once(victim, time.Second); err != nil || !ok {
				t.Fatalf("after %s sent from the MAC address of the victim: reaches it: %t, %v", who, ok, err)
			}
		}
	}
}
