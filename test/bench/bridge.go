// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

const (
	bridgeAddress   = "127.0.0.1:50151"
	portsOfANetwork = 100
)

// bridgeLab is opi-bridge in a separate network namespace, with an uplink and a netdev as the
// representor of each port.
type bridgeLab struct {
	*bench
	mode     plane.Mode
	ns       *netns.Namespace
	handle   *netlink.Handle
	program  *process
	conn     *grpc.ClientConn
	networks evpn.LogicalBridgeServiceClient
	ports    evpn.BridgePortServiceClient
	health   healthpb.HealthClient

	synced *os.File     // for the reference measurement
	bare   netlink.Link // a bridge for the reference measurement
	size   int          // number of existing ports
}

// measureBridge measures opi-bridge's calls with a growing number of ports and networks, in each
// mode of the data plane.
func measureBridge(ctx context.Context, b *bench) (all []Measurement, err error) {
	for _, mode := range []plane.Mode{
		plane.ModeBridgePerNetwork, plane.ModeVLANAware,
	} {
		rows, err := b.measurePlane(ctx, mode)
		if errors.Is(err, errNoVLANFiltering) {
			fmt.Fprintf(os.Stderr, "%s is measured in a guest only, by make test-qemu-full: %v\n",
				mode, err)
			continue
		}

		if err != nil {
			return nil, fmt.Errorf("%s: %w", mode, err)
		}

		for _, row := range rows {
			row.What = fmt.Sprintf("%s: %s", mode, row.What)
			all = append(all, row)
		}
	}
	return all, nil
}

func (b *bench) measurePlane(
	ctx context.Context, mode plane.Mode,
) (all []Measurement, err error) {
	l, err := b.newBridgeLab(ctx, mode)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()

	sizes, networks := []int{10, 1000, 4000}, 1000
	if b.quick {
		sizes, networks = []int{2, 4}, 4
	}

	var first, last []float64
	for _, size := range sizes {
		if err := l.grow(ctx, size); err != nil {
			return nil, err
		}

		rows, err := l.measurePorts(ctx)
		if err != nil {
			return nil, err
		}

		if all, last = append(all, rows...), rows[0].Samples; first == nil {
			first = last
		}

		if size == sizes[1] {
			rows, err := l.measureRestart(ctx)
			if err != nil {
				return nil, err
			}
			all = append(all, rows...)
		}
	}

	all = append(all, Measurement{
		What: fmt.Sprintf("port up, %d there", l.size), Unit: Seconds, Samples: last,
		Reference: fmt.Sprintf("with %d there", sizes[0]), ReferenceSamples: first,
		Goal: atMostTimes(1.2),
	})

	network, err := l.measureNetworks(ctx, networks)
	return append(all, network), err
}

// errNoVLANFiltering is why a mode of the data plane cannot be measured.
var errNoVLANFiltering = errors.New("the kernel's bridges cannot filter VLANs")

// newBridge creates a bridge of the lab like the data plane's.
func (l *bridgeLab) newBridge(name string) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	link := &netlink.Bridge{LinkAttrs: attrs}
	if l.filtersVLANs() {
		link.VlanFiltering, link.VlanDefaultPVID = new(true), new(uint16(0))
	}

	err := l.handle.LinkAdd(link)
	if errors.Is(err, unix.EOPNOTSUPP) && l.filtersVLANs() {
		return nil, errNoVLANFiltering
	}
	if err != nil {
		return nil, fmt.Errorf("bridge %s: %w", name, err)
	}

	made, err := l.handle.LinkByName(name)
	if err != nil {
		return nil, err
	}
	if is := made.(*netlink.Bridge).VlanFiltering; l.filtersVLANs() && (is == nil || !*is) {
		return nil, errNoVLANFiltering
	}

	return made, l.handle.LinkSetUp(made)
}

