// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// byAddress are netdevs in a namespace of their own, among them a representor that only its devlink
// port tells.
type byAddress struct {
	*bridgePlane
	ns          *netns.Namespace
	representor netlink.Link
	broken      error // what devlink says
}

const vfPort = "vf-0000-01-02-3" // VF 3 of PF 0000:01:00.0

func newByAddress(t *testing.T) *byAddress {
	t.Helper()
	root := t.TempDir()
	makePF(t, root, "0000:01:00.0", "8 16 1")
	r := &byAddress{ns: netns.New(t)}
	err := r.ns.Do(func() (err error) {
		resolver := portResolver{
			sysfs: sysfs.Root(root), hostPFs: []HostPF{{Address: "0000:01:00.0"}},
		}
		r.bridgePlane, err = openBridgePlane(nil, UnderlayAuto, resolver, false)
		return err
	})

	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)

	r.representor = r.netdev(t, "eth7")
	r.representors.ports = func() ([]devlink.Port, error) {
		port := devlink.Port{Device: devlink.OfPCI("0000:01:00.0"), Flavour: devlink.PCIVF, VF: 3}
		port.NetdevIndex = r.representor.Attrs().Index
		return []devlink.Port{port}, r.broken
	}

	return r
}

// netdev makes one end of a wire whose other end is of no interest.
func (r *byAddress) netdev(t *testing.T, name string) netlink.Link {
	t.Helper()
	netns.Connect(t, r.ns, name, r.ns, "far-"+name[len(name)-4:])
	return r.link(t, name)
}

