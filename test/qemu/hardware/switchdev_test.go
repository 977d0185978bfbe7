// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// TestSwitchdev takes a card through the functions of a DPU's eswitch: the mode, representors, a
// subfunction, and traffic that opi-bridge forwards between representors. Here one machine is the
// host and the xPU.
func TestSwitchdev(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	f := follow(t)
	legacy := f.Snapshot()
	uplink := card.Netdev(pf)
	eswitch, err := netlink.DevLinkGetDeviceByName("pci", string(pf))
	must.Succeed(t, err)
	must.Succeed(t, netlink.DevLinkSetEswitchMode(eswitch, "switchdev"))
	t.Cleanup(func() { must.Succeed(t, netlink.DevLinkSetEswitchMode(eswitch, "legacy")) })

	t.Run("Functions are the same in both eswitch modes", func(t *testing.T) {
		for i := range card.Number(t, pf, "sriov_numvfs") {
			representorName(t, pf, fmt.Sprintf("pf0vf%d", i))
		}

		begin := time.Now()
		f.until(t, begin, pf, "its netdev is the uplink", func(got function.Function) bool {
			return got.Netdev == uplink && got.PFName == uplink
		})
		got := inventoried(t)
		if diff := cmp.Diff(legacy, got); diff != "" {
			t.Errorf("(-legacy +switchdev):\n%s", diff)
		}

		witnessed(t, pf, "driver")
	})

	t.Run("subfunction comes and goes", func(t *testing.T) { subfunctionComesAndGoes(t, f, pf) })

	x := &xpu{t: t, pf: pf, state: filepath.Join(t.TempDir(), "state.db"), uplink: uplink}
	// opi-bridge leaves the bridge when it ends
	t.Cleanup(func() { must.Succeed(t, netlink.LinkDel(linkOf(t, "br-opi"))) })

	x.start()
	x.network(t, "net-blue", 10)
	x.network(t, "net-red", 20)
	t.Run("opi-bridge forwards between representors found by PCI address", func(t *testing.T) {
		forwards(t, x, pf)
	})
	t.Run("a trunk carries tags, to a VF and to the uplink", func(t *testing.T) { trunk(t, x, pf) })
	t.Run("a subfunction's representor is found by its sfnum", func(t *testing.T) {
		forwardsToSubfunction(t, x, f, pf)
	})
	t.Run("opi-bridge started again leaves representors in the bridge", func(t *testing.T) {
		startedAgain(t, x, pf)
	})
	t.Run("VFs removed and made again are in service again", func(t *testing.T) {
		madeAgain(t, x, pf)
	})
}

// representorName returns the name of the netdev on the PF that represents a function of the
// eswitch.
func representorName(t *testing.T, pf pci.Address, portName string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(card.Devices, string(pf), "net/*"))
	must.Succeed(t, err)
	var seen []string
	for _, dir := range found {
		// returns EOPNOTSUPP for other netdevs
		content, _ := os.ReadFile(filepath.Join(dir, "phys_port_name"))
		if name := strings.TrimSpace(string(content)); name == portName {
			return filepath.Base(dir)
		}
		seen = append(seen, filepath.Base(dir)+" is "+strings.TrimSpace(string(content)))
	}

	t.Fatalf("PF %s has no representor %s, only %q", pf, portName, seen)
	return ""
}

