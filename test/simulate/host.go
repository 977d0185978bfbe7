// SPDX-License-Identifier: Apache-2.0

// Package simulate creates a host with SmartNICs from a directory and virtual Ethernet pairs. It
// replaces only the hardware: programs under test get the path of a sysfs and a network namespace,
// like on a real host.
//
// The directory has what the kernel shows of the cards' PCI devices. Each function is a veth pair:
// one end is the function's netdev in the host's namespace, the other the representor in the xPU's.
// Like with a card in switchdev mode, a function has a link while its representor is up, and its
// frames come out of the representor. SR-IOV is configured by writing to a PF's sriov_numvfs, or by
// [Host.AddVFs] and [Host.RemoveVFs].
//
// The directory follows the netdevs: when a netdev leaves the host's namespace, it disappears from
// its device's net directory, and it appears again, under its new name, when it returns. A
// goroutine does this on messages of rtnetlink, so it lags behind the kernel, usually by a
// millisecond, more on a busy machine. Afterwards it makes the kernel send another message about
// the PF's netdev, so that a program that reads sysfs on each message finally sees the change.
//
// Other differences to hardware: the netdevs are of kind "veth" and have no parent device in
// rtnetlink; a PF enforces nothing for its VFs (IFLA_VF_*); while a netdev is down, the file
// carrier cannot be opened, instead of opened but not read. When a namespace ends, the veth pairs
// in it are destroyed, while the kernel returns a card's netdevs to the host. So the pair is
// created again: the representor with its ifindex and its bridge (without VLANs), the netdev with
// its first name.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Config configures a [Host].
type Config struct {
	// Root is the directory in which the tree "sys" is created. A tree with very many VFs is
	// created much faster on a tmpfs, and then read as fast as sysfs.
	Root string
	// Name tells hosts apart: the MAC addresses are derived from it. The same Name gives the same
	// addresses, another Name others. "" means Root.
	Name string
	// HostNS and XPUNS are paths of the network namespaces of host and xPU. Without both there are
	// no netdevs.
	HostNS, XPUNS string
	Cards         []Card
	// Uplink connects the xPU to a network if it is not nil.
	Uplink *Uplink
	Log    logr.Logger
}

// Function is a PF or VF of a simulated card.
type Function struct {
	Address pci.Address
	PF      pci.Address
	// Index is the index of a VF, and -1 for a PF.
	Index int
	// Netdev is the initial name of the netdev.
	Netdev string
	// Representor is the name of the netdev in the xPU's namespace. [Function.PortID] and
	// EswitchName are alternative names.
	Representor string
	// EswitchName is the xPU's name for a VF, such as "c1pf0vf3"; "" if it does not number
	// controllers.
	EswitchName string
}

// PortID returns the alternative name of a VF's representor, such as "vf-0000-3b-02-1", which is
// the id of the VF's OPI BridgePort.
func (f Function) PortID() string { return "vf-" + f.Address.DeviceName() }

// Host is a simulated host. Its methods are safe for concurrent use.
type Host struct {
	config Config
	log    logr.Logger
	tree   tree

	mutex     sync.Mutex
	functions map[pci.Address]*function
	pairs     *pairs // nil without netdevs

	stop    context.CancelFunc
	workers sync.WaitGroup
}

// function is a function of the host, and its state in the tree.
type function struct {
	Function
	device *device
	card   Card
	pf     int // index of the PF on its card
	vfs    []*function
	pair   pair
	shown  netdev
}

// New returns a host, which exists until [Host.Close]. If ctx ends, the tree just stops to follow
// the netdevs.
func New(ctx context.Context, config Config) (_ *Host, err error) {
	cards, err := completeCards(config.Cards)
	if err != nil {
		return nil, err
	}
	if (config.HostNS == "") != (config.XPUNS == "") {
		return nil, errors.New("HostNS and XPUNS: must both be set, or both be empty")
	}
	if config.Root, err = filepath.Abs(config.Root); err != nil {
		return nil, fmt.Errorf("root: %w", err)
	}

	ctx, stop := context.WithCancel(ctx)
	h := &Host{config: config, log: config.Log, functions: map[pci.Address]*function{}, stop: stop}
	if h.tree, err = newTree(config.Root); err != nil { // an existing tree is not ours to remove
		stop()
		return nil, fmt.Errorf("tree: %w", err)
	}

	defer func() {
		if err != nil {
			err = errors.Join(err, h.Close())
		}
	}()

	if config.HostNS != "" {
		if h.pairs, err = openPairs(config); err != nil {
			return nil, err
		}
		if h.tree.left {
			if err := h.pairs.removeLeft(); err != nil {
				return nil, fmt.Errorf("what a killed simulation left: %w", err)
			}
		}
	}

	if err := h.follow(ctx); err != nil {
		return nil, err
	}

	h.config.Cards = cards
	number := 0
	for _, card := range cards {
		if card.DataDirect != "" {
			if err := h.addDataDirect(card); err != nil {
				return nil, err
			}
		}

		for pf := range card.PFs {
			if err := h.addPF(card, pf, number); err != nil {
				return nil, err
			}
			number++
		}
	}

	if err := h.watchNumVFs(ctx); err != nil {
		return nil, fmt.Errorf("watch sriov_numvfs: %w", err)
	}

	return h, nil
}

