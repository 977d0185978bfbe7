// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// reason says why an entry of sysfs was skipped, or why one of its attributes was left out.
type reason string

const (
	reasonAddress reason = "address" // the name is no PCI address; skipped
	// the entry cannot be read; it stays as last seen, and is skipped if it was never seen
	reasonDevice   reason = "device"
	reasonClass    reason = "class"     // skipped
	reasonID       reason = "id"        // vendor or device; skipped
	reasonNUMANode reason = "numa_node" // left out
	reasonDistance reason = "distance"  // of NUMA nodes; left out
	reasonRoot     reason = "root"      // PCIe root; left out
	reasonDriver   reason = "driver"    // the last one stays
	reasonNetdev   reason = "netdev"    // the last one stays
	reasonCarrier  reason = "carrier"   // left out
	reasonPhysfn   reason = "physfn"    // a VF without a PF; skipped
	// a VF without a link from its PF; skipped. One whose link cannot be read stays as last seen.
	reasonVirtfn reason = "virtfn"
	reasonParent reason = "parent" // an SF without a PF; skipped
	// an SF without sfnum, or with the sfnum of another SF; skipped. One whose sfnum cannot be read
	// any more stays as last seen.
	reasonSFNum    reason = "sfnum"
	reasonLinkType reason = "type"      // of a netdev; left out
	reasonRDMA     reason = "rdma"      // of a device, or the mode of the system; left out
	reasonVDPA     reason = "vdpa"      // the last one stays
	reasonIOMMU    reason = "iommu"     // left out
	reasonDDP      reason = "ddp"       // left out
	reasonVFs      reason = "vfs"       // their maximum number or place; the last one stays
	reasonSwitchID reason = "switch_id" // the last one stays
	reasonVPD      reason = "vpd"       // left out
	reasonHostUse  reason = "host_use"  // for all netdevs; the last result stays
)

var reasons = []reason{
	reasonAddress, reasonDevice, reasonClass, reasonID, reasonNUMANode, reasonDistance,
	reasonRoot, reasonDriver, reasonNetdev, reasonCarrier,
	reasonPhysfn, reasonVirtfn, reasonParent, reasonSFNum, reasonLinkType, reasonRDMA, reasonVDPA,
	reasonIOMMU, reasonDDP,
	reasonVFs, reasonSwitchID, reasonVPD, reasonHostUse,
}

// problem identifies a problem with an entry of sysfs. entry is its path below the root.
type problem struct {
	entry string
	why   reason
}

// hardware has the properties of a PCI device that do not change. Each scan sets Kind, PF, Index,
// NumVFs, the routing of VFs, the NUMA nodes nearby and the roots of Data Direct functions.
type hardware struct {
	instance
	// Class is "" for a device that is neither a network function nor an accelerator.
	function.Function
	physfn     pci.Address // "" if the device is no VF
	sriov      bool        // the device can have VFs
	dataDirect bool        // the device is the Data Direct function of a NIC
	// vfs are the VFs of a PF as they could last be read. They are nil if they never could be.
	vfs []sysfs.VF
	// final is false if a missing attribute may still appear, so that the device must be read
	// again.
	final bool
}

// instance distinguishes a device from a later device at the same address. Inode numbers of sysfs
// are never reused. Other file systems, which tests use, need the time too.
type instance struct {
	inode uint64
	ctime syscall.Timespec
}

// scanner reads all Functions at each scan, and remembers what need not be read again. It must not
// be used by several goroutines at once.
type scanner struct {
	sysfs   sysfs.Root
	options Options // with defaults

	known    map[pci.Address]*hardware
	cards    *answers // the card of a device; see [readCard]
	ddp      *answers // the DDP package of a PF
	readCard func(device sysfs.Dir) (string, error)
	previous map[function.ID]lastSeen // of the previous scan
	lastSeen map[function.ID]lastSeen
	pfs      map[pci.Address]function.Function
	sfs      map[string]knownSF       // by the name of the auxiliary device
	vdpas    map[string]function.VDPA // by the name of the parent device
	// routed is keyed by the name of the netdev. It is nil until the host's netdevs could be read.
	routed   map[string]bool
	uses     hostuse.Netdevs          // nil until it could be read
	rdmaMode func() function.RDMAMode // reads the mode at the first call in a scan
	problems map[problem]error
}