func subfunctionComesAndGoes(t *testing.T, f *follower, pf pci.Address) {
	const sfnum = 88
	port, err := netlink.DevLinkPortAdd("pci", string(pf), nl.DEVLINK_PORT_FLAVOUR_PCI_SF,
		netlink.DevLinkPortAddAttrs{SfNumber: sfnum, SfNumberValid: true})
	must.Succeed(t, err)

	mac := net.HardwareAddr{2, 0, 0, 0, 0, sfnum}
	must.Succeed(t,
		netlink.DevlinkPortFnSet("pci", string(pf), port.PortIndex, netlink.DevlinkPortFnSetAttrs{
			FnAttrs:     netlink.DevlinkPortFn{State: nl.DEVLINK_PORT_FN_STATE_ACTIVE, HwAddr: mac},
			HwAddrValid: true, StateValid: true,
		}))

	id := function.SubfunctionID(pf, sfnum)
	f.await(t, time.Now(), id, "there, with netdev", func(got function.Function) bool {
		return got.Netdev != ""
	})
	got, _ := f.Get(id)
	if link := linkOf(t, got.Netdev); link.Attrs().HardwareAddr.String() != mac.String() {
		t.Errorf("netdev %s has MAC %s, want %s", got.Netdev, link.Attrs().HardwareAddr, mac)
	}

	parent, _ := f.Get(function.ID{Address: pf})
	want := parent
	want.ID, want.Kind, want.Index, want.NumVFs = id, function.SF, sfnum, 0
	want.VFOffset, want.VFStride, want.TotalVFs = 0, 0, 0
	want.Netdev, want.Driver, want.AuxDevice, want.IOMMUGroup = got.Netdev, got.Driver, got.AuxDevice, ""
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("SF (-want +got):\n%s", diff)
	}
	if !strings.HasPrefix(got.AuxDevice, "mlx5_core.sf.") || got.Driver == "" {
		t.Errorf("auxiliary device %q with driver %q", got.AuxDevice, got.Driver)
	}

	witnessed(t, pf, "driver")
	must.Succeed(t, netlink.DevLinkPortDel("pci", string(pf), port.PortIndex))
	f.gone(t, time.Now(), id)
}

// pod is a network namespace with a Function's netdev.
type pod struct {
	*netns.Namespace
	netdev string
	ip     net.IP
	mac    net.HardwareAddr
}

func newPod(t *testing.T, vf pci.Address, host byte) pod {
	t.Helper()
	// The kernel returns the netdevs of a namespace some time after its end.
	for end := time.Now().Add(patience); card.Netdev(vf) == "" && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	return podOf(t, card.Netdev(vf), host)
}

// podOf returns a pod with the netdev and the address 192.0.2.<host>.
func podOf(t *testing.T, netdev string, host byte) pod {
	t.Helper()
	link := linkOf(t, netdev)
	p := pod{Namespace: netns.New(t), netdev: netdev, mac: link.Attrs().HardwareAddr}
	must.Succeed(t, netlink.LinkSetNsFd(link, p.Fd()))
	inside, err := p.Handle().LinkByName(netdev)
	must.Succeed(t, err)
	must.Succeed(t, p.Handle().LinkSetUp(inside))
	return p.at(t, netdev, fmt.Sprintf("192.0.2.%d", host))
}

// reaches reports whether the other pod answers a ping within the time.
func (p pod) reaches(t *testing.T, other pod, within time.Duration) bool {
	t.Helper()
	from, ok := netip.AddrFromSlice(p.ip.To4())
	to, okToo := netip.AddrFromSlice(other.ip.To4())
	if !ok || !okToo {
		t.Fatalf("%v and %v: must be IPv4 addresses", p.ip, other.ip)
	}

	answered, err := p.Ping(from, to, within)
	must.Succeed(t, err)

	return answered
}

// xpu is the machine's own network namespace with opi-bridge in it.
type xpu struct {
	t             *testing.T // the test at whose end opi-bridge ends
	pf            pci.Address
	state, uplink string
	client        *opi.Client
	stop          func() // ends opi-bridge; may be called twice
}

// start runs opi-bridge until stop is called or the test ends.
func (x *xpu) start() {
	t := x.t
	t.Helper()
	log := testr.New(t)
	ownPF, err := representor.ParseHostPF(string(x.pf) + "=own") // host and xPU are one machine
	must.Succeed(t, err)

	agent, err := service.New(service.Config{
		State: x.state,
		Plane: plane.Config{
			Mode: plane.ModeVLANAware,
			Representors: representor.Config{
				HostPFs: []representor.HostPF{ownPF}, Netdevs: []string{uplinkID},
			},
		},
	}, log)

	must.Succeed(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	server := agent.NewServer()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- agent.Run(ctx) }()
	go func() { ended <- server.Serve(listener) }()
	x.client, err = opi.Dial(opi.Config{Endpoint: listener.Addr().String(), Dialect: evpngw.Dialect(),
		Installation: opitest.Installation})
	must.Succeed(t, err)
	client := x.client
	x.stop = sync.OnceFunc(func() {
		_ = client.Close()
		cancel()
		server.Stop()

		for range 2 {
			if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				t.Errorf("opi-bridge: %v", err)
			}
		}

		if err := agent.Close(); err != nil {
			t.Errorf("opi-bridge: %v", err)
		}
	})

	t.Cleanup(x.stop)
}

