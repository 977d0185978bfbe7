// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// isolated is set in the environment of a process that has its own namespaces.
const isolated = "XPU_TEST_ISOLATED"

// Isolated reports whether Main gave the process its own network namespace.
func Isolated() bool { return os.Getenv(isolated) != "" }

// Main is for TestMain. It calls run in a copy of the process. The copy and the processes that it
// starts have their own network namespace and their own mounts. The namespace has loopback, and a
// default route that leads nowhere. Without root, Main calls run in this process; tests that need
// the namespace must check [Isolated].
func Main(run func() int) int {
	switch {
	case !needs.IsRoot():
		return run()
	case !Isolated():
		return again()
	}

	if err := connect(); err != nil {
		fmt.Fprintln(os.Stderr, "network of the tests:", err)
		return 1
	}

	return run()
}

// again starts a copy of the process and waits for its end.
func again() int {
	command := exec.Command("/proc/self/exe", os.Args[1:]...)
	command.Env = append(os.Environ(), isolated+"=1")
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET, Unshareflags: syscall.CLONE_NEWNS,
		Pdeathsig: syscall.SIGKILL,
	}

	err := command.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests in a network namespace of their own:", err)
		return 1
	}

	return 0
}

// connect sets loopback up, and makes a default route that leads nowhere, because kube-apiserver
// takes the node's address from it.
func connect() error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "uplink"
	if err := netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: attributes, PeerName: "nowhere",
	}); err != nil {
		return err
	}

	for _, name := range []string{"lo", "nowhere", "uplink"} {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
	}

	uplink, err := netlink.LinkByName("uplink")
	if err != nil {
		return err
	}

	address := &net.IPNet{IP: net.IPv4(192, 0, 2, 1), Mask: net.CIDRMask(24, 32)}
	if err := netlink.AddrAdd(uplink, &netlink.Addr{IPNet: address}); err != nil {
		return err
	}

	return netlink.RouteAdd(&netlink.Route{
		LinkIndex: uplink.Attrs().Index, Gw: net.IPv4(192, 0, 2, 2),
	})
}