func newScanner(options Options) *scanner {
	if options.DDPProfile == nil {
		options.DDPProfile = func(pf pci.Address) (string, error) {
			return devlinkDDPProfile(options.NetNS, pf)
		}
	}

	if options.HostNetdevs == nil {
		options.HostNetdevs = func() (hostuse.Netdevs, error) { return hostuse.Read(options.NetNS) }
	}

	s := &scanner{
		sysfs: sysfs.Root(options.SysRoot), options: options, problems: map[problem]error{},
		cards: newAnswers(0), ddp: newAnswers(ddpTime), readCard: readCard,
	}
	s.cards.patience = cardPatience
	if options.WaitForCards {
		s.cards.wait, s.cards.patience, s.ddp.wait = -1, 0, -1
	}
	return s
}

// scan returns all Functions, sorted. problems has the problems of single entries then. An error
// means that nothing could be read.
func (s *scanner) scan() ([]function.Function, error) {
	s.problems = map[problem]error{}
	bus := s.sysfs.Dir(sysfs.PCIDevices)
	entries, _, err := bus.Names()
	// A sysfs without any PCI device does not show the host's devices, as for [sysfs.Root.Gone]. Not
	// all of them were removed: a PCI bus keeps its host bridge.
	if err == nil && len(entries) == 0 && len(s.known) > 0 {
		err = fmt.Errorf("%s: the bus had %d devices and shows none any more", bus, len(s.known))
	}
	if err != nil {
		return nil, err
	}

	s.readHardware(entries)
	s.findVFs()
	s.findNUMANodes()
	s.findDataDirect()
	s.readVDPAs()
	s.readHostUse()
	s.rdmaMode = sync.OnceValue(s.readRDMAMode)
	s.previous, s.lastSeen = s.lastSeen, make(map[function.ID]lastSeen, len(s.lastSeen))
	functions, err := s.addSubfunctions(s.pciFunctions())
	if err != nil {
		return nil, err
	}

	maps.DeleteFunc(s.problems, func(c problem, _ error) bool {
		return !s.sysfs.Dir(c.entry).Exists() // the entry was just being removed
	})
	slices.SortFunc(functions, func(a, b function.Function) int {
		return cmp.Or(cmp.Compare(a.ID.Address, b.ID.Address), cmp.Compare(a.Index, b.Index))
	})

	return functions, nil
}

// report records why an entry of sysfs is skipped or incomplete. It ignores a nil error.
func (s *scanner) report(entry sysfs.Dir, why reason, err error) {
	if err == nil {
		return
	}
	below := strings.TrimPrefix(string(entry), string(s.sysfs.Dir()))
	s.problems[problem{strings.TrimPrefix(below, "/"), why}] = err
}

// unread reports whether a file about the hardware could not be read, so that the next read may
// succeed without an event.
func (s *scanner) unread() bool {
	for p := range s.problems {
		switch p.why {
		case reasonDevice, reasonClass, reasonID, reasonNUMANode, reasonDistance, reasonRoot,
			reasonDriver, reasonNetdev, reasonVirtfn, reasonVFs, reasonVDPA:
			return true
		}
	}
	return false
}

// readHardware updates the known PCI devices. A device that cannot be read stays as it was last
// seen. It is left out if it was never seen.
func (s *scanner) readHardware(entries []string) {
	known := make(map[pci.Address]*hardware, len(entries))
	for _, name := range entries {
		address, err := pci.Parse(name)
		if err != nil || string(address) != name {
			s.report(s.sysfs.Dir(sysfs.PCIDevices, name), reasonAddress,
				errors.New("is not a PCI address"))
			continue
		}

		if h := s.readAgain(address); h != nil {
			known[address] = h
		}
	}

	s.known = known
	isGone := func(address pci.Address) bool { return known[address] == nil }
	s.cards.forget(isGone)
	s.ddp.forget(isGone)
}

// readAgain returns what is known of a device, and reads what is not known yet. It returns nil if the
// device has to be skipped.
func (s *scanner) readAgain(address pci.Address) *hardware {
	dir, before := s.sysfs.PCI(address), s.known[address]
	now, err := instanceOf(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist): // it was just being removed
		return nil
	case err != nil:
		s.report(dir, reasonDevice, err)
		return before
	case before == nil || before.instance != now:
		return s.readDevice(address, now)
	case before.final:
		return before
	}

	h := s.readDevice(address, now)
	if h == nil {
		return before
	}
	h.VFOffset, h.VFStride, h.TotalVFs, h.vfs =
		before.VFOffset, before.VFStride, before.TotalVFs, before.vfs
	return h
}

