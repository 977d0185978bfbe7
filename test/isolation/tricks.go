// SPDX-License-Identifier: Apache-2.0

package isolation

import (
	"errors"
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

// tricks are what a tenant with CAP_NET_ADMIN and CAP_BPF leaves on its interface for the next
// tenant.
var tricks = []struct {
	name string
	play func(t *testing.T, p *tenant)
}{
	{"nothing", func(*testing.T, *tenant) {}},
	{"macvlan moved to the host", func(t *testing.T, p *tenant) { p.stack(t, macvlan, p.host) }},
	{"macvlan of an accomplice", func(t *testing.T, p *tenant) {
		p.stack(t, passthru, p.accomplice)
	}},
	{"macvlan in a hidden namespace", func(t *testing.T, p *tenant) {
		p.stack(t, macvlan, p.hidden)
	}},
	{"macvlan left behind", func(t *testing.T, p *tenant) { p.stack(t, macvlan, p.Namespace) }},
	{"macvtap of an accomplice", func(t *testing.T, p *tenant) {
		p.stack(t, macvtap, p.accomplice)
	}},
	{"ipvlan of an accomplice", func(t *testing.T, p *tenant) { p.stack(t, ipvlan, p.accomplice) }},
	{"ipvlan in a hidden namespace", func(t *testing.T, p *tenant) {
		p.stack(t, ipvlan, p.hidden)
	}},
	{"VLAN of an accomplice", func(t *testing.T, p *tenant) { p.stack(t, vlan, p.accomplice) }},
	{"VLAN in a hidden namespace", func(t *testing.T, p *tenant) { p.stack(t, vlan, p.hidden) }},
	{"promiscuous", func(t *testing.T, p *tenant) {
		must.Succeed(t,
			p.Handle().SetPromiscOn(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: p.index}}))
	}},
	{"static neighbour", neighbour},
	{"redirect", redirect},
	{"mirror", mirror},
	{"tcx", func(t *testing.T, p *tenant) {
		must.Succeed(t, p.Do(func() error {
			return dropTCX(t,
				p.index)
		}))
	}},
	{"XDP by link", func(t *testing.T, p *tenant) {
		must.Succeed(t, p.Do(func() error { return dropXDP(t, p.index) }))
	}},
	{"XDP by netlink", func(t *testing.T, p *tenant) {
		const drop = 1 // XDP_DROP
		l := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: p.index}}
		must.Succeed(t, p.Do(func() error {
			return netlink.LinkSetXdpFdWithFlags(l, dropping(t, ebpf.XDP, drop).FD(),
				unix.XDP_FLAGS_SKB_MODE)
		}))
	}},
}

func macvlan(attrs netlink.LinkAttrs) netlink.Link {
	return &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}
}

func passthru(attrs netlink.LinkAttrs) netlink.Link {
	return &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PASSTHRU}
}

func macvtap(attrs netlink.LinkAttrs) netlink.Link {
	return &netlink.Macvtap{
		Macvlan: netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE},
	}
}

func ipvlan(attrs netlink.LinkAttrs) netlink.Link {
	return &netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L2}
}

func vlan(attrs netlink.LinkAttrs) netlink.Link {
	return &netlink.Vlan{LinkAttrs: attrs, VlanId: 7, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
}

// stack makes a netdev on top of net1 in another namespace, and sets it up.
func (p *tenant) stack(
	t *testing.T, kind func(netlink.LinkAttrs) netlink.Link, to *netns.Namespace,
) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.Namespace = "evil0", p.index, netlink.NsFd(to.Fd())
	made := kind(attrs)
	unlessUnknown(t, made.Type(), p.Handle().LinkAdd(made))

	l, err := to.Handle().LinkByName("evil0")
	must.Succeed(t, err)
	if got := l.Attrs().ParentIndex; got != p.index {
		t.Fatalf("evil0 is on %d, want %d", got, p.index)
	}

	must.Succeed(t, to.Handle().LinkSetUp(l))
	must.Succeed(t, to.Handle().SetPromiscOn(l))
}

// unlessUnknown skips a trick for which the kernel lacks a module. The guests of test/qemu have all
// modules, and a skipped test is an error there.
func unlessUnknown(t *testing.T, module string, err error) {
	t.Helper()
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		t.Skipf("the kernel has no %s; the guests of test/qemu have it: %v", module, err)
	}
	must.Succeed(t, err)
}

// mirror sends the frames that the accomplice sends on another netdev out of the interface.
func mirror(t *testing.T, p *tenant) {
	t.Helper()
	netns.Connect(t, p.Namespace, "out0", p.accomplice, "in0")
	out, err := p.Handle().LinkByName("out0")
	must.Succeed(t, err)
	setUp(t, p.accomplice)

	ingress := netlink.QdiscAttrs{
		LinkIndex: out.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0),
		Parent: netlink.HANDLE_INGRESS,
	}

	unlessUnknown(t, "sch_ingress", p.Handle().QdiscAdd(&netlink.Ingress{QdiscAttrs: ingress}))
	unlessUnknown(t, "cls_matchall or act_mirred", p.Handle().FilterAdd(&netlink.MatchAll{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: out.Attrs().Index, Parent: ingress.Handle, Priority: 1,
			Protocol: unix.ETH_P_ALL,
		},
		Actions: []netlink.Action{netlink.NewMirredAction(p.index)},
	}))
}

// neighbour answers for an address that the next tenant may ask for.
func neighbour(t *testing.T, p *tenant) {
	t.Helper()
	must.Succeed(t, p.Handle().NeighSet(&netlink.Neigh{
		LinkIndex: p.index, State: netlink.NUD_PERMANENT, IP: net.IPv4(192, 0, 2, 1),
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
	}))
}

// redirect sends the frames that the interface receives to the accomplice. The program stays when
// its process ends.
func redirect(t *testing.T, p *tenant) {
	t.Helper()
	netns.Connect(t, p.Namespace, "out0", p.accomplice, "in0")
	out, err := p.Handle().LinkByName("out0")
	must.Succeed(t, err)
	setUp(t, p.accomplice)

	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, int32(out.Attrs().Index)), asm.Mov.Imm(asm.R2, 0),
			asm.FnRedirect.Call(), asm.Return(),
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

// dropping loads a program that returns the verdict for each packet.
func dropping(t *testing.T, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: kind, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R0, verdict), asm.Return(),
		},
	})

	must.Succeed(t, err)
	t.Cleanup(func() { _ = p.Close() })

	return p
}

// dropTCX attaches a program without a link, so that the program stays when its process ends.
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
