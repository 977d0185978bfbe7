package hardware

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"google.golang.org/grpc"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opibridge"
	"github.com/opiproject/xpu-device-plugin/pkg/pci"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestSwitchdev takes a card through what a DPU's eswitch does: the mode, representors, a subfunction, and traffic that
// opi-bridge forwards between representors. Here one machine is the host and the xPU.
func TestSwitchdev(t *testing.T) {
	inGuest(t, "simnic")
	pf := physicalFunctions(t)[0]
	f := follow(t)
	legacy := f.Snapshot()
	uplink := netdev(pf)
	card, err := netlink.DevLinkGetDeviceByName("pci", string(pf))
	done(t, err)
	done(t, netlink.DevLinkSetEswitchMode(card, "switchdev"))

	t.Run("Functions are the same in both eswitch modes", func(t *testing.T) {
		for i := range number(t, pf, "sriov_numvfs") {
			representor(t, pf, fmt.Sprintf("pf0vf%d", i))
		}
		begin := time.Now()
		f.until(t, begin, pf, "its netdev is the uplink", func(got inventory.Function) bool {
			return got.Netdev == uplink && got.PFName == uplink
		})
		got, err := inventory.Read(inventory.Options{SysRoot: "/sys", Log: testr.New(t)})
		done(t, err)
		if diff := cmp.Diff(legacy, got); diff != "" {
			t.Errorf("(-legacy +switchdev):\n%s", diff)
		}
	})

	t.Run("subfunction comes and goes", func(t *testing.T) { subfunctionComesAndGoes(t, f, pf) })

	t.Run("opi-bridge forwards between representors", func(t *testing.T) { forwards(t, pf) })
}

// representor is the name of the netdev on the PF that stands for a function of the eswitch.
func representor(t *testing.T, pf pci.Address, portName string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(devices, string(pf), "net/*"))
	done(t, err)
	var seen []string
	for _, dir := range found {
		content, _ := os.ReadFile(filepath.Join(dir, "phys_port_name")) // EOPNOTSUPP where there is none
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
	done(t, err)
	representor(t, pf, "pf0sf88")
	mac := net.HardwareAddr{2, 0, 0, 0, 0, sfnum}
	done(t, netlink.DevlinkPortFnSet("pci", string(pf), port.PortIndex, netlink.DevlinkPortFnSetAttrs{
		FnAttrs:     netlink.DevlinkPortFn{State: nl.DEVLINK_PORT_FN_STATE_ACTIVE, HwAddr: mac},
		HwAddrValid: true, StateValid: true,
	}))
	id := inventory.SubfunctionID(pf, sfnum)
	f.await(t, time.Now(), id, "there, with netdev", func(got inventory.Function) bool { return got.Netdev != "" })
	got, _ := f.Get(id)
	if link := linkOf(t, got.Netdev); link.Attrs().HardwareAddr.String() != mac.String() {
		t.Errorf("netdev %s has MAC %s, want %s", got.Netdev, link.Attrs().HardwareAddr, mac)
	}
	parent, _ := f.Get(inventory.ID{Address: pf})
	want := parent
	want.ID, want.Kind, want.Index, want.NumVFs = id, inventory.SF, sfnum, 0
	want.Netdev, want.Driver, want.AuxDevice, want.IOMMUGroup = got.Netdev, got.Driver, got.AuxDevice, ""
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("SF (-want +got):\n%s", diff)
	}
	if !strings.HasPrefix(got.AuxDevice, "mlx5_core.sf.") || got.Driver == "" {
		t.Errorf("auxiliary device %q with driver %q", got.AuxDevice, got.Driver)
	}
	done(t, netlink.DevLinkPortDel("pci", string(pf), port.PortIndex))
	f.gone(t, time.Now(), id)
}

// pod has a VF's netdev as eth0.
type pod struct {
	*netns.Namespace
	ip  net.IP
	mac net.HardwareAddr
}