func instanceOf(path sysfs.Dir) (instance, error) {
	var stat syscall.Stat_t
	if err := syscall.Lstat(string(path), &stat); err != nil {
		return instance{}, fmt.Errorf("stat: %w", err)
	}
	return instance{stat.Ino, stat.Ctim}, nil
}

// readDevice reads the attributes of a device that do not change. It returns nil if the device has
// to be skipped.
func (s *scanner) readDevice(address pci.Address, now instance) *hardware {
	dir := s.sysfs.PCI(address)
	h := &hardware{
		instance: now, Function: function.Function{ID: function.ID{Address: address}, NUMANode: -1},
	}
	var err error
	if h.Class, err = read(dir, "class", parseClass); err != nil {
		s.report(dir, reasonClass, err)
		return nil
	}
	if h.dataDirect, err = isDataDirect(dir); err != nil {
		s.report(dir, reasonID, err)
		return nil
	}
	if h.dataDirect {
		h.Class = ""
	}

	h.PCIeRoot, err = rootOf(dir)
	s.report(dir, reasonRoot, err)
	rooted := err == nil
	if h.Class == "" {
		h.final = rooted
		return h
	}

	for name, id := range map[string]*string{"vendor": &h.Vendor, "device": &h.Device} {
		if *id, err = read(dir, name, parseID); err != nil {
			s.report(dir, reasonID, fmt.Errorf("%s: %w", name, err))
			return nil
		}
	}

	numaNode, numaErr := read(dir, "numa_node", parseNUMANode)
	if numaErr == nil {
		h.NUMANode = numaNode
	} else if errors.Is(numaErr, fs.ErrNotExist) {
		numaErr = nil // the kernel was built without NUMA
	}

	s.report(dir, reasonNUMANode, numaErr)
	h.ACPIIndex, _ = dir.Attribute("acpi_index") // few devices have one
	pf, err := dir.Link("physfn")
	if err == nil && pf != "" {
		h.physfn, err = pci.Parse(pf)
	}
	if err != nil {
		s.report(dir, reasonPhysfn, err)
		return nil
	}

	h.sriov = dir.Has("sriov_totalvfs")
	// The kernel shows a new VF before it makes the VF's physfn (pci_iov_add_virtfn in
	// drivers/pci/iov.c).
	h.final = rooted && numaErr == nil && (h.sriov || h.physfn != "")
	return h
}

// findVFs sets the properties that each scan sets, by reading each PF's directory once.
func (s *scanner) findVFs() {
	for address, h := range s.known {
		h.Kind, h.PF, h.Index, h.NumVFs = function.PF, address, -1, 0
	}
	for address, pf := range s.known {
		if pf.Class == "" || !pf.sriov {
			continue
		}

		dir := s.sysfs.PCI(address)
		s.readVFRouting(dir, pf)
		s.readVFs(dir, pf)
		pf.NumVFs = len(pf.vfs)
		for _, v := range pf.vfs {
			vf := s.known[v.Address]
			if vf == nil || vf.Class == "" || vf.physfn != address && vf.physfn != "" {
				continue // the problem is reported for the VF
			}

			if vf.Kind == function.PF || v.Index < vf.Index {
				vf.Kind, vf.PF, vf.Index = function.VF, address, v.Index
			}
		}
	}
}

// readVFs reads the VFs of a PF. They stay as they were if the PF's directory cannot be read, and so
// does each of them whose link cannot be read: this says nothing about the VFs.
func (s *scanner) readVFs(dir sysfs.Dir, pf *hardware) {
	entries, _, err := dir.Names()
	if err != nil {
		s.report(dir, reasonDevice, fmt.Errorf("its VFs stay as last seen: %w", err))
		return
	}

	before := pf.vfs
	pf.vfs = []sysfs.VF{}
	for _, name := range entries {
		index, ok := sysfs.VFIndex(name)
		if !ok {
			continue
		}

		target, err := s.virtfnTarget(dir, name)
		s.report(dir.Dir(name), reasonVirtfn, err)
		switch {
		case err == nil:
			pf.vfs = append(pf.vfs, sysfs.VF{Index: index, Address: target})
		case !errors.Is(err, fs.ErrNotExist):
			for _, v := range before {
				if v.Index == index {
					pf.vfs = append(pf.vfs, v)
				}
			}
		}
	}
}