func (b *bench) newBridgeLab(
	ctx context.Context, mode plane.Mode,
) (_ *bridgeLab, err error) {
	l := &bridgeLab{bench: b, mode: mode}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()

	if l.synced, err = os.Create(filepath.Join(b.dir, string(mode)+"-synced")); err != nil {
		return nil, err
	}
	if l.ns, err = netns.Make(filepath.Join(b.dir, string(mode))); err != nil {
		return nil, err
	}

	l.handle = l.ns.Handle()
	if l.bare, err = l.newBridge("br-bare"); err != nil {
		return nil, err
	}

	for _, name := range []string{"p0", "bare"} {
		if _, err := l.representor(name); err != nil {
			return nil, err
		}
	}

	uplink, err := l.handle.LinkByName("p0")
	if err != nil {
		return nil, err
	}

	if err := l.handle.AddrAdd(uplink,
		&netlink.Addr{IPNet: &net.IPNet{
			IP: net.IPv4(198, 51, 100, 1), Mask: net.CIDRMask(24, 32),
		}}); err != nil {
		return nil, err
	}

	if err := l.handle.LinkSetUp(uplink); err != nil {
		return nil, err
	}

	l.conn, err = grpc.NewClient("passthrough:///"+bridgeAddress,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: time.Millisecond, Multiplier: 1, MaxDelay: time.Millisecond,
			}, MinConnectTimeout: time.Second,
		}),
		grpc.WithContextDialer(func(
			ctx context.Context, address string,
		) (conn net.Conn, err error) {
			err = l.ns.Do(func() error {
				conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", address)
				return err
			})
			return conn, err
		}))

	if err != nil {
		return nil, err
	}

	l.networks, l.ports = evpn.NewLogicalBridgeServiceClient(
		l.conn,
	), evpn.NewBridgePortServiceClient(l.conn)
	l.health = healthpb.NewHealthClient(l.conn)
	_, err = l.serve(ctx)

	return l, err
}

func (l *bridgeLab) close() (err error) {
	if l.program != nil {
		err = l.program.end()
	}

	if l.conn != nil {
		err = errors.Join(err, l.conn.Close())
	}

	if l.ns != nil {
		err = errors.Join(err, l.ns.Close())
	}

	if l.synced != nil {
		err = errors.Join(err, l.synced.Close())
	}

	return err
}

// serve starts the program, and returns the time until it serves.
func (l *bridgeLab) serve(ctx context.Context) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()

	begin := time.Now()
	err = l.ns.Do(func() (err error) {
		l.program, err = l.start(l.dir, "opi-bridge", "--listen="+bridgeAddress, "--uplink=p0",
			"--data-plane="+string(l.mode),
			"--representor=rep-*", "--state="+filepath.Join(l.dir, string(l.mode)+".db"))
		return err
	})

	if err != nil {
		return 0, err
	}

	for {
		reply, err := l.health.Check(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
		if err == nil && reply.GetStatus() == healthpb.HealthCheckResponse_SERVING {
			return time.Since(begin), nil
		}
		if ctx.Err() != nil {
			return 0, fmt.Errorf("opi-bridge does not serve: %w\n%s", err, l.program.lastWords())
		}
	}
}

// representor creates a netdev, which is one end of a veth pair.
func (l *bridgeLab) representor(name string) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: "of-" + name}
	if err := l.handle.LinkAdd(link); err != nil {
		return nil, fmt.Errorf("netdev %s: %w", name, err)
	}

	peer, err := l.handle.LinkByName(link.PeerName)
	if err == nil {
		err = l.handle.LinkSetUp(peer)
	}

	return link, err
}

func representorName(i int) string { return fmt.Sprintf("rep-%d", i) }

func benchNetwork(i int) string { return fmt.Sprintf("net-%d", i) }

// grow creates ports until there are size, and the representor of one more.
func (l *bridgeLab) grow(ctx context.Context, size int) error {
	for i := l.size; i <= size; i++ {
		if _, err := l.handle.LinkByName(representorName(i)); err == nil {
			continue // of the measured port
		}
		if _, err := l.representor(representorName(i)); err != nil {
			return err
		}
	}

	for ; l.size < size; l.size++ {
		if l.size%portsOfANetwork == 0 {
			if err := l.createNetwork(ctx, benchNetwork(l.size/portsOfANetwork),
				uint32(1+l.size/portsOfANetwork), nil); err != nil {
				return err
			}
		}
		if err := l.createPort(ctx, l.size); err != nil {
			return err
		}
	}

	return nil
}

func (l *bridgeLab) createNetwork(ctx context.Context, id string, vlan uint32, vni *uint32) error {
	got, err := l.networks.CreateLogicalBridge(ctx, &evpn.CreateLogicalBridgeRequest{
		LogicalBridgeId: id,
		LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: vlan, Vni: vni}},
	})
	if err == nil && got.GetStatus().GetOperStatus() != evpn.LBOperStatus_LB_OPER_STATUS_UP {
		err = fmt.Errorf("network %s is not up: %s", id, got.GetStatus())
	}
	return err
}