func (x *xpu) network(t *testing.T, id string, vlan uint16) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must.Succeed(t, x.client.EnsureNetwork(ctx, opi.Network{ID: id, VLAN: vlan}))
}

func (x *xpu) port(t *testing.T, port opi.Port) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must.Succeed(t, x.client.EnsurePort(ctx, port))
}

func (x *xpu) deletePort(t *testing.T, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	must.Succeed(t, x.client.DeletePort(ctx, id))
}

// await waits until a port is in this state, and returns the time that took and the agent's
// message.
func (x *xpu) await(t *testing.T, id string, want opi.State) (time.Duration, string) {
	t.Helper()
	begin := time.Now()
	for {
		got, err := x.client.GetPort(t.Context(), id)
		must.Succeed(t, err)
		if got.State == want {
			return time.Since(begin).Round(time.Millisecond), got.Detail
		}
		if time.Since(begin) > patience {
			t.Fatalf("port %s is %s (%s), never %s", id, got.State, got.Detail, want)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// master returns the name of the bridge of a netdev, or "" if it has none.
func master(t *testing.T, netdev string) string {
	t.Helper()
	index := linkOf(t, netdev).Attrs().MasterIndex
	if index == 0 {
		return ""
	}
	link, err := netlink.LinkByIndex(index)
	must.Succeed(t, err)
	return link.Attrs().Name
}

// vfID returns the id of a VF's Port. It is all that both sides know about each other, because no
// netdev was given a name.
func vfID(t *testing.T, pf pci.Address, index int) string {
	t.Helper()
	id, err := opi.PortID(function.ID{Address: card.VF(t, pf, index)})
	must.Succeed(t, err)
	return id
}

// forwards adds three VFs to two networks. The VFs of one network reach each other, and the third
// VF is apart until it is moved to their network.
func forwards(t *testing.T, x *xpu, pf pci.Address) {
	var pods []pod
	for i, network := range []string{"net-blue", "net-blue", "net-red"} {
		p := newPod(t, card.VF(t, pf, i), byte(i+1))
		pods = append(pods, p)
		id := vfID(t, pf, i)
		x.port(t, opi.Port{ID: id, MAC: p.mac, Networks: []string{network}})
		t.Cleanup(func() { x.deletePort(t, id) })
		if got := master(t, representorName(t, pf, fmt.Sprintf("pf0vf%d", i))); got != "br-opi" {
			t.Errorf("representor of VF %d is in bridge %q, want br-opi", i, got)
		}
	}

	reach(t, pods[0], pods[1])
	apart(t, pods[0], pods[2])
	x.port(t, opi.Port{ID: vfID(t, pf, 2), MAC: pods[2].mac, Networks: []string{"net-blue"}})
	reach(t, pods[0], pods[2])
	x.deletePort(t, vfID(t, pf, 1))
	apart(t, pods[0], pods[1])
}

// uplinkID is the id of the card's uplink as a port, from opi-bridge's configuration.
const uplinkID = "uplink-p0"

// trunk adds a VF and the uplink to both networks, with tags, and another VF to one of them.
// opi-bridge knows the uplink by the name that the administrator configured.
func trunk(t *testing.T, x *xpu, pf pci.Address) {
	must.Succeed(t, netlink.LinkAddAltName(linkOf(t, x.uplink), uplinkID))
	t.Cleanup(func() {
		must.Succeed(t, netlink.LinkDelAltName(linkOf(t, x.uplink), uplinkID))
		// opi-bridge sets it down with its Port
		must.Succeed(t, netlink.LinkSetUp(linkOf(t, x.uplink)))
	})

	both := []string{"net-blue", "net-red"}
	untagged := newPod(t, card.VF(t, pf, 0), 1)
	tagged := newPod(t, card.VF(t, pf, 1), 2)
	ports := []opi.Port{
		{ID: vfID(t, pf, 0), MAC: untagged.mac, Networks: []string{"net-blue"}},
		{ID: vfID(t, pf, 1), MAC: tagged.mac, Networks: both, Trunk: true},
		{ID: uplinkID, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 0xff}, Networks: both, Trunk: true},
	}

	for _, port := range ports {
		x.port(t, port)
		t.Cleanup(func() { x.deletePort(t, port.ID) })
	}

	wire := capture(t, x.uplink)
	blue, red := tagged.inVLAN(t, 10, "198.18.10.2"), tagged.inVLAN(t, 20, "198.18.20.2")
	reach(t, blue, untagged.at(t, untagged.netdev, "198.18.10.1"))
	apart(t, red, untagged.at(t, untagged.netdev, "198.18.20.1"))

	// Frames to unknown addresses go to the uplink, for example ARP requests.
	for _, test := range []struct {
		from pod
		want map[int]bool
	}{{untagged, map[int]bool{10: true}}, {tagged, map[int]bool{10: true, 20: true}}} {
		if diff := cmp.Diff(test.want, wire.vlans(t, test.from.mac.String())); diff != "" {
			t.Errorf("VLANs of frames from %s on the uplink (-want +got):\n%s", test.from.ip, diff)
		}
	}
}

// inVLAN returns the pod with a VLAN netdev of its own and another address.
func (p pod) inVLAN(t *testing.T, vlan int, ip string) pod {
	t.Helper()
	parent, err := p.Handle().LinkByName(p.netdev)
	must.Succeed(t, err)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = fmt.Sprintf("vlan%d", vlan), parent.Attrs().Index
	link := &netlink.Vlan{LinkAttrs: attrs, VlanId: vlan}
	must.Succeed(t, p.Handle().LinkAdd(link))
	must.Succeed(t, p.Handle().LinkSetUp(link))

	return p.at(t, attrs.Name, ip)
}

// at returns the pod with another address, on one of its netdevs.
func (p pod) at(t *testing.T, netdev, ip string) pod {
	t.Helper()
	link, err := p.Handle().LinkByName(netdev)
	must.Succeed(t, err)
	address, err := netlink.ParseAddr(ip + "/24")
	must.Succeed(t, err)
	must.Succeed(t, p.Handle().AddrAdd(link, address))
	p.ip = address.IP.To4()
	return p
}

// forwardsToSubfunction does the same with an SF as forwards does with VFs.
func forwardsToSubfunction(t *testing.T, x *xpu, f *follower, pf pci.Address) {
	const sfnum = 7
	id, err := opi.PortID(function.SubfunctionID(pf, sfnum))
	must.Succeed(t, err)
	vf := newPod(t, card.VF(t, pf, 0), 1)
	x.port(t, opi.Port{ID: vfID(t, pf, 0), MAC: vf.mac, Networks: []string{"net-blue"}})
	t.Cleanup(func() { x.deletePort(t, vfID(t, pf, 0)) })

	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	defer conn.Close()

	port, err := conn.AddSF(devlink.OfPCI(pf), 0, sfnum)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, conn.DeletePort(devlink.OfPCI(pf), port.Index)) }()

	must.Succeed(t,
		conn.SetFunction(devlink.OfPCI(pf), port.Index, devlink.FunctionChange{Active: new(true)}))
	fn := function.SubfunctionID(pf, sfnum)
	f.await(t, time.Now(), fn, "there, with netdev", func(got function.Function) bool {
		return got.Netdev != ""
	})
	got, _ := f.Get(fn)

	sf := podOf(t, got.Netdev, 2)
	x.port(t, opi.Port{ID: id, MAC: sf.mac, Networks: []string{"net-blue"}})
	defer x.deletePort(t, id)

	reach(t, vf, sf)
}