func (r *byAddress) link(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := r.handle.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// attach has the port in a bridge of its network.
func (r *byAddress) attach(t *testing.T) {
	t.Helper()
	plane := r.bridgePlane
	if _, err := plane.ensureNetwork(segment{id: "net-blue"}); err != nil {
		t.Fatal(err)
	}
	if err := plane.attach(vfPort, blueMember); err != nil {
		t.Fatal(err)
	}
	r.wantMaster(t, "br-net-blue")
}

var blueMember = membership{
	mac: []byte{2, 0, 0, 0, 0, 1}, networks: []segment{{id: "net-blue", vlan: 10}},
}

func (r *byAddress) wantMaster(t *testing.T, want string) {
	t.Helper()
	got := ""
	if index := r.link(t, r.representor.Attrs().Name).Attrs().MasterIndex; index != 0 {
		master, err := r.handle.LinkByIndex(index)
		if err != nil {
			t.Fatal(err)
		}
		got = master.Attrs().Name
	}

	if got != want {
		t.Errorf("the representor is in bridge %q, want %q", got, want)
	}
}

// TestOwnNetdevsAreNoPorts: whatever id a client chooses, it gets representors of the host's
// functions, and none of this machine's own netdevs.
func TestOwnNetdevsAreNoPorts(t *testing.T) {
	r := newByAddress(t)
	makePF(t, string(r.representors.resolver.sysfs), "0000:03:00.0", "8 2 1", "0000:03:00.2")
	numbered, err := ParseHostPF("c1pf0,serial=MT2334XZ0LTK")
	if err != nil {
		t.Fatal(err)
	}

	own, physical, hosts := r.netdev(t, "en3f0pf0sf88"), r.netdev(t,
		"enp3s0f1"), r.netdev(t, "c1rep88")
	ownVF := r.netdev(t, "pf0vf0")
	r.representors.ports = func() ([]devlink.Port, error) {
		port := devlink.Port{Device: devlink.OfPCI("0000:03:00.0"), Flavour: devlink.PCISF, SF: 88}
		sf, uplink, external, vf := port, port, port, port
		sf.NetdevIndex = own.Attrs().Index
		uplink.Flavour, uplink.NetdevIndex = devlink.Physical, physical.Attrs().Index
		external.Controller, external.External, external.NetdevIndex = 1, true, hosts.Attrs().Index
		vf.Flavour, vf.VF, vf.NetdevIndex = devlink.PCIVF, 0, ownVF.Attrs().Index
		return []devlink.Port{sf, uplink, external, vf}, r.broken
	}

	if _, err := r.ensureNetwork(segment{id: "net-blue"}); err != nil {
		t.Fatal(err)
	}

	for name, pfs := range map[string][]HostPF{
		"nothing told": nil, "without addresses": {numbered},
	} {
		r.representors.resolver.hostPFs = pfs
		for id, says := range map[string]string{
			// a subfunction that only this machine has at that address
			"sf-03-00-0-88":   "c1pf0sf88",
			"vf-0000-03-00-2": "c1pf0vf0", // likewise a VF
			"vf-0000-03-00-0": "0000:03:00.0 is no --host-pf",
			"pf0sf88":         "is a function of this machine",
			"pf0vf0":          "--representor pf0vf0", // by its name
			"en3f0pf0sf88":    "--representor en3f0pf0sf88",
			"enp3s0f1":        "--representor enp3s0f1",
			"br-net-blue":     "represents no function of the host",
			"c1pf0sf89":       "c1pf0sf89 has no representor",
		} {
			err := r.attachBlue(id)
			if err == nil || !strings.Contains(err.Error(), says) ||
				!strings.Contains(err.Error(), id) {
				t.Errorf("%s: %s: %v, want it to say %q", name, id, err, says)
			}
		}

		for _, id := range []string{"c1pf0sf88", "c1rep88"} {
			if err := errors.Join(r.attachBlue(id), r.detach(id)); err != nil {
				t.Errorf("%s: %s: %v", name, id, err)
			}
		}
	}

	for _, link := range []netlink.Link{own, physical, ownVF} {
		if r.link(t, link.Attrs().Name).Attrs().MasterIndex != 0 {
			t.Errorf("%s is in a bridge", link.Attrs().Name)
		}
	}

	// Where there is no devlink, a name of that form is an administrator's.
	named := r.netdev(t, "c1pf1vf0")
	err = r.attachBlue("c1pf1vf0")
	if err != nil || r.link(t, named.Attrs().Name).Attrs().MasterIndex == 0 {
		t.Errorf("a netdev that was named as one of the host's functions: %v", err)
	}

	// What an agent of before took goes out of the bridge at the start.
	if err := r.handle.LinkSetMaster(own, r.link(t, "br-net-blue")); err != nil {
		t.Fatal(err)
	}

	ports := map[string]membership{"sf-03-00-0-88": blueMember, "en3f0pf0sf88": blueMember}
	err = r.sweep([]string{"net-blue"}, ports)
	if index := r.link(t, own.Attrs().Name).Attrs().MasterIndex; index != 0 || err != nil {
		t.Errorf("after the start the own netdev has master %d, %v", index, err)
	}

	// While devlink is broken it is not known what a netdev represents, and so nobody gets it.
	r.broken = errors.New("devlink is broken")
	r.representors.stale.Store(true)
	err = r.attachBlue("enp3s0f1")
	if err == nil || isNoRepresentor(err) ||
		!strings.Contains(err.Error(), "is not known: devlink is broken") {
		t.Errorf("while devlink is broken: %v, want that it is not known", err)
	}
}

func (r *byAddress) attachBlue(port string) error { return r.bridgePlane.attach(port, blueMember) }

// TestConfiguredNames: what the configuration names is a port, unless this machine uses it.
func TestConfiguredNames(t *testing.T) {
	r := newByAddress(t)
	uplink, lab := r.netdev(t, "enp3s0f0"), r.netdev(t, "lab-wire")
	vlan := &netlink.Vlan{
		LinkAttrs: netlink.LinkAttrs{Name: "underlay", ParentIndex: uplink.Attrs().Index},
		VlanId:    7,
	}

	if err := r.handle.LinkAdd(vlan); errors.Is(err, unix.EOPNOTSUPP) {
		t.Log("the kernel has no VLAN netdevs")
	} else if err != nil {
		t.Fatal(err)
	} else {
		r.uplinks = []Uplink{{Name: "underlay"}}
	}

	if _, err := r.ensureNetwork(segment{id: "net-blue"}); err != nil {
		t.Fatal(err)
	}

	r.representors.resolver.representors = []string{"lab-*", "enp3s0f0", "br-*"}
	if err := r.attachBlue("lab-wire"); err != nil ||
		r.link(t, "lab-wire").Attrs().MasterIndex == 0 {
		t.Errorf("%s: %v, want it in the bridge", lab.Attrs().Name, err)
	}

	refused := []string{"br-net-blue"}
	if r.uplinks != nil {
		refused = append(refused, "enp3s0f0") // the uplink is on top of it
	}

	for _, id := range refused {
		if err := r.attachBlue(id); err == nil ||
			!strings.Contains(err.Error(), "is no representor") {
			t.Errorf("%s: %v, want it refused", id, err)
		}
	}
}

// TestSweepKnowsRules: at the start, what was found by PCI address is kept, and what cannot be
// known is left alone.
func TestSweepKnowsRules(t *testing.T) {
	r := newByAddress(t)
	r.attach(t)
	plane, networks := r.bridgePlane, []string{"net-blue"}
	if err := plane.sweep(networks, map[string]membership{vfPort: blueMember}); err != nil {
		t.Error(err)
	}

	r.wantMaster(t, "br-net-blue")

	r.broken = errors.New("devlink is broken")
	r.representors.stale.Store(true)
	err := plane.sweep(networks, map[string]membership{vfPort: blueMember})
	if err == nil || !strings.Contains(err.Error(), "representor of port "+vfPort) {
		t.Errorf("devlink is broken: %v", err)
	}

	r.wantMaster(t, "br-net-blue")

	r.broken = nil
	if err := plane.sweep(networks, nil); err != nil {
		t.Error(err)
	}

	r.wantMaster(t, "")
}

// TestNamesComeFirst: a netdev with the port's name takes the place of the one that the rule finds.
func TestNamesComeFirst(t *testing.T) {
	r := newByAddress(t)
	r.attach(t)
	named := r.netdev(t, vfPort)
	if err := r.bridgePlane.attach(vfPort, blueMember); err != nil {
		t.Fatal(err)
	}

	r.wantMaster(t, "")
	if r.link(t, named.Attrs().Name).Attrs().MasterIndex == 0 {
		t.Error("the netdev with the port's name is in no bridge")
	}
}

// TestOneNetdevForOnePort: two ports that find one netdev do not take it from each other.
func TestOneNetdevForOnePort(t *testing.T) {
	r := newByAddress(t)
	r.attach(t)
	const other = "vf-0000-01-02-4"
	if err := r.handle.LinkAddAltName(r.representor, other); err != nil {
		t.Fatal(err)
	}

	plane := r.bridgePlane
	err := plane.attach(other, blueMember)
	if err == nil || !strings.Contains(err.Error(), "is already the representor of port "+vfPort) {
		t.Errorf("%v, want it to name the port that has it", err)
	}
	if err := plane.detach(other); err != nil {
		t.Error(err)
	}

	r.wantMaster(t, "br-net-blue")

	r.broken = errors.New("devlink is broken")
	r.representors.stale.Store(true)

	for what, err := range map[string]error{
		"attach": plane.attach(other, blueMember), "detach": plane.detach(other),
	} {
		if err == nil ||
			!strings.Contains(err.Error(), "whether it is the representor of port "+vfPort) {
			t.Errorf("%s while devlink is broken: %v, want it to say what is not known", what, err)
		}
	}

	r.wantMaster(t, "br-net-blue")
	r.broken = nil
	r.representors.stale.Store(true)

	if err := plane.detach(vfPort); err != nil {
		t.Error(err)
	}

	r.wantMaster(t, "")
	if err := plane.attach(other, blueMember); err != nil {
		t.Errorf("after the other port was deleted: %v", err)
	}

	r.wantMaster(t, "br-net-blue")
}

// TestArrivals: a netdev is told of as new once, until it goes; that it leaves a bridge is no end
// of it.
func TestArrivals(t *testing.T) {
	r := newByAddress(t)
	if _, err := r.locate(vfPort); err != nil {
		t.Fatal(err)
	}

	arrival := func(link netlink.Link, removed, bridging bool) bool {
		return slices.Contains(r.tasksOf(link, removed, bridging), task{kind: taskArrival})
	}
	arrival(r.representor, false, false)
	if arrival(r.representor, true, true); arrival(r.representor, false, false) {
		t.Error("what left a bridge is new")
	}

	later := r.netdev(t, "eth8")
	if !arrival(later, false, false) || arrival(later, false, false) {
		t.Error("a netdev that came is new once")
	}

	arrival(later, true, false)
	if !arrival(later, false, false) {
		t.Error("a netdev that went and came is not new")
	}
}

// TestRepresentorVanishesUnseen: the event that it is gone may be on its way.
func TestRepresentorVanishesUnseen(t *testing.T) {
	r := newByAddress(t)
	if _, err := r.locate(vfPort); err != nil {
		t.Fatal(err)
	}

	old := r.representor
	r.representor = r.netdev(t, "eth9")
	if err := r.handle.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
		t.Fatal(err)
	}

	link, err := r.locate(vfPort)
	if err != nil || link.Attrs().Name != "eth9" {
		t.Errorf("%+v, %v, want eth9", link, err)
	}
}
