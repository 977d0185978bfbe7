// SPDX-License-Identifier: Apache-2.0

package network

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// inCluster moves the test to a new network namespace with a cluster's links.
func inCluster(t *testing.T) {
	t.Helper()
	if testing.Short() || os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}

	// The thread is not unlocked, so that it and the namespace end with the test.
	runtime.LockOSThread()
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })

	if err := SetUpCluster(); err != nil {
		t.Fatal(err)
	}
}

// startNode starts a process in a new network namespace, in place of a node.
func startNode(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})

	return cmd.Process.Pid
}

func addresses(t *testing.T, link string) string {
	t.Helper()
	l, err := netlink.LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}

	found, err := netlink.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}

	var all []string
	for _, a := range found {
		all = append(all, a.IPNet.String())
	}

	return strings.Join(all, " ")
}

func TestSetUpCluster(t *testing.T) {
	inCluster(t)
	if got := addresses(t, Bridge); got != "10.77.0.1/24" {
		t.Errorf("%s has %s", Bridge, got)
	}
	if got := addresses(t, "lo"); !strings.Contains(got, "10.96.0.1/32") {
		t.Errorf("lo has %s", got)
	}

	content, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil || strings.TrimSpace(string(content)) != "1" {
		t.Errorf("ip_forward is %q, %v", content, err)
	}
}

// reachable reports whether an address answers, even with a refusal. It makes its system calls
// directly, to stay on the thread that is in the namespace. Its timeout suffices for retransmitting
// packets that are lost while a carrier comes up.
func reachable(t *testing.T, address string) bool {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)

	timeout := syscall.NsecToTimeval((4 * time.Second).Nanoseconds())
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO,
		&timeout); err != nil {
		t.Fatal(err)
	}

	to := &syscall.SockaddrInet4{Port: 9, Addr: [4]byte(net.ParseIP(address).To4())}
	return syscall.Connect(fd, to) == syscall.ECONNREFUSED
}

func TestAttach(t *testing.T) {
	inCluster(t)
	// The second run of a node finds what the first has left.
	for life := range 2 {
		for number := 1; number <= 2; number++ {
			if err := Attach(fmt.Sprintf("node%d", number), number, startNode(t)); err != nil {
				t.Fatalf("life %d: %v", life, err)
			}
		}
	}

	routes, err := netlink.RouteGet(net.ParseIP("10.88.2.9"))
	if err != nil {
		t.Fatal(err)
	}
	if got := routes[0].Gw.String(); got != NodeAddress(2) {
		t.Errorf("pods of node2 are reached by %s, want %s", got, NodeAddress(2))
	}

	for _, connected := range []bool{true, false, true} {
		if err := Connect("node1", connected); err != nil {
			t.Fatal(err)
		}
		if got := reachable(t, NodeAddress(1)); got != connected {
			t.Errorf("connected %t: reachable %t", connected, got)
		}
	}

	for range 2 {
		if err := Detach("node1"); err != nil {
			t.Fatal(err)
		}
	}

	if err := Connect("node1", true); err == nil || !strings.Contains(err.Error(), "node1") {
		t.Errorf("Connect of a detached node: %v, want an error that names it", err)
	}
	if reachable(t, NodeAddress(1)) {
		t.Error("a detached node is reachable")
	}
	if !reachable(t, NodeAddress(2)) {
		t.Error("the other node is not")
	}
}

func TestAddresses(t *testing.T) {
	_, nodes, err := net.ParseCIDR(Subnet)
	if err != nil {
		t.Fatal(err)
	}

	seen := map[string]bool{Gateway: true}
	for number := 1; number <= MaxNodes; number++ {
		address := NodeAddress(number)
		if seen[address] || !nodes.Contains(net.ParseIP(address)) {
			t.Errorf("node %d has %s, which is taken or not in %s", number, address, Subnet)
		}
		seen[address] = true
		if _, _, err := net.ParseCIDR(PodSubnet(number)); err != nil {
			t.Error(err)
		}
	}
}