// readVFRouting reads where a PF's VFs are and how many it can have. Old kernels do not show where
// they are. What cannot be read stays as it was.
func (s *scanner) readVFRouting(dir sysfs.Dir, pf *hardware) {
	for _, file := range []struct {
		name  string
		value *int
	}{
		{"sriov_offset", &pf.VFOffset}, {"sriov_stride", &pf.VFStride},
		{"sriov_totalvfs", &pf.TotalVFs},
	} {
		switch now, err := dir.Number(file.name); {
		case err == nil:
			*file.value = now
		case errors.Is(err, fs.ErrNotExist):
			*file.value = 0
		default:
			s.report(dir, reasonVFs, err)
		}
	}
}

// virtfnTarget returns the VF to which a PF's link leads. The VF exists but need not be known.
func (s *scanner) virtfnTarget(dir sysfs.Dir, name string) (pci.Address, error) {
	text, err := dir.Link(name)
	if _, known := s.known[pci.Address(text)]; known || err != nil {
		return pci.Address(text), err
	}
	if _, err := os.Stat(string(dir.Dir(name))); err != nil {
		return "", err
	}
	return pci.Parse(text)
}

func (s *scanner) pciFunctions() []function.Function {
	functions := make([]function.Function, 0, len(s.known))
	s.pfs = map[pci.Address]function.Function{}
	for address, h := range s.known {
		dir := s.sysfs.PCI(address)
		pf, pfExists := s.known[h.physfn]
		switch {
		case h.Class == "" || h.Kind == function.VF:
		case h.sriov && h.vfs == nil: // the problem is reported: it may be in use by its VFs
		case pfExists && pf.vfs == nil:
			s.report(dir, reasonVirtfn, fmt.Errorf("the VFs of PF %s cannot be read", h.physfn))
		case h.physfn == "":
			s.pfs[address] = s.complete(h.Function, dir, h.instance)
			functions = append(functions, s.pfs[address])
		case pfExists:
			s.report(dir, reasonVirtfn, fmt.Errorf("PF %s has no virtfn link to it", h.physfn))
		default:
			s.report(dir, reasonPhysfn, fmt.Errorf("PF %s is not there", h.physfn))
		}
	}

	for address, h := range s.known {
		// after the PFs, because VFs take some properties from their PF
		if h.Kind == function.VF {
			functions = append(functions, s.complete(h.Function, s.sysfs.PCI(address), h.instance))
		}
	}

	return functions
}

// knownSF is an SF, by the name of its auxiliary device.
type knownSF struct {
	instance
	id function.ID
}

// lastKnown returns the SFs. One that cannot be read has the ID that it had when it was last seen.
func (s *scanner) lastKnown(found []subfunction) []subfunction {
	before := s.sfs
	s.sfs = make(map[string]knownSF, len(found))
	for i := range found {
		sf := &found[i]
		name := sf.dir.Base()
		now, err := instanceOf(sf.dir)
		if last, known := before[name]; sf.err != nil && err == nil && known &&
			last.instance == now {
			s.report(sf.dir, sf.why, sf.err)
			sf.id, sf.err = last.id, nil
		}
		if sf.err == nil {
			s.sfs[name] = knownSF{now, sf.id}
		}
	}
	return found
}

func (s *scanner) addSubfunctions(functions []function.Function) ([]function.Function, error) {
	found, err := subfunctions(s.sysfs)
	if err != nil {
		return nil, err
	}

	seen := map[function.ID]string{}
	for _, sf := range s.lastKnown(found) {
		pf := s.pfs[sf.id.Address]
		sfnum, _ := sf.id.SFNum()
		f := function.PotentialSF(pf, sfnum)
		f.Potential, f.AuxDevice = false, filepath.Base(string(sf.dir))
		first, taken := seen[sf.id]
		switch {
		case sf.err != nil:
		case pf.Class != function.Network:
			sf.why, sf.err = reasonParent, fmt.Errorf("PF %s is not there", sf.id.Address)
		case taken:
			sf.why, sf.err = reasonSFNum, fmt.Errorf("sfnum %d belongs to %s", sfnum, first)
		}

		if sf.err != nil {
			s.report(sf.dir, sf.why, sf.err)
			continue
		}

		seen[sf.id] = filepath.Join(sysfs.AuxiliaryDevices, f.AuxDevice)
		// the zero value, which no device has, if the device was just removed
		now, _ := instanceOf(sf.dir)
		functions = append(functions, s.complete(f, sf.dir, now))
	}

	return functions, nil
}
