// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// BridgeAddress is the address on which opi-bridge listens.
const BridgeAddress = "127.0.0.1:50151"

// Bridge is opi-bridge in the guest's own network namespace: the guest is the xPU too.
type Bridge struct {
	t       *testing.T
	state   string
	log     string
	process *process
}

// StartBridge starts opi-bridge and waits until it listens. When the test ends, opi-bridge and its
// bridges are removed.
func StartBridge(t *testing.T) *Bridge {
	t.Helper()
	dir := t.TempDir()
	b := &Bridge{
		t: t, state: filepath.Join(dir, "state.db"), log: filepath.Join(dir, "opi-bridge.log"),
	}
	t.Cleanup(b.removeBridges)
	b.Start()
	return b
}

// Start starts opi-bridge with its former state.
func (b *Bridge) Start() {
	b.t.Helper()
	args := []string{"--listen=" + BridgeAddress, "--state=" + b.state, "--data-plane=vlan-aware"}
	// The pods of the guest get the Functions of the guest's own cards.
	cards, err := filepath.Glob("/sys/bus/pci/devices/*/sriov_totalvfs")
	must.Succeed(b.t, err)

	for _, file := range cards {
		args = append(args, "--host-pf="+filepath.Base(filepath.Dir(file))+"=own")
	}

	b.process = launch(b.t, b.log, bridgeProgram, args...)
	must.Eventually(b.t, "opi-bridge listens", func() bool {
		conn, err := net.DialTimeout("tcp", BridgeAddress, time.Second)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
}

// Kill ends opi-bridge by SIGKILL. The data plane stays as it is.
func (b *Bridge) Kill() { b.process.kill() }

// Members returns the netdevs that are in a bridge now.
func (b *Bridge) Members(t *testing.T) []string {
	t.Helper()
	links, err := netlink.LinkList()
	must.Succeed(t, err)
	var members []string
	for _, l := range links {
		if l.Attrs().MasterIndex != 0 {
			members = append(members, l.Attrs().Name)
		}
	}

	return members
}

// removeBridges removes the data plane, which opi-bridge leaves when it ends.
func (b *Bridge) removeBridges() {
	links, err := netlink.LinkList()
	must.Succeed(b.t, err)
	for _, l := range links {
		if l.Type() == "bridge" {
			must.Succeed(b.t, netlink.LinkDel(l))
		}
	}
}
