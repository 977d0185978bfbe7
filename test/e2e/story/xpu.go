// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// xpu is the simulated card of one node and its operating system: a network namespace with the
// representors, in which opi-bridge runs.
type xpu struct {
	node    Node
	address string // address on the management network, without port
	netNS   string
	links   *netlink.Handle
	ns      vnetns.NsHandle
}

// opiPort is the port of opi-bridge on each xPU.
const opiPort = "50151"

// vfsOfPF is the number of VFs of each PF. Half of them are for claims, half for the device plugin.
const vfsOfPF = 16

// startCard simulates the node's card.
func (w *World) startCard(ctx context.Context, index int, node Node) (*xpu, error) {
	root := filepath.Join(node.Root, "var/lib/simhost")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}

	var ready struct {
		XPUNetNS string `json:"xpuNetNS"`
	}
	out, err := w.start("simhost-"+node.Name, "", filepath.Join(w.Bin, "simhost"), "--root",
		root, "--host-netns", node.NetNS, "--pfs", "2", "--vfs", strconv.Itoa(vfsOfPF))
	if err != nil {
		return nil, err
	}

	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("simhost of %s ended: see %s", node.Name,
			w.log("simhost-"+node.Name))
	}
	if err := json.Unmarshal(line, &ready); err != nil {
		return nil, fmt.Errorf("simhost of %s: %w", node.Name, err)
	}

	x := &xpu{node: node, address: fmt.Sprintf("10.77.0.%d", 101+index), netNS: ready.XPUNetNS}
	if x.ns, err = vnetns.GetFromPath(x.netNS); err != nil {
		return nil, err
	}

	x.links, err = netlink.NewHandleAt(x.ns, unix.NETLINK_ROUTE)
	return x, err
}

// connect connects the xPU to the management network, which is the cluster's own.
func (x *xpu) connect(cluster Cluster) error {
	ns, err := vnetns.GetFromPath(cluster.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()

	outside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer outside.Close()

	bridge, err := outside.LinkByName(cluster.Bridge)
	if err != nil {
		return err
	}

	port := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "xpu-" + x.node.Name, MasterIndex: bridge.Attrs().Index},
		PeerName:  "mgmt", PeerNamespace: netlink.NsFd(x.ns),
	}
	if err := outside.LinkAdd(port); err != nil {
		return fmt.Errorf("management port of xPU %s: %w", x.node.Name, err)
	}
	if err := outside.LinkSetUp(port); err != nil {
		return err
	}

	gateway := net.ParseIP("10.77.0.1")
	return errors.Join(
		x.setUp("mgmt", x.address+"/24"),
		x.links.RouteAdd(&netlink.Route{Gw: gateway}),
	)
}

func (x *xpu) setUp(name, address string) error {
	l, err := x.links.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s of xPU %s: %w", name, x.node.Name, err)
	}

	a, err := netlink.ParseAddr(address)
	if err != nil {
		return err
	}
	return errors.Join(x.links.AddrAdd(l, a), x.links.LinkSetUp(l))
}

// startBridge runs opi-bridge on the xPU and waits until it listens.
func (w *World) startBridge(ctx context.Context, x *xpu) error {
	name := "opi-bridge-" + x.node.Name
	files, err := w.authority.issueFiles(w.dir, name, x.address)
	if err != nil {
		return err
	}

	if _, err := w.start(name, x.netNS, filepath.Join(w.productDir(), "opi-bridge"),
		"--listen", net.JoinHostPort(x.address, opiPort), "--uplink", "uplink", "--state",
		filepath.Join(w.dir, name+".db"),
		"--metrics-listen", net.JoinHostPort(x.address, bridgeMetricsPort),
		"--tls-cert", files.cert, "--tls-key", files.key, "--tls-client-ca", files.ca); err != nil {
		return err
	}

	return poll(ctx, 10*time.Second, "opi-bridge of "+x.node.Name+" listens",
		func(ctx context.Context) error {
			return netns.In(x.netNS, func() error {
				conn, err := net.DialTimeout("tcp", net.JoinHostPort(x.address, opiPort),
					time.Second)
				if err != nil {
					return err
				}
				return conn.Close()
			})
		})
}

// start runs a program until the world ends, in a network namespace if one is given. Its log goes
// to a file. start returns its standard output.
func (w *World) start(name, netNS, program string, args ...string) (*os.File, error) {
	log, err := os.Create(w.log(name))
	if err != nil {
		return nil, err
	}
	defer log.Close()

	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()

	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = in, log
	// In its own process group the program does not get the terminal's interrupt, so that the world
	// can end its programs in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	start := cmd.Start
	if netNS != "" {
		start = func() error { return netns.In(netNS, cmd.Start) }
	}
	if err := start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}

	w.processes = append(w.processes, process{name, cmd.Process.Pid})
	w.running = append(w.running, cmd)
	return out, w.saveProcesses()
}
