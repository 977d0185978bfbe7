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
	"syscall"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// reason is why an entry of sysfs was skipped, or one of its attributes left out.
type reason string

const (
	reasonAddress  reason = "address"   // the name is no PCI address; skipped
	reasonDevice   reason = "device"    // the entry cannot be read; skipped
	reasonClass    reason = "class"     // skipped
	reasonID       reason = "id"        // vendor or device; skipped
	reasonNUMANode reason = "numa_node" // left out
	reasonDriver   reason = "driver"    // left out
	reasonNetdev   reason = "netdev"    // left out
	reasonCarrier  reason = "carrier"   // left out
	reasonPhysfn   reason = "physfn"    // a VF without PF; skipped
	reasonVirtfn   reason = "virtfn"    // a VF that its PF does not know, or a link to nothing; skipped
	reasonParent   reason = "parent"    // an SF without PF; skipped
	reasonSFNum    reason = "sfnum"     // an SF without sfnum, or with another SF's; skipped
	reasonLinkType reason = "type"      // of a netdev; left out
	reasonRDMA     reason = "rdma"      // left out
	reasonVDPA     reason = "vdpa"      // left out
	reasonIOMMU    reason = "iommu"     // left out
	reasonDDP      reason = "ddp"       // left out
	reasonRoutes   reason = "routes"    // the node's, which stay as they were
)

var reasons = []reason{
	reasonAddress, reasonDevice, reasonClass, reasonID, reasonNUMANode, reasonDriver, reasonNetdev, reasonCarrier,
	reasonPhysfn, reasonVirtfn, reasonParent, reasonSFNum, reasonLinkType, reasonRDMA, reasonVDPA, reasonIOMMU, reasonDDP,
	reasonRoutes,
}

// problem is about one entry of sysfs, named by its path below the root.
type problem struct {
	entry string
	why   reason
}

// hardware is a PCI device. All but the last fields do not change as long as the device exists, so they are read once.
type hardware struct {
	instance
	class          function.Class // "" where the device is none of ours
	vendor, device string
	acpiIndex      string
	numaNode       int
	root           string
	physfn         pci.Address // "" where the device is no VF
	sriov          bool        // the device can have VFs
	// lasting is false where a part is missing that may come.
	lasting bool

	numVFs int
	pf     pci.Address // the PF with a link to this VF, "" where there is none
	index  int         // of this VF
}

// instance tells a device from a later one at the same address. Inode numbers of sysfs are never used twice; other
// file systems, in tests, need the time as well.
type instance struct {
	inode uint64
	ctime syscall.Timespec
}

// scanner reads all Functions, again and again, and remembers what need not be read again. It must not be used by
// several goroutines at once.
type scanner struct {
	sysfs   sysfs.Root
	options Options // with defaults

	known    map[pci.Address]*hardware
	before   map[function.ID]lastSeen // by the scan before
	lastSeen map[function.ID]lastSeen
	pfs      map[pci.Address]function.Function
	vdpas    map[string]function.VDPA // by the name of the parent device
	routed   map[string]bool          // by the name of the netdev; nil as long as the routes could not be read
	problems map[problem]error
}

func newScanner(options Options) *scanner {
	if options.DDPProfile == nil {
		options.DDPProfile = func(pf pci.Address) (string, error) { return devlinkDDPProfile(options.NetNS, pf) }
	}
	if options.DefaultNetdevs == nil {
		options.DefaultNetdevs = func() ([]string, error) { return defaultNetdevs(options.NetNS) }
	}
	return &scanner{sysfs: sysfs.Root(options.SysRoot), options: options}
}