func (l *bridgeLab) createPort(ctx context.Context, i int) error {
	got, err := l.ports.CreateBridgePort(ctx, &evpn.CreateBridgePortRequest{
		BridgePortId: representorName(i), BridgePort: &evpn.BridgePort{Spec: &evpn.BridgePortSpec{
			MacAddress: portAddress(i), Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
			LogicalBridges: []string{bridgeName + benchNetwork(min(i, l.size-1)/portsOfANetwork)},
		}},
	})

	if err == nil && got.GetStatus().GetOperStatus() != evpn.BPOperStatus_BP_OPER_STATUS_UP {
		err = fmt.Errorf("port %s is not up: %s", representorName(i), got.GetStatus())
	}
	return err
}

// end returns the pod's end of a port.
func (l *bridgeLab) end(port int) netns.End {
	return netns.End{NetNS: l.ns, Netdev: "of-" + representorName(port), MAC: portAddress(port)}
}

func portAddress(i int) net.HardwareAddr {
	return net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)}
}

// measurePorts creates and removes one more port, alternating with the same by bare netlink.
func (l *bridgeLab) measurePorts(ctx context.Context) ([]Measurement, error) {
	what := func(call string) string { return fmt.Sprintf("%s, %d there", call, l.size) }
	up := Measurement{What: what("port up"), Unit: Seconds, Reference: "bare netlink, synced",
		Goal: atMostTimes(2)}
	get := Measurement{What: what("get"), Unit: Seconds, Reference: "empty call"}
	list := Measurement{What: what("list of all"), Unit: Seconds}
	down := Measurement{What: what("port gone"), Unit: Seconds, Reference: "bare netlink, synced"}
	bare, err := l.newBarePort()
	if err != nil {
		return nil, err
	}

	extra := l.size
	name := "//network.opiproject.org/ports/" + representorName(extra)
	for round := range l.runs(100) + l.warmUp() {
		var samples [6]float64
		for i, f := range []func() error{
			func() error { return l.createPort(ctx, extra) },
			func() error {
				_, err := l.ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: name})
				return err
			},
			func() error {
				_, err := l.health.Check(ctx, &healthpb.HealthCheckRequest{})
				return err
			},
			func() error {
				_, err := l.ports.DeleteBridgePort(ctx, &evpn.DeleteBridgePortRequest{Name: name})
				return err
			},
			bare.up, bare.down,
		} {
			took, err := timed(f)
			if err != nil {
				return nil, err
			}
			samples[i] = took.Seconds()
		}

		if round < l.warmUp() {
			continue
		}

		up.Samples, up.ReferenceSamples = append(up.Samples,
			samples[0]), append(up.ReferenceSamples, samples[4])
		get.Samples, get.ReferenceSamples = append(get.Samples,
			samples[1]), append(get.ReferenceSamples, samples[2])
		down.Samples, down.ReferenceSamples = append(down.Samples,
			samples[3]), append(down.ReferenceSamples, samples[5])
	}

	for range l.runs(10) {
		took, err := timed(func() error { return l.listPorts(ctx) })
		if err != nil {
			return nil, err
		}
		list.Samples = append(list.Samples, took.Seconds())
	}

	return []Measurement{up, get, list, down}, nil
}

func (l *bridgeLab) listPorts(ctx context.Context) error {
	n := 0
	for token := ""; ; {
		page, err := l.ports.ListBridgePorts(ctx,
			&evpn.ListBridgePortsRequest{PageSize: 250, PageToken: token})
		if err != nil {
			return err
		}

		n += len(page.GetBridgePorts())
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}

	if n != l.size {
		return fmt.Errorf("listed %d ports, want %d", n, l.size)
	}

	return nil
}

// measureRestart restarts the program, alternately after SIGTERM and SIGKILL, while one port sends
// to another.
func (l *bridgeLab) measureRestart(ctx context.Context) ([]Measurement, error) {
	took := Measurement{What: fmt.Sprintf("restart until it serves, %d there", l.size),
		Unit: Seconds, Goal: lessThan(2)}
	lost := Measurement{What: "frames lost over a restart", Unit: Count, Goal: atMost(0)}
	for range l.runs(6) {
		traffic, err := netns.Send(l.end(0), l.end(1))
		if err != nil {
			return nil, err
		}

		if len(took.Samples)%2 == 1 {
			err = l.program.cmd.Process.Kill()
		}

		_ = l.program.end() // a killed program returns an error
		if err != nil {
			return nil, err
		}

		serving, err := l.serve(ctx)
		if err != nil {
			return nil, err
		}

		_, missing, err := traffic.Stop()
		if err != nil {
			return nil, err
		}

		took.Samples, lost.Samples = append(took.Samples, serving.Seconds()), append(lost.Samples,
			float64(missing))
	}

	return []Measurement{took, lost}, nil
}

