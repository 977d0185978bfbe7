// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor/representortest"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// lab is a Plane in a namespace of its own, with a representor that only a devlink port identifies.
type lab struct {
	*Plane
	ns     *netns.Namespace
	config representor.Config
	rep    netlink.Link
	ports  []devlink.Port
	broken error // the error of devlink
}

const vfPort = "vf-0000-01-02-3" // VF 3 of PF 0000:01:00.0

func newLab(t *testing.T) *lab {
	t.Helper()
	root := t.TempDir()
	representortest.MakePF(t, root, "0000:01:00.0", "8 16 1")
	l := &lab{ns: netns.New(t), config: representor.Config{
		Sysfs: sysfs.Root(root), HostPFs: []representor.HostPF{{Address: "0000:01:00.0"}},
	}}

	must.Succeed(t, l.ns.Do(func() (err error) {
		l.Plane, err = open(Config{Mode: ModeBridgePerNetwork})
		return err
	}))
	t.Cleanup(l.Close)

	l.represent(l.netdev(t, "eth7"))
	l.useConfig(l.config)

	return l
}

// useConfig makes a new Finder.
func (l *lab) useConfig(config representor.Config) {
	l.representors = representor.NewFinder(config, l.handle, func() ([]devlink.Port, error) {
		return l.ports, l.broken
	})
}

// represent makes a netdev the representor of vfPort.
func (l *lab) represent(link netlink.Link) {
	l.rep = link
	l.ports = []devlink.Port{{Device: devlink.OfPCI("0000:01:00.0"), Flavour: devlink.PCIVF, VF: 3,
		NetdevIndex: link.Attrs().Index}}
}

// netdev makes one end of a wire. The other end does not matter.
func (l *lab) netdev(t *testing.T, name string) netlink.Link {
	t.Helper()
	netns.Connect(t, l.ns, name, l.ns, "far-"+name[len(name)-4:])
	return l.link(t, name)
}