// startedAgain ends and starts opi-bridge. Netdevs that it found by PCI address must not leave the
// bridge meanwhile.
func startedAgain(t *testing.T, x *xpu, pf pci.Address) {
	a, b := newPod(t, card.VF(t, pf, 0), 1), newPod(t, card.VF(t, pf, 1), 2)
	for i, p := range []pod{a, b} {
		x.port(t, opi.Port{ID: vfID(t, pf, i), MAC: p.mac, Networks: []string{"net-blue"}})
	}

	t.Cleanup(func() { x.deletePort(t, vfID(t, pf, 0)); x.deletePort(t, vfID(t, pf, 1)) })
	reach(t, a, b)
	rep := linkOf(t, representorName(t, pf, "pf0vf0")).Attrs().Index
	updates, end := make(chan netlink.LinkUpdate, 100), make(chan struct{})
	defer close(end)

	must.Succeed(t, netlink.LinkSubscribe(updates, end))
	x.stop()
	reach(t, a, b)
	x.start()
	x.await(t, vfID(t, pf, 0), opi.StateUp)
	reach(t, a, b)

	for {
		select {
		case update := <-updates:
			attrs := update.Attrs()
			if attrs.Index == rep && (attrs.MasterIndex == 0 || attrs.Flags&net.FlagUp == 0) {
				t.Errorf("the representor was out of the bridge or down: %+v", attrs)
			}
		default:
			return
		}
	}
}