// measureNetworks creates networks with a VNI, alternating with the netdevs of such networks by
// bare netlink.
func (l *bridgeLab) measureNetworks(ctx context.Context, n int) (Measurement, error) {
	m := Measurement{
		What: fmt.Sprintf("network with VNI up, %d there", n), Unit: Seconds,
		Reference: "bare netlink, synced", Goal: atMostTimes(2),
	}

	uplink, err := l.handle.LinkByName("p0")
	if err != nil {
		return m, err
	}

	last := n - l.runs(50)
	for i := range n {
		id := uint32(2000 + i)
		took, err := timed(func() error {
			return l.createNetwork(ctx, fmt.Sprintf("vni-%d", i), id, proto.Uint32(id))
		})
		if err != nil {
			return m, err
		}
		if i < last {
			continue
		}

		reference, err := timed(func() error { return l.bareNetwork(uplink, i) })
		if err != nil {
			return m, err
		}

		m.Samples, m.ReferenceSamples = append(m.Samples,
			took.Seconds()), append(m.ReferenceSamples, reference.Seconds())
	}

	return m, nil
}

// bareNetwork creates the netdevs of a network: a VXLAN port, and in one mode a bridge.
func (l *bridgeLab) bareNetwork(uplink netlink.Link, i int) (err error) {
	bridge := l.bare
	if !l.filtersVLANs() {
		if bridge, err = l.newBridge(fmt.Sprintf("bare-%d", i)); err != nil {
			return err
		}
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = fmt.Sprintf("barex-%d", i), bridge.Attrs().Index
	vni := 100_000 + i
	vxlan := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: vni, VtepDevIndex: uplink.Attrs().Index, Port: 4789,
		Learning: true,
		Group:    net.IPv4(239, byte(vni>>16), byte(vni>>8), byte(vni)).To4(),
	}

	if err := errors.Join(l.handle.LinkAdd(vxlan), l.handle.LinkSetUp(vxlan)); err != nil {
		return err
	}

	return errors.Join(l.bareVLAN(vxlan), l.sync())
}

func (l *bridgeLab) filtersVLANs() bool { return l.mode == plane.ModeVLANAware }

// bareVLAN adds a port of the bare bridge to a VLAN, if the bridge has VLANs.
func (l *bridgeLab) bareVLAN(link netlink.Link) error {
	if !l.filtersVLANs() {
		return nil
	}
	return l.handle.BridgeVlanAdd(link, bareVLAN, true, true, false, true)
}

const bareVLAN = 7

// sync writes as much as a change of the state does: bbolt syncs the data, and then the meta page.
func (l *bridgeLab) sync() error {
	_, err := writeAndSync(l.synced, 2)
	return err
}

// barePort is a port of a bridge that is created with only the necessary messages.
type barePort struct {
	*bridgeLab
	link  netlink.Link
	entry *netlink.Neigh
}

func (l *bridgeLab) newBarePort() (*barePort, error) {
	link, err := l.handle.LinkByName("bare")
	if err != nil {
		return nil, err
	}

	p := &barePort{bridgeLab: l, link: link, entry: &netlink.Neigh{
		LinkIndex: link.Attrs().Index, Family: unix.AF_BRIDGE,
		Flags: netlink.NTF_MASTER | netlink.NTF_STICKY,
		State: netlink.NUD_NOARP, HardwareAddr: portMAC,
	}}

	if l.filtersVLANs() {
		p.entry.Vlan = bareVLAN
	}

	return p, nil
}

func (p *barePort) up() error {
	if err := errors.Join(p.handle.LinkSetMaster(p.link, p.bare), p.bareVLAN(p.link)); err != nil {
		return err
	}
	return errors.Join(p.handle.LinkSetUp(p.link), p.handle.NeighSet(p.entry), p.sync())
}

func (p *barePort) down() error {
	// the state is written twice
	return errors.Join(p.handle.LinkSetDown(p.link), p.handle.LinkSetNoMaster(p.link),
		p.sync(), p.sync())
}