func (l *lab) link(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := l.handle.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// attachVF makes the network net-blue and attaches vfPort to it.
func (l *lab) attachVF(t *testing.T) {
	t.Helper()
	_, err := l.EnsureNetwork(Segment{ID: "net-blue"})
	must.Succeed(t, err)
	must.Succeed(t, l.attachBlue(vfPort))
	l.wantMaster(t, "br-net-blue")
}

func (l *lab) attachBlue(port string) error { return l.Attach(port, blueMember) }

var blueMember = Membership{
	MAC: []byte{2, 0, 0, 0, 0, 1}, Networks: []Segment{{ID: "net-blue", VLAN: 10}},
}

// wantMaster checks which bridge the representor is in.

func (l *lab) wantMaster(t *testing.T, want string) {
	t.Helper()
	got := ""
	if index := l.link(t, l.rep.Attrs().Name).Attrs().MasterIndex; index != 0 {
		master, err := l.handle.LinkByIndex(index)
		if err != nil {
			t.Fatal(err)
		}
		got = master.Attrs().Name
	}

	if got != want {
		t.Errorf("the representor is in bridge %q, want %q", got, want)
	}
}

// TestOwnNetdevsAreNoPorts checks that a client gets only representors of the host's functions, and
// no netdev of this machine, whatever id it chooses.
func TestOwnNetdevsAreNoPorts(t *testing.T) {
	l := newLab(t)
	representortest.MakePF(t, string(l.config.Sysfs), "0000:03:00.0", "8 2 1", "0000:03:00.2")
	numbered, err := representor.ParseHostPF("c1pf0,serial=MT2334XZ0LTK")
	if err != nil {
		t.Fatal(err)
	}

	own, physical, hosts := l.netdev(t, "en3f0pf0sf88"), l.netdev(t,
		"enp3s0f1"), l.netdev(t, "c1rep88")
	ownVF := l.netdev(t, "pf0vf0")
	port := devlink.Port{Device: devlink.OfPCI("0000:03:00.0"), Flavour: devlink.PCISF, SF: 88}
	sf, uplink, external, vf := port, port, port, port
	sf.NetdevIndex = own.Attrs().Index
	uplink.Flavour, uplink.NetdevIndex = devlink.Physical, physical.Attrs().Index
	external.Controller, external.External, external.NetdevIndex = 1, true, hosts.Attrs().Index
	vf.Flavour, vf.VF, vf.NetdevIndex = devlink.PCIVF, 0, ownVF.Attrs().Index
	l.ports = []devlink.Port{sf, uplink, external, vf}

	_, err = l.EnsureNetwork(Segment{ID: "net-blue"})
	must.Succeed(t, err)

	for name, pfs := range map[string][]representor.HostPF{
		"no host PFs": nil, "without addresses": {numbered},
	} {
		l.useConfig(representor.Config{Sysfs: l.config.Sysfs, HostPFs: pfs})
		for id, says := range map[string]string{
			// a subfunction and a VF that only this machine has at these addresses
			"sf-03-00-0-88":   "c1pf0sf88",
			"vf-0000-03-00-2": "c1pf0vf0",
			"vf-0000-03-00-0": "0000:03:00.0 is no --host-pf",
			"pf0sf88":         "is a function of this machine",
			"pf0vf0":          "--representor pf0vf0",
			"en3f0pf0sf88":    "--representor en3f0pf0sf88",
			"enp3s0f1":        "--representor enp3s0f1",
			"br-net-blue":     "represents no function of the host",
			"c1pf0sf89":       "c1pf0sf89 has no representor",
		} {
			err := l.attachBlue(id)
			if err == nil || !strings.Contains(err.Error(), says) ||
				!strings.Contains(err.Error(), id) {
				t.Errorf("%s: %s: %v, want it to say %q", name, id, err, says)
			}
		}

		for _, id := range []string{"c1pf0sf88", "c1rep88"} {
			if err := errors.Join(l.attachBlue(id), l.Detach(id)); err != nil {
				t.Errorf("%s: %s: %v", name, id, err)
			}
		}
	}

	for _, link := range []netlink.Link{own, physical, ownVF} {
		if l.link(t, link.Attrs().Name).Attrs().MasterIndex != 0 {
			t.Errorf("%s is in a bridge", link.Attrs().Name)
		}
	}

	// A netdev that has a name of this form got it from an administrator.
	named := l.netdev(t, "c1pf1vf0")
	err = l.attachBlue("c1pf1vf0")
	if err != nil || l.link(t, named.Attrs().Name).Attrs().MasterIndex == 0 {
		t.Errorf("a netdev that was named as one of the host's functions: %v", err)
	}

	// A netdev of this machine that an earlier agent took leaves the bridge at the start.
	if err := l.handle.LinkSetMaster(own, l.link(t, "br-net-blue")); err != nil {
		t.Fatal(err)
	}

	ports := map[string]Membership{"sf-03-00-0-88": blueMember, "en3f0pf0sf88": blueMember}
	err = l.Sweep(Wanted{Networks: []string{"net-blue"}, Ports: ports})
	if index := l.link(t, own.Attrs().Name).Attrs().MasterIndex; index != 0 || err != nil {
		t.Errorf("after the start the own netdev has master %d, %v", index, err)
	}

	// While devlink is broken, it is unknown what a netdev represents, so no port gets it.
	l.broken = errors.New("devlink is broken")
	l.representors.EventsLost()
	err = l.attachBlue("enp3s0f1")
	if err == nil || representor.IsNotFound(err) ||
		!strings.Contains(err.Error(), "is not known: devlink is broken") {
		t.Errorf("while devlink is broken: %v, want that it is not known", err)
	}
}

// TestConfiguredNames checks that a netdev that the configuration names may be a port, unless this
// machine uses it.
func TestConfiguredNames(t *testing.T) {
	l := newLab(t)
	uplink, wire := l.netdev(t, "enp3s0f0"), l.netdev(t, "lab-wire")
	vlan := &netlink.Vlan{
		LinkAttrs: netlink.LinkAttrs{Name: "underlay", ParentIndex: uplink.Attrs().Index},
		VlanId:    7,
	}

	if err := l.handle.LinkAdd(vlan); errors.Is(err, unix.EOPNOTSUPP) {
		t.Log("the kernel has no VLAN netdevs")
	} else if err != nil {
		t.Fatal(err)
	} else {
		l.uplinks = []Uplink{{Name: "underlay"}}
	}

	_, err := l.EnsureNetwork(Segment{ID: "net-blue"})
	must.Succeed(t, err)

	l.config.Netdevs = []string{"lab-*", "enp3s0f0", "br-*"}
	l.useConfig(l.config)
	if err := l.attachBlue("lab-wire"); err != nil ||
		l.link(t, "lab-wire").Attrs().MasterIndex == 0 {
		t.Errorf("%s: %v, want it in the bridge", wire.Attrs().Name, err)
	}

	refused := []string{"br-net-blue"}
	if l.uplinks != nil {
		refused = append(refused, "enp3s0f0") // the uplink is on top of it
	}

	for _, id := range refused {
		if err := l.attachBlue(id); err == nil ||
			!strings.Contains(err.Error(), "is no representor") {
			t.Errorf("%s: %v, want it refused", id, err)
		}
	}
}

// TestSweepFindsByAddress checks that Sweep keeps a representor that is found by its PCI address,
// and changes nothing if it is unknown what a netdev represents.
func TestSweepFindsByAddress(t *testing.T) {
	l := newLab(t)
	l.attachVF(t)
	networks, ports := []string{"net-blue"}, map[string]Membership{vfPort: blueMember}
	if err := l.Sweep(Wanted{Networks: networks, Ports: ports}); err != nil {
		t.Error(err)
	}

	l.wantMaster(t, "br-net-blue")

	l.broken = errors.New("devlink is broken")
	l.representors.EventsLost()
	err := l.Sweep(Wanted{Networks: networks, Ports: ports})
	if err == nil || !strings.Contains(err.Error(), "representor of port "+vfPort) {
		t.Errorf("devlink is broken: %v", err)
	}

	l.wantMaster(t, "br-net-blue")

	l.broken = nil
	if err := l.Sweep(Wanted{Networks: networks}); err != nil {
		t.Error(err)
	}

	l.wantMaster(t, "")
}

// TestNamesComeFirst checks that a netdev with the port's name replaces the netdev that is found by
// the port's PCI address.
func TestNamesComeFirst(t *testing.T) {
	l := newLab(t)
	l.attachVF(t)
	named := l.netdev(t, vfPort)
	if err := l.attachBlue(vfPort); err != nil {
		t.Fatal(err)
	}

	l.wantMaster(t, "")
	if l.link(t, named.Attrs().Name).Attrs().MasterIndex == 0 {
		t.Error("the netdev with the port's name is in no bridge")
	}
}

// TestOneNetdevForOnePort checks that a port does not take a netdev that represents another port.
func TestOneNetdevForOnePort(t *testing.T) {
	l := newLab(t)
	l.attachVF(t)
	const other = "vf-0000-01-02-4"
	if err := l.handle.LinkAddAltName(l.rep, other); err != nil {
		t.Fatal(err)
	}

	err := l.attachBlue(other)
	if err == nil || !strings.Contains(err.Error(), "is already the representor of port "+vfPort) {
		t.Errorf("%v, want it to name the port that has it", err)
	}
	if err := l.Detach(other); err != nil {
		t.Error(err)
	}

	l.wantMaster(t, "br-net-blue")

	l.broken = errors.New("devlink is broken")
	l.representors.EventsLost()

	for what, err := range map[string]error{
		"attach": l.attachBlue(other), "detach": l.Detach(other),
	} {
		if err == nil ||
			!strings.Contains(err.Error(), "whether it is the representor of port "+vfPort) {
			t.Errorf("%s while devlink is broken: %v, want it to say what is not known", what, err)
		}
	}

	l.wantMaster(t, "br-net-blue")
	l.broken = nil
	l.representors.EventsLost()

	if err := l.Detach(vfPort); err != nil {
		t.Error(err)
	}

	l.wantMaster(t, "")
	if err := l.attachBlue(other); err != nil {
		t.Errorf("after the other port was deleted: %v", err)
	}

	l.wantMaster(t, "br-net-blue")
}

// TestNewNetdevs checks that a netdev is new once until it is removed, and that it does not become
// new by leaving a bridge.
func TestNewNetdevs(t *testing.T) {
	l := newLab(t)
	if _, err := l.representors.Find(vfPort); err != nil {
		t.Fatal(err)
	}

	isNew := func(link netlink.Link, removed, ofBridge bool) bool {
		return slices.Contains(l.changesOf(link, removed, ofBridge), Change{Scope: ScopeMissing})
	}
	isNew(l.rep, false, false)
	if isNew(l.rep, true, true); isNew(l.rep, false, false) {
		t.Error("a netdev that left a bridge is new")
	}

	later := l.netdev(t, "eth8")
	if !isNew(later, false, false) || isNew(later, false, false) {
		t.Error("a netdev that was added is not new exactly once")
	}

	isNew(later, true, false)
	if !isNew(later, false, false) {
		t.Error("a netdev that was removed and added is not new")
	}
}

// TestRepresentorVanishesUnseen checks that a representor is found again before the event of its
// removal is read.
func TestRepresentorVanishesUnseen(t *testing.T) {
	l := newLab(t)
	if _, err := l.representors.Find(vfPort); err != nil {
		t.Fatal(err)
	}

	old := l.rep
	l.represent(l.netdev(t, "eth9"))
	if err := l.handle.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
		t.Fatal(err)
	}

	link, err := l.representors.Find(vfPort)
	if err != nil || link.Attrs().Name != "eth9" {
		t.Errorf("%+v, %v, want eth9", link, err)
	}
}