// madeAgain removes VFs while they are in pods. The new VFs have the PCI addresses of the old VFs,
// and other representors.
func madeAgain(t *testing.T, x *xpu, pf pci.Address) {
	vfs := card.Number(t, pf, "sriov_numvfs")
	old := []pod{newPod(t, card.VF(t, pf, 0), 1), newPod(t, card.VF(t, pf, 1), 2)}
	var ids []string
	for i, p := range old {
		id := vfID(t, pf, i)
		ids = append(ids, id)
		x.port(t, opi.Port{ID: id, MAC: p.mac, Networks: []string{"net-blue"}})
		t.Cleanup(func() { x.deletePort(t, id) })
	}

	reach(t, old[0], old[1])
	before := linkOf(t, representorName(t, pf, "pf0vf0")).Attrs().Index

	card.SetAttribute(t, pf, "sriov_numvfs", "0")
	took, says := x.await(t, ids[0], opi.StateFailed)
	t.Logf("out of service after %s: %s", took, says)
	if !strings.Contains(says, "vf0 of "+string(pf)) {
		t.Errorf("the agent says %q, want it to say which representor is missing", says)
	}

	card.SetAttribute(t, pf, "sriov_numvfs", fmt.Sprint(vfs))
	for _, id := range ids {
		took, _ := x.await(t, id, opi.StateUp)
		t.Logf("%s is in service %s after the VFs were made", id, took)
	}

	if now := linkOf(t, representorName(t, pf, "pf0vf0")).Attrs().Index; now == before {
		t.Errorf("the representor has ifindex %d before and after: it was not made anew", now)
	}

	var made []pod
	for i := range ids {
		p := newPod(t, card.VF(t, pf, i), byte(i+1))
		made = append(made, p)
		x.port(t, opi.Port{ID: ids[i], MAC: p.mac, Networks: []string{"net-blue"}})
	}

	reach(t, made[0], made[1])
}

// wire records the frames that a netdev sends.
type wire struct {
	fd   int
	seen map[string]map[int]bool // VLANs by source MAC; 0 means untagged
}

func capture(t *testing.T, netdev string) *wire {
	t.Helper()
	const networkOrder = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL&0xff<<8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
		networkOrder)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })

	must.Succeed(t,
		unix.Bind(fd, &unix.SockaddrLinklayer{
			Protocol: networkOrder, Ifindex: linkOf(t, netdev).Attrs().Index,
		}))

	return &wire{fd: fd, seen: map[string]map[int]bool{}}
}

// vlans returns the VLANs in which frames from this MAC have been seen.
func (w *wire) vlans(t *testing.T, mac string) map[int]bool {
	t.Helper()
	frame := make([]byte, 2000)
	for {
		n, err := unix.Read(w.fd, frame)
		if errors.Is(err, unix.EAGAIN) {
			return w.seen[mac]
		}

		must.Succeed(t, err)
		if n < 18 {
			continue
		}

		vlan := 0
		if binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_8021Q {
			vlan = int(binary.BigEndian.Uint16(frame[14:]) & 0xfff)
		}

		source := net.HardwareAddr(frame[6:12]).String()
		if w.seen[source] == nil {
			w.seen[source] = map[int]bool{}
		}

		w.seen[source][vlan] = true
	}
}