func newPod(t *testing.T, vf pci.Address, host byte) pod {
	t.Helper()
	p := pod{Namespace: netns.New(t), ip: net.IPv4(192, 0, 2, host).To4()}
	link := linkOf(t, netdev(vf))
	p.mac = link.Attrs().HardwareAddr
	done(t, netlink.LinkSetNsFd(link, p.Fd()))
	inside, err := p.Handle().LinkByName(link.Attrs().Name)
	done(t, err)
	address, err := netlink.ParseAddr(p.ip.String() + "/24")
	done(t, err)
	done(t, p.Handle().AddrAdd(inside, address))
	done(t, p.Handle().LinkSetUp(inside))
	return p
}

// reaches tells whether the other pod answers one of a few ICMP echo requests.
func (p pod) reaches(t *testing.T, other pod, within time.Duration) bool {
	t.Helper()
	var conn *icmp.PacketConn
	done(t, p.Do(func() (err error) {
		conn, err = icmp.ListenPacket("ip4:icmp", p.ip.String())
		return err
	}))
	defer conn.Close()
	buffer := make([]byte, 1500)
	for end := time.Now().Add(within); time.Now().Before(end); {
		request := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: int(p.ip[3])}}
		content, err := request.Marshal(nil)
		done(t, err)
		// Sending fails as long as the other's MAC is unknown.
		_, _ = conn.WriteTo(content, &net.IPAddr{IP: other.ip})
		done(t, conn.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
		n, from, err := conn.ReadFrom(buffer)
		if err != nil || from.String() != other.ip.String() {
			continue
		}
		if reply, err := icmp.ParseMessage(1, buffer[:n]); err == nil && reply.Type == ipv4.ICMPTypeEchoReply {
			return true
		}
	}
	return false
}

// bridge runs opi-bridge in the machine's own network namespace, and returns a client of it.
func bridge(t *testing.T) *opi.Client {
	t.Helper()
	log := testr.New(t)
	agent, err := opibridge.New(opibridge.Config{
		State: filepath.Join(t.TempDir(), "state.db"), DataPlane: opibridge.DataPlaneVLANAware,
	}, log)
	done(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	done(t, err)
	server := opibridge.NewServer(opibridge.NewMetrics(agent), log)
	agent.Register(server)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- agent.Run(ctx) }()
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() {
		cancel()
		server.Stop()
		for range 2 {
			if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				t.Errorf("opi-bridge: %v", err)
			}
		}
		done(t, agent.Close())
	})
	client, err := opi.Dial(opi.Config{Endpoint: listener.Addr().String()})
	done(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// forwards joins three VFs to two networks: those of one network reach each other, and the third is apart until it is
// moved to the same network.
func forwards(t *testing.T, pf pci.Address) {
	client := bridge(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	done(t, client.EnsureNetwork(ctx, opi.Network{ID: "net-blue", VLAN: 10}))
	done(t, client.EnsureNetwork(ctx, opi.Network{ID: "net-red", VLAN: 20}))
	var pods []pod
	for i, network := range []string{"net-blue", "net-blue", "net-red"} {
		vf := virtualFunction(t, pf, i)
		p := newPod(t, vf, byte(i+1))
		pods = append(pods, p)
		id := "vf-" + vf.DeviceName()
		// The administrator's part: the representor is known to opi-bridge by the Port's id.
		done(t, netlink.LinkAddAltName(linkOf(t, representor(t, pf, fmt.Sprintf("pf0vf%d", i))), id))
		done(t, client.EnsurePort(ctx, opi.Port{ID: id, MAC: p.mac, Networks: []string{network}}))
	}
	if !pods[0].reaches(t, pods[1], patience) {
		t.Errorf("two VFs of one network do not reach each other")
	}
	if pods[0].reaches(t, pods[2], time.Second) {
		t.Errorf("a VF reaches one of another network")
	}
	moved := opi.Port{ID: "vf-" + virtualFunction(t, pf, 2).DeviceName(), MAC: pods[2].mac, Networks: []string{"net-blue"}}
	done(t, client.EnsurePort(ctx, moved))
	if !pods[0].reaches(t, pods[2], patience) {
		t.Errorf("a VF does not reach one that was moved to its network")
	}
	done(t, client.DeletePort(ctx, "vf-"+virtualFunction(t, pf, 1).DeviceName()))
	if pods[0].reaches(t, pods[1], time.Second) {
		t.Errorf("a VF reaches one whose Port is gone")
	}
}