// scan returns all Functions, sorted. Afterwards problems has what was wrong with single entries. An error means that
// nothing could be read.
func (s *scanner) scan() ([]function.Function, error) {
	s.problems = map[problem]error{}
	entries, _, err := s.sysfs.Dir(sysfs.PCIDevices).Names()
	if err != nil {
		return nil, err
	}
	s.readHardware(entries)
	s.findVFs()
	s.readVDPAs()
	s.readRoutes()
	s.before, s.lastSeen = s.lastSeen, make(map[function.ID]lastSeen, len(s.lastSeen))
	functions, err := s.addSubfunctions(s.pciFunctions())
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(s.problems, func(c problem, _ error) bool {
		return !s.sysfs.Dir(c.entry).Exists() // it was only about to go away
	})
	slices.SortFunc(functions, func(a, b function.Function) int {
		return cmp.Or(cmp.Compare(a.ID.Address, b.ID.Address), cmp.Compare(a.Index, b.Index))
	})
	return functions, nil
}

// report notes why an entry of sysfs is skipped or incomplete. A nil error is no problem.
func (s *scanner) report(entry sysfs.Dir, why reason, err error) {
	if err == nil {
		return
	}
	below := strings.TrimPrefix(string(entry), string(s.sysfs.Dir()))
	s.problems[problem{strings.TrimPrefix(below, "/"), why}] = err
}

// readHardware brings known up to date. It leaves out what cannot be read.
func (s *scanner) readHardware(entries []string) {
	known := make(map[pci.Address]*hardware, len(entries))
	for _, name := range entries {
		address, err := pci.Parse(name)
		if err != nil || string(address) != name {
			s.report(s.sysfs.Dir(sysfs.PCIDevices, name), reasonAddress, errors.New("is not a PCI address"))
			continue
		}
		dir := s.sysfs.PCI(address)
		now, err := instanceOf(dir)
		if err != nil {
			s.report(dir, reasonDevice, err)
			continue
		}
		h := s.known[address]
		if h == nil || !h.lasting || h.instance != now {
			h = s.readDevice(dir, now)
		}
		if h != nil {
			known[address] = h
		}
	}
	s.known = known
}

func instanceOf(path sysfs.Dir) (instance, error) {
	var stat syscall.Stat_t
	if err := syscall.Lstat(string(path), &stat); err != nil {
		return instance{}, fmt.Errorf("stat: %w", err)
	}
	return instance{stat.Ino, stat.Ctim}, nil
}

// readDevice reads what does not change of a device. It returns nil if the device has to be skipped.
func (s *scanner) readDevice(dir sysfs.Dir, now instance) *hardware {
	h := &hardware{instance: now, numaNode: -1}
	class, err := dir.Attribute("class")
	if err == nil {
		h.class, err = parseClass(class)
	}
	if err != nil {
		s.report(dir, reasonClass, err)
		return nil
	}
	if h.class == "" {
		h.lasting = true
		return h
	}
	for name, id := range map[string]*string{"vendor": &h.vendor, "device": &h.device} {
		text, err := dir.Attribute(name)
		if err == nil {
			*id, err = parseID(text)
		}
		if err != nil {
			s.report(dir, reasonID, fmt.Errorf("%s: %w", name, err))
			return nil
		}
	}
	numaNode, numaErr := dir.Attribute("numa_node")
	if numaErr == nil {
		h.numaNode, numaErr = parseNUMANode(numaNode)
	} else if errors.Is(numaErr, fs.ErrNotExist) {
		numaErr = nil // the kernel was built without NUMA
	}
	s.report(dir, reasonNUMANode, numaErr)
	if link, err := dir.Target(); err == nil {
		h.root = parseRoot(link)
	}
	h.acpiIndex, _ = dir.Attribute("acpi_index") // few devices have one
	pf, err := dir.Link("physfn")
	if err == nil && pf != "" {
		h.physfn, err = pci.Parse(pf)
	}
	if err != nil {
		s.report(dir, reasonPhysfn, err)
		return nil
	}
	h.sriov = dir.Has("sriov_totalvfs")
	// The kernel shows a new VF before it makes the VF's physfn (pci_iov_add_virtfn in drivers/pci/iov.c).
	h.lasting = numaErr == nil && (h.sriov || h.physfn != "")
	return h
}

