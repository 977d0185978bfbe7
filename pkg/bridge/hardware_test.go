// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// TestHardwareRepresentors: each rule finds, for each VF of each card, what sysfs says is its
// representor.
func TestHardwareRepresentors(t *testing.T) {
	if os.Getenv(plan.GuestVariable) != "simnic" {
		t.Skip("changes the machine's eswitches: make test-qemu runs it in guest simnic")
	}

	pfs, _ := filepath.Glob("/sys/bus/pci/devices/*/sriov_totalvfs")
	if len(pfs) < 2 {
		t.Fatalf("the guest has %d cards, want 2", len(pfs))
	}

	here := portResolver{sysfs: "/sys"}
	for _, file := range pfs {
		here.hostPFs = append(here.hostPFs,
			HostPF{Address: pci.Address(filepath.Base(filepath.Dir(file)))})
	}

	d, err := openBridgePlane(nil, UnderlayAuto, here, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.close)

	legacy, err := d.locate("vf-0000-01-10-0")
	if err == nil || !strings.Contains(err.Error(), "eswitch mode switchdev") {
		t.Errorf("in mode legacy: %v, %v, want it to say what is missing", legacy, err)
	}

	var cards []card
	for _, file := range pfs {
		c := card{pf: pci.Address(filepath.Base(filepath.Dir(file)))}
		setMode(t, d.devlink, c.pf)
		c.readVFs(t)
		cards = append(cards, c)
	}

	d.representors.stale.Store(true) // nobody watches events here
	netdevs, err := d.physPorts()
	if err != nil {
		t.Fatal(err)
	}

	ports, err := d.devlink.Ports()
	if err != nil {
		t.Fatal(err)
	}

	byName, byPort := newView(nil, fmt.Errorf("not asked"), netdevs), newView(ports, nil, nil)

	for _, c := range cards {
		for i, vf := range c.vfs {
			want := c.representors[i]
			id := portID(t, vf)
			at, err := here.resolve(id)
			if err != nil {
				t.Fatal(err)
			}

			wantNetdev(t, "devlink: "+id, want)(byPort.find(at))
			wantNetdev(t, "phys_port_name: "+id, want)(byName.find(at))
			link, err := d.locate(id)
			if err != nil {
				t.Fatal(err)
			}

			wantNetdev(t, id, want)(link.Attrs().Index, nil)
		}
	}

	t.Run("as the eswitch of another machine's PFs", func(t *testing.T) {
		asHost(t, cards, byPort, byName)
	})
}

// asHost calls PFs by other addresses, as a host does those that a DPU gives it.
func asHost(t *testing.T, cards []card, byPort, byName view) {
	var dpu portResolver
	for i, c := range cards {
		number := strings.TrimSuffix(c.names[0], "vf0")
		pf, err := ParseHostPF(fmt.Sprintf("0000:%x0:00.0=%s,offset=8,stride=1", 0xa+i, number))
		if err != nil {
			t.Fatal(err)
		}
		dpu.hostPFs = append(dpu.hostPFs, pf)
	}

	for i, c := range cards {
		for j, want := range c.representors {
			id := fmt.Sprintf("vf-0000-%x0-01-%d", 0xa+i, j)
			at, err := dpu.resolve(id)
			if err != nil {
				t.Fatal(err)
			}
			wantNetdev(t, "devlink: "+id, want)(byPort.find(at))
			wantNetdev(t, "phys_port_name: "+id, want)(byName.find(at))
		}
	}
}

// card is what sysfs shows of a PF in mode switchdev.
type card struct {
	pf           pci.Address
	vfs          []pci.Address
	representors []int    // ifindexes, as vfs
	names        []string // their phys_port_names
}

func (c *card) readVFs(t *testing.T) {
	t.Helper()
	for i := 0; ; i++ {
		link, err := os.Readlink(fmt.Sprintf("/sys/bus/pci/devices/%s/virtfn%d", c.pf, i))
		if err != nil {
			break
		}

		c.vfs = append(c.vfs, pci.Address(filepath.Base(link)))
		found, _ := filepath.Glob(fmt.Sprintf("/sys/bus/pci/devices/%s/net/*/phys_port_name", c.pf))
		for _, file := range found {
			content, _ := os.ReadFile(file)
			if name := strings.TrimSpace(string(content)); strings.HasSuffix(name,
				fmt.Sprintf("vf%d", i)) {
				netdev, err := netlink.LinkByName(filepath.Base(filepath.Dir(file)))
				if err != nil {
					t.Fatal(err)
				}
				c.representors = append(c.representors, netdev.Attrs().Index)
				c.names = append(c.names, name)
			}
		}
	}

	if len(c.vfs) == 0 || len(c.vfs) != len(c.representors) {
		t.Fatalf("PF %s has VFs %v and representors %v", c.pf, c.vfs, c.names)
	}
}

// setMode brings an eswitch to mode switchdev until the test ends.
func setMode(t *testing.T, conn *devlink.Conn, pf pci.Address) {
	t.Helper()
	if err := conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Switchdev); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Legacy); err != nil {
			t.Error(err)
		}
	})
}

func portID(t *testing.T, address pci.Address) string {
	t.Helper()
	id, err := opi.PortID(function.ID{Address: address})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func wantNetdev(t *testing.T, what string, want int) func(int, error) {
	return func(got int, err error) {
		t.Helper()
		if err != nil || got != want {
			t.Errorf("%s: netdev %d, %v, want %d", what, got, err, want)
		}
	}
}
