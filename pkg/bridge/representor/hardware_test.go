// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// TestHardwareRepresentors checks that devlink, phys_port_name and Find give, for each VF of each
// card, the representor that sysfs shows.
func TestHardwareRepresentors(t *testing.T) {
	if os.Getenv(plan.GuestVariable) != "simnic" {
		t.Skip("changes the machine's eswitches: make test-qemu runs it in guest simnic")
	}

	pfs, _ := filepath.Glob("/sys/bus/pci/devices/*/sriov_totalvfs")
	if len(pfs) < 2 {
		t.Fatalf("the guest has %d cards, want 2", len(pfs))
	}

	here := Config{Sysfs: "/sys"}
	for _, file := range pfs {
		here.HostPFs = append(here.HostPFs,
			HostPF{Address: pci.Address(filepath.Base(filepath.Dir(file)))})
	}

	handle, err := links.Open(netns.None())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(handle.Close)

	conn, err := devlink.Dial("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)

	f := NewFinder(here, handle, conn.Ports)
	legacy, err := f.Find("vf-0000-01-10-0")
	if err == nil || !strings.Contains(err.Error(), "eswitch mode switchdev") {
		t.Errorf("in mode legacy: %v, %v, want it to say what is missing", legacy, err)
	}

	var cards []card
	for _, file := range pfs {
		c := card{pf: pci.Address(filepath.Base(filepath.Dir(file)))}
		setMode(t, conn, c.pf)
		c.readVFs(t)
		cards = append(cards, c)
	}

	f.EventsLost() // because nothing watches events here
	netdevs, err := f.physPorts()
	if err != nil {
		t.Fatal(err)
	}

	ports, err := conn.Ports()
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
			link, err := f.Find(id)
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

// asHost names the PFs by other addresses, as the host of a DPU does.
func asHost(t *testing.T, cards []card, byPort, byName view) {
	var dpu Config
	for i, c := range cards {
		number := strings.TrimSuffix(c.names[0], "vf0")
		pf, err := ParseHostPF(fmt.Sprintf("0000:%x0:00.0=%s,offset=8,stride=1", 0xa+i, number))
		if err != nil {
			t.Fatal(err)
		}
		dpu.HostPFs = append(dpu.HostPFs, pf)
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

// card is a PF in mode switchdev, as sysfs shows it.
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

// setMode sets an eswitch to mode switchdev until the test ends.
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
