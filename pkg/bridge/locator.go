package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// locator finds representors of Functions by the PCI address that a port's id tells: the devlink port at the Function's
// place, or else the netdev whose phys_port_name says that place. One call at a time, except for came and went.
type locator struct {
	places   portFinder
	ports    func() ([]devlink.Port, error)
	physical func() ([]physical, error)

	view view
	read time.Time // when view was; zero if never

	mu    sync.Mutex
	told  map[int]bool // netdevs by ifindex that events told of as being there
	stale bool         // a netdev came or went since the view
}

// view is what the kernel says of representors. A netdev is for one place as long as it lives, so what is found in a
// view is true until that netdev goes.
type view struct {
	ports     []devlink.Port
	noDevlink error // why there are no ports
	netdevs   []physical
}

// physical is what rtnetlink tells of the place of a netdev.
type physical struct {
	index    int
	name     string
	parent   pci.Address // the device that it belongs to, "" if the driver does not tell or it is on another bus
	switchID string      // phys_switch_id, "" for what is at no eswitch
	portName string      // phys_port_name
}

// maxAge is how old a view may be in which something is looked for and not found: most of what changes is told by an
// event, but not all, and of many ports that miss their representors each looks for its own.
const maxAge = 500 * time.Millisecond

// errNowhere is that a port has no representor by its PCI address. It says why.
type errNowhere struct{ error }

// index is the ifindex of the port's representor. The error is an errNowhere if there is none.
func (l *locator) index(port string) (int, error) {
	at, err := l.places.of(port)
	if err != nil {
		return 0, errNowhere{err}
	}
	if l.changed() {
		if err := l.look(); err != nil {
			return 0, err
		}
	}
	index, err := l.view.find(at)
	if err != nil && time.Since(l.read) > maxAge {
		if err := l.look(); err != nil {
			return 0, err
		}
		index, err = l.view.find(at)
	}
	return index, err
}

// look takes a new view.
func (l *locator) look() error {
	l.mu.Lock()
	l.stale = false // what comes from now on may not be seen
	l.mu.Unlock()
	netdevs, err := l.physical()
	// A netdev that neither came nor went may be missing then, and its port would be taken out of service.
	for try := 1; errors.Is(err, nl.ErrDumpInterrupted) && try < 10; try++ {
		netdevs, err = l.physical()
	}
	if err != nil {
		l.expire()
		return fmt.Errorf("list netdevs: %w", err)
	}
	// After the netdevs: the port of a netdev in the view is then there too.
	ports, noDevlink := l.ports()
	l.view, l.read = view{ports, noDevlink, netdevs}, time.Now()
	return nil
}

func (l *locator) changed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stale || l.read.IsZero()
}

// expire has the next call of index take a new view.
func (l *locator) expire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stale = true
}

// lost notes that events were lost, of netdevs that came or went.
func (l *locator) lost() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.told)
	l.stale = true
}

// came notes that an event told of a netdev, and says whether it is the first to do so. That a view has the netdev does
// not count: the ports that miss it are looked at for the event.
func (l *locator) came(index int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.told[index] {
		return false
	}
	l.told[index], l.stale = true, true
	return true
}

// went notes that a netdev is gone.
func (l *locator) went(index int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.told, index)
	l.stale = true
}

// find gives the ifindex of the representor at a place: first by devlink, which knows ports by number, then by name.
func (v view) find(at eswitchPort) (int, error) {
	index, byPort := v.byPort(at)
	if byPort == nil {
		return index, nil
	}
	index, byName := v.byName(at)
	if byName == nil {
		return index, nil
	}
	err := fmt.Errorf("%s has no representor (it has one in eswitch mode switchdev only): %w; %w", at, byPort, byName)
	if v.noDevlink != nil {
		return 0, err // it may have one all the same
	}
	return 0, errNowhere{err}
}

func (v view) byPort(at eswitchPort) (int, error) {
	if v.noDevlink != nil {
		return 0, v.noDevlink
	}
	var found []string
	var index int
	for _, port := range v.ports {
		if at.eswitch != "" && port.Device != devlink.OfPCI(at.eswitch) || !at.has(seatOf(port)) {
			continue
		}
		found = append(found, fmt.Sprintf("%s/%d", port.Device, port.Index))
		index = port.NetdevIndex
	}
	switch {
	case len(found) > 1:
		return 0, fmt.Errorf("devlink ports %s are all %s%s", strings.Join(found, ", "), at, at.choose())
	case len(found) == 0:
		return 0, fmt.Errorf("no devlink port is %s%s", at, v.others(at))
	case index == 0:
		return 0, fmt.Errorf("devlink port %s has no netdev in this network namespace", found[0])
	}
	return index, nil
}

