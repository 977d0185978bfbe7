package isolation

import (
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// tricks are what a tenant with CAP_NET_ADMIN and CAP_BPF leaves on its interface for the next one.
var tricks = []struct {
	name string
	play func(t *testing.T, p *tenant)
}{
	{"nothing", func(*testing.T, *tenant) {}},
	{"macvlan moved to the host", func(t *testing.T, p *tenant) { p.macvlan(t, netlink.MACVLAN_MODE_BRIDGE, p.host) }},
	{"macvlan of an accomplice", func(t *testing.T, p *tenant) { p.macvlan(t, netlink.MACVLAN_MODE_PASSTHRU, p.accomplice) }},
	{"macvlan in a hidden namespace", func(t *testing.T, p *tenant) { p.macvlan(t, netlink.MACVLAN_MODE_BRIDGE, p.hidden) }},
	{"macvlan left behind", func(t *testing.T, p *tenant) { p.macvlan(t, netlink.MACVLAN_MODE_BRIDGE, p.Namespace) }},
	{"promiscuous", func(t *testing.T, p *tenant) {
		must.Succeed(t, p.Handle().SetPromiscOn(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: p.index}}))
	}},
	{"static neighbour", neighbour},
	{"redirect", redirect},
	{"tcx", func(t *testing.T, p *tenant) { must.Succeed(t, p.Do(func() error { return dropTCX(t, p.index) })) }},
	{"XDP by link", func(t *testing.T, p *tenant) { must.Succeed(t, p.Do(func() error { return dropXDP(t, p.index) })) }},
	{"XDP by netlink", func(t *testing.T, p *tenant) {
		const drop = 1 // XDP_DROP
		l := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: p.index}}
		must.Succeed(t, p.Do(func() error {
			return netlink.LinkSetXdpFdWithFlags(l, dropping(t, ebpf.XDP, drop).FD(), unix.XDP_FLAGS_SKB_MODE)
		}))
	}},
}

// neighbour answers for an address that the next tenant may ask for.
func neighbour(t *testing.T, p *tenant) {
	t.Helper()
	must.Succeed(t, p.Handle().NeighSet(&netlink.Neigh{
		LinkIndex: p.index, State: netlink.NUD_PERMANENT, IP: net.IPv4(192, 0, 2, 1),
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
	}))
}

// redirect sends what the interface receives to the accomplice. The program stays when its process ends.
func redirect(t *testing.T, p *tenant) {
	t.Helper()
	netns.Connect(t, p.Namespace, "out0", p.accomplice, "in0")
	out, err := p.Handle().LinkByName("out0")
	must.Succeed(t, err)
	setUp(t, p.accomplice)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, int32(out.Attrs().Index)), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return(),
		},
	})
	must.Succeed(t, err)
	defer program.Close()
	must.Succeed(t, p.Do(func() error {
		return link.RawAttachProgram(link.RawAttachProgramOptions{
			Target: p.index, Program: program, Attach: ebpf.AttachTCXIngress,
		})
	}))
}

// dropping is a program with the verdict for each packet.
func dropping(t *testing.T, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	})
	must.Succeed(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// dropTCX attaches a program without a link, which stays when its process ends.
func dropTCX(t *testing.T, index int) error {
	const drop = 2 // TCX_DROP
	return link.RawAttachProgram(link.RawAttachProgramOptions{
		Target: index, Program: dropping(t, ebpf.SchedCLS, drop), Attach: ebpf.AttachTCXIngress,
	})
}

// dropXDP attaches a program by a link, which the tenant holds.
func dropXDP(t *testing.T, index int) error {
	const drop = 1 // XDP_DROP
	l, err := link.AttachXDP(link.XDPOptions{
		Interface: index, Program: dropping(t, ebpf.XDP, drop), Flags: link.XDPGenericMode,
	})
	if err == nil {
		t.Cleanup(func() { _ = l.Close() })
	}
	return err
}