func completeCards(cards []Card) ([]Card, error) {
	if len(cards) == 0 {
		return nil, errors.New("a host needs a card")
	}

	out := make([]Card, 0, len(cards))
	for _, card := range cards {
		card, err := card.complete()
		if err != nil {
			return nil, err
		}

		for _, other := range out {
			if other.overlaps(card) {
				return nil, fmt.Errorf("card on bus %s: overlaps with the card on bus %s",
					card.Bus, other.Bus)
			}
		}

		out = append(out, card)
	}

	return out, nil
}

// SysRoot returns the directory that stands for the host's /sys.
func (h *Host) SysRoot() string { return h.tree.sys }

// Functions returns all functions, sorted by address.
func (h *Host) Functions() []Function {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	var out []Function
	for _, address := range slices.Sorted(maps.Keys(h.functions)) {
		out = append(out, h.functions[address].Function)
	}
	return out
}

// Close removes everything: the netdevs, wherever they are, and the tree. A second call does
// nothing.
func (h *Host) Close() error {
	h.stop()
	h.workers.Wait()
	h.mutex.Lock()
	defer h.mutex.Unlock()

	var errs []error
	if h.pairs != nil {
		for _, f := range h.functions {
			errs = append(errs, h.pairs.remove(f.pair))
		}
		errs = append(errs, h.pairs.close())
		h.pairs = nil
	}

	clear(h.functions)
	return errors.Join(append(errs, h.tree.remove())...)
}

// AddVFs creates n VFs of a PF, from 1 to its sriov_totalvfs. Like in the kernel, the PF must have
// none.
func (h *Host) AddVFs(pf pci.Address, n int) error {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	f, err := h.physical(pf)
	if err != nil {
		return err
	}
	return errors.Join(h.addVFs(f, n), h.showNumVFs(f))
}

// RemoveVFs removes all VFs of a PF, even if they are in use.
func (h *Host) RemoveVFs(pf pci.Address) error {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	f, err := h.physical(pf)
	if err != nil {
		return err
	}
	return errors.Join(h.removeVFs(f), h.showNumVFs(f))
}

// SetLink sets the link of a PF up or down, as if at the other end of its cable.
func (h *Host) SetLink(pf pci.Address, up bool) error {
	h.mutex.Lock()
	defer h.mutex.Unlock()

	f, err := h.physical(pf)
	if err != nil {
		return err
	}
	if h.pairs == nil {
		return fmt.Errorf("PF %s: has no netdev", pf)
	}

	return h.pairs.setRepresentor(f.pair, up)
}

func (h *Host) physical(pf pci.Address) (*function, error) {
	f, ok := h.functions[pf]
	if !ok || f.Index >= 0 {
		return nil, fmt.Errorf("PF %s: is not there", pf)
	}
	return f, nil
}

func (h *Host) addPF(card Card, pf, number int) error {
	h.mutex.Lock()
	defer h.mutex.Unlock()

	port := &device{
		address: card.rootPort(), parent: card.PCIeRoot, driver: "pcieport",
		attributes: map[string]string{"vendor": "0x8086", "device": "0x347a", "class": "0x060400",
			"numa_node": strconv.Itoa(card.NUMANode)},
	}

	if pf == 0 {
		if err := h.tree.add(port); err != nil {
			return fmt.Errorf("root port %s: %w", port.address, err)
		}
	}

	address := card.pf(pf)
	attributes := card.attributes(card.Device)
	maps.Copy(attributes, map[string]string{
		"sriov_numvfs": "0", "sriov_totalvfs": strconv.Itoa(card.TotalVFs),
		"sriov_offset": strconv.Itoa(card.offset(pf)),
		"sriov_stride": strconv.Itoa(stride), "sriov_vf_device": card.VFDevice,
		"sriov_drivers_autoprobe": "1",
	})

	if card.Serial != "" || card.Identifier != "" {
		attributes["vpd"] = card.vitalProductData()
	}

	f := &function{
		Function: Function{Address: address, PF: address, Index: -1, Netdev: card.netdev(pf),
			Representor: fmt.Sprintf("pf%dhpf", number)},
		device: &device{
			address: address, parent: filepath.Join(port.parent, string(port.address)),
			driver: card.Driver, attributes: attributes,
		},
		card: card,
		pf:   pf,
	}

	if err := h.add(f); err != nil {
		return err
	}
	if card.VFs == 0 {
		return nil
	}

	return errors.Join(h.addVFs(f, card.VFs), h.showNumVFs(f))
}