// findVFs finds where each VF belongs, and how many VFs each PF has, by one look into the directory of each PF.
func (s *scanner) findVFs() {
	for _, h := range s.known {
		h.numVFs, h.pf, h.index = 0, "", 0
	}
	for address, pf := range s.known {
		if pf.class == "" || !pf.sriov {
			continue
		}
		dir := s.sysfs.PCI(address)
		entries, _, err := dir.Names()
		s.report(dir, reasonDevice, err)
		for _, name := range entries {
			index, ok := sysfs.VFIndex(name)
			if !ok {
				continue
			}
			target, err := s.virtfnTarget(dir, name)
			if err != nil {
				s.report(dir.Dir(name), reasonVirtfn, err)
				continue
			}
			pf.numVFs++
			vf := s.known[target]
			if vf == nil || vf.class == "" || vf.physfn != address && vf.physfn != "" {
				continue // what is wrong is wrong with the VF
			}
			if vf.pf == "" || index < vf.index {
				vf.pf, vf.index = address, index
			}
		}
	}
}

// virtfnTarget returns the VF that a PF's link leads to. The VF exists, but may be one that is skipped.
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

// pciFunctions returns the PFs and VFs.
func (s *scanner) pciFunctions() []function.Function {
	functions := make([]function.Function, 0, len(s.known))
	s.pfs = map[pci.Address]function.Function{}
	for address, h := range s.known {
		_, pfExists := s.known[h.physfn]
		switch {
		case h.class == "" || h.pf != "":
		case h.physfn == "":
			f := s.pciFunction(address, h)
			s.pfs[address] = f
			functions = append(functions, f)
		case pfExists:
			s.report(s.sysfs.PCI(address), reasonVirtfn, fmt.Errorf("PF %s has no virtfn link to it", h.physfn))
		default:
			s.report(s.sysfs.PCI(address), reasonPhysfn, fmt.Errorf("PF %s is not there", h.physfn))
		}
	}
	for address, h := range s.known {
		if h.pf != "" { // VFs take some of what their PF has
			functions = append(functions, s.pciFunction(address, h))
		}
	}
	return functions
}

func (s *scanner) pciFunction(address pci.Address, h *hardware) function.Function {
	f := function.Function{
		ID: function.ID{Address: address}, Kind: function.PF, Class: h.class, PF: address, Index: -1, NumVFs: h.numVFs,
		Vendor: h.vendor, Device: h.device, ACPIIndex: h.acpiIndex, NUMANode: h.numaNode, PCIeRoot: h.root,
	}
	if h.pf != "" {
		f.Kind, f.PF, f.Index, f.NumVFs = function.VF, h.pf, h.index, 0
	}
	return s.complete(f, s.sysfs.PCI(address), h.instance)
}

// addSubfunctions adds the SFs of PFs.
func (s *scanner) addSubfunctions(functions []function.Function) ([]function.Function, error) {
	found, err := subfunctions(s.sysfs)
	if err != nil {
		return nil, err
	}
	seen := map[function.ID]string{}
	for _, sf := range found {
		pf, exists := s.pfs[sf.parent]
		f := function.PotentialSF(pf, sf.sfnum)
		f.Potential, f.AuxDevice = false, filepath.Base(string(sf.dir))
		first, taken := seen[f.ID]
		switch {
		case sf.err != nil:
		case !exists || pf.Class != function.Network:
			sf.why, sf.err = reasonParent, fmt.Errorf("PF %s is not there", sf.parent)
		case taken:
			sf.why, sf.err = reasonSFNum, fmt.Errorf("sfnum %d belongs to %s", sf.sfnum, first)
		}
		if sf.err != nil {
			s.report(sf.dir, sf.why, sf.err)
			continue
		}
		seen[f.ID] = filepath.Join(sysfs.AuxiliaryDevices, f.AuxDevice)
		now, _ := instanceOf(sf.dir) // the zero value, which is no other's, if it just went
		functions = append(functions, s.complete(f, sf.dir, now))
	}
	return functions, nil
}
