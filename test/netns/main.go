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
)

// isolated is set in the environment of a process that has namespaces of its own.
const isolated = "XPU_TEST_ISOLATED"

// Isolated says whether the process has a network namespace of its own, by Main.
func Isolated() bool { return os.Getenv(isolated) != "" }

// Main is for TestMain: it calls run in a copy of the process that has a network namespace of its
// own, with what it starts, and mounts of its own. The namespace has loopback, and a default route
// that leads nowhere. A process that is not root calls run as it is; what needs the namespace has
// to look whether it is [Isolated].
func Main(run func() int) int {
	switch {
	case os.Geteuid() != 0:
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

// again runs the process again.
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

// connect sets loopback up, and makes a default route, which leads nowhere: kube-apiserver looks
// for the node's address there.
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