func (v view) byName(at eswitchPort) (int, error) {
	var found []string
	var index int
	for _, n := range v.netdevs {
		s, ok := parsePortName(n.portName)
		if !ok || n.switchID == "" || !at.has(s) || !v.on(n, at.eswitch) {
			continue
		}
		found = append(found, n.name)
		index = n.index
	}
	switch {
	case len(found) > 1:
		return 0, fmt.Errorf("netdevs %s are all %s by phys_port_name%s", strings.Join(found, ", "), at, at.choose())
	case len(found) == 0:
		return 0, fmt.Errorf("no netdev is %s by phys_port_name and phys_switch_id", at)
	}
	return index, nil
}

// on says whether a netdev is at the eswitch of this PF: it belongs to the PF's device, or, where the driver does not
// tell, it has the phys_switch_id of the PF's own netdev. PFs that are bonded have one phys_switch_id, so that the
// device is the better sign.
func (v view) on(n physical, eswitch pci.Address) bool {
	if eswitch == "" || n.parent == eswitch {
		return true
	}
	return n.parent == "" && slices.ContainsFunc(v.netdevs, func(uplink physical) bool {
		_, represents := parsePortName(uplink.portName)
		return uplink.parent == eswitch && !represents && uplink.switchID == n.switchID
	})
}

// choose says what would tell eswitches apart.
func (p eswitchPort) choose() string {
	if p.eswitch != "" {
		return ""
	}
	return "; --host-pf with eswitch= tells which"
}

// others names a port with the same number that another controller or PF has: the one who wrote --host-pf may mean it.
func (v view) others(at eswitchPort) string {
	for _, port := range v.ports {
		s := seatOf(port)
		here := at.eswitch == "" || port.Device == devlink.OfPCI(at.eswitch)
		if here && at.flavour == s.flavour && at.number == s.number {
			return fmt.Sprintf(" (there is %s of %s)", s, port.Device.Name)
		}
	}
	return ""
}

func seatOf(port devlink.Port) portNumber {
	s := portNumber{external: port.External, pf: port.PF, flavour: port.Flavour}
	if port.External {
		s.controller = port.Controller
	}
	switch port.Flavour {
	case devlink.PCIVF:
		s.number = uint32(port.VF)
	case devlink.PCISF:
		s.number = port.SF
	}
	return s
}

// portNameForm are the names that the kernel gives to representors (net/devlink/port.c). Kernels before 5.10 know no
// controllers.
var portNameForm = regexp.MustCompile(`^(?:c([0-9]{1,10}))?pf([0-9]{1,5})(?:(vf|sf)([0-9]{1,10}))?$`)

// parsePortName reads a phys_port_name; ok is false for that of an uplink, and of anything else that is no Function's.
func parsePortName(name string) (_ portNumber, ok bool) {
	parts := portNameForm.FindStringSubmatch(name)
	if parts == nil {
		return portNumber{}, false
	}
	s := portNumber{external: parts[1] != "", flavour: devlink.PCIPF}
	switch parts[3] {
	case "vf":
		s.flavour = devlink.PCIVF
	case "sf":
		s.flavour = devlink.PCISF
	}
	number := func(digits string, bits int) uint64 {
		n, err := strconv.ParseUint(cmp.Or(digits, "0"), 10, bits)
		ok = ok && err == nil
		return n
	}
	ok = true
	s.controller, s.pf = uint32(number(parts[1], 32)), uint16(number(parts[2], 16))
	s.number = uint32(number(parts[4], 32))
	return s, ok
}

// skipStats is RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h: counters cost most of a dump.
const skipStats = 1 << 3

// physical lists all netdevs. The netlink library reads no phys_port_name, and of a phys_switch_id the first 4 bytes. If
// netdevs come or go meanwhile the error may be nl.ErrDumpInterrupted.
func (d *netdevs) physical() ([]physical, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: d.raw}
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(skipStats)))
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return nil, err
	}
	all := make([]physical, 0, len(messages))
	for _, m := range messages {
		p, err := parsePhysical(m)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

func parsePhysical(message []byte) (physical, error) {
	if len(message) < unix.SizeofIfInfomsg {
		return physical{}, fmt.Errorf("answer of %d bytes, want at least %d", len(message), unix.SizeofIfInfomsg)
	}
	attrs, err := attribute.Parse(message[unix.SizeofIfInfomsg:])
	if err != nil {
		return physical{}, err
	}
	p := physical{
		index: int(nl.DeserializeIfInfomsg(message).Index), name: attrs.Text(unix.IFLA_IFNAME),
		portName: attrs.Text(unix.IFLA_PHYS_PORT_NAME), switchID: string(attrs[unix.IFLA_PHYS_SWITCH_ID]),
	}
	if address, err := pci.Parse(attrs.Text(unix.IFLA_PARENT_DEV_NAME)); err == nil {
		p.parent = address
	}
	return p, nil
}