func (c Card) attributes(device string) map[string]string {
	return map[string]string{
		"vendor": "0x" + c.Vendor, "device": "0x" + device, "class": "0x020000",
		"numa_node": strconv.Itoa(c.NUMANode),
	}
}

// addVFs creates VFs. The caller holds the mutex.
func (h *Host) addVFs(pf *function, n int) error {
	if len(pf.vfs) > 0 {
		return fmt.Errorf("PF %s: has %d VFs: set it to 0 first", pf.Address, len(pf.vfs))
	}
	if n < 1 || n > pf.card.TotalVFs {
		return fmt.Errorf("PF %s: %d VFs: must be 1-%d", pf.Address, n, pf.card.TotalVFs)
	}

	for index := range n {
		address := pf.card.vf(pf.pf, index)
		f := &function{
			Function: Function{
				Address: address, PF: pf.Address, Index: index,
				Netdev: fmt.Sprintf("%sv%d", pf.Netdev, index),
				Representor: fmt.Sprintf("%svf%d", strings.TrimSuffix(pf.Representor, "hpf"),
					index),
				EswitchName: pf.card.eswitchName(pf.pf, index),
			},
			device: &device{
				address: address, parent: pf.device.parent, driver: pf.card.Driver,
				physfn: pf.device, index: index,
				attributes: pf.card.attributes(pf.card.VFDevice),
			},
			card: pf.card,
		}

		pf.vfs = append(pf.vfs, f)
		if err := h.add(f); err != nil {
			return errors.Join(err, h.removeVFs(pf))
		}
	}

	return nil
}

// add creates a function in the kernel's order: first the device, then the netdev.
func (h *Host) add(f *function) error {
	h.functions[f.Address] = f
	if h.pairs == nil {
		// Without netdevs, a function looks like one whose netdev is in another network namespace.
		if err := os.MkdirAll(filepath.Join(h.tree.dir(f.device), "net"), 0o755); err != nil {
			return err
		}
	}

	if err := h.tree.add(f.device); err != nil {
		return fmt.Errorf("device %s: %w", f.Address, err)
	}
	if h.pairs == nil {
		return nil
	}

	return h.makeNetdev(f, f.Netdev)
}

// makeNetdev creates the veth pair of a function and shows its host end in the tree.
func (h *Host) makeNetdev(f *function, name string) (err error) {
	want := pairSpec{name: name, representor: f.Representor, mac: h.mac(f.Address), up: f.Index < 0}
	if f.Index >= 0 {
		want.altNames = append(want.altNames, f.PortID())
	}

	if f.EswitchName != "" {
		want.altNames = append(want.altNames, f.EswitchName)
	}
	if f.pair, err = h.pairs.add(f.pair, want); err != nil {
		return fmt.Errorf("netdev %s of %s: %w", name, f.Address, err)
	}

	return h.syncNetdev(f)
}

// removeVFs removes all VFs of a PF. The caller holds the mutex.
func (h *Host) removeVFs(pf *function) error {
	var errs []error
	for _, f := range slices.Backward(pf.vfs) {
		delete(h.functions, f.Address)
		errs = append(errs, h.tree.hide(f.device, f.shown), h.tree.removeDevice(f.device))
		if h.pairs != nil {
			errs = append(errs, h.pairs.remove(f.pair))
		}
	}

	pf.vfs = nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("PF %s: remove VFs: %w", pf.Address, err)
	}

	return nil
}

// mac returns the function's address: locally administered, with 24 bits for the host and the
// function's routing id.
func (h *Host) mac(a pci.Address) net.HardwareAddr {
	var domain uint32
	var bus, device, function byte
	// addresses come from Card.address
	_, _ = fmt.Sscanf(string(a), "%x:%x:%x.%x", &domain, &bus, &device, &function)
	host := h.config.number() + domain
	return net.HardwareAddr{
		0x02, byte(host >> 16), byte(host >> 8), byte(host), bus, device<<3 | function,
	}
}

// number returns a number that differs between hosts.
func (c Config) number() uint32 {
	hash := fnv.New32a()
	hash.Write([]byte(cmp.Or(c.Name, c.Root)))
	return hash.Sum32()
}
