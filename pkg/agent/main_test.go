package agent

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/nodeapi/nodeapitest"
)

// cluster is the API server of the package's tests, nil if there is none.
var cluster *nodeapitest.Cluster

// isolated is set in the environment of a test process that has a network namespace of its own.
const isolated = "XPU_AGENT_TEST_ISOLATED"

// TestMain runs the tests, and the API server with them, in a process that has a network namespace of its own: an
// agent's host is the namespace of its process.
func TestMain(m *testing.M) {
	if os.Geteuid() == 0 && os.Getenv(isolated) == "" {
		os.Exit(runIsolated())
	}
	os.Exit(run(m))
}

func runIsolated() int {
	again := exec.Command("/proc/self/exe", os.Args[1:]...)
	again.Env = append(os.Environ(), isolated+"=1")
	again.Stdin, again.Stdout, again.Stderr = os.Stdin, os.Stdout, os.Stderr
	again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err := again.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests in a network namespace of their own:", err)
		return 1
	}
	return 0
}

func run(m *testing.M) int {
	if err := setUp(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := cluster.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func setUp() error {
	if os.Getenv(isolated) == "" {
		return nil
	}
	if err := connect(); err != nil {
		return fmt.Errorf("network of the tests: %w", err)
	}
	started, err := nodeapitest.Start(filepath.Join("..", "..", "deploy"))
	cluster = started
	return err
}

// connect sets loopback up, and makes a default route, which leads nowhere: kube-apiserver looks for the node's address
// there.
func connect() error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "uplink"
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: "nowhere"}); err != nil {
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
	return netlink.RouteAdd(&netlink.Route{LinkIndex: uplink.Attrs().Index, Gw: net.IPv4(192, 0, 2, 2)})
}
