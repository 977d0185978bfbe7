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

// hardware is what does not change as long as a PCI device exists, so it is read once.
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

	known    map[pci.Address]hardware
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
	places, numVFs := s.findVFs()
	s.readVDPAs()
	s.readRoutes()
	s.before, s.lastSeen = s.lastSeen, make(map[function.ID]lastSeen, len(s.lastSeen))
	functions, err := s.addSubfunctions(s.pciFunctions(places, numVFs))
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

// report notes a problem with an entry of sysfs.
func (s *scanner) report(entry sysfs.Dir, why reason, err error) {
	below := strings.TrimPrefix(string(entry), string(s.sysfs.Dir()))
	s.problems[problem{strings.TrimPrefix(below, "/"), why}] = err
}

// readHardware brings known up to date. It leaves out what cannot be read.
func (s *scanner) readHardware(entries []string) {
	known := make(map[pci.Address]hardware, len(entries))
	for _, name := range entries {
		address, err := pci.Parse(name)
		if err != nil || string(address) != name {
			s.report(s.sysfs.Dir(sysfs.PCIDevices, name), reasonAddress, errors.New("is not a PCI address"))
			continue
		}
		dir, why := s.sysfs.PCI(address), reasonDevice
		now, err := instanceOf(dir)
		h, ok := s.known[address]
		if err == nil && (!ok || !h.lasting || h.instance != now) {
			h, why, err = s.readDevice(dir)
			h.instance = now
		}
		if err != nil {
			s.report(dir, why, err)
			continue
		}
		known[address] = h
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

// readDevice reads what does not change of a device. why is the reason of an error, which means that the device has to be
// skipped.
func (s *scanner) readDevice(dir sysfs.Dir) (h hardware, why reason, err error) {
	class, err := dir.Attribute("class")
	if err == nil {
		h.class, err = parseClass(class)
	}
	if err != nil || h.class == "" {
		h.lasting = true
		return h, reasonClass, err
	}
	for name, id := range map[string]*string{"vendor": &h.vendor, "device": &h.device} {
		text, err := dir.Attribute(name)
		if err == nil {
			*id, err = parseID(text)
		}
		if err != nil {
			return h, reasonID, fmt.Errorf("%s: %w", name, err)
		}
	}
	h.numaNode = -1
	numaNode, numaErr := dir.Attribute("numa_node")
	if numaErr == nil {
		h.numaNode, numaErr = parseNUMANode(numaNode)
	} else if errors.Is(numaErr, fs.ErrNotExist) {
		numaErr = nil // the kernel was built without NUMA
	}
	if numaErr != nil {
		s.report(dir, reasonNUMANode, numaErr)
	}
	if link, err := dir.Target(); err == nil {
		h.root = parseRoot(link)
	}
	h.acpiIndex, _ = dir.Attribute("acpi_index") // few devices have one
	pf, err := dir.Link("physfn")
	if err == nil && pf != "" {
		h.physfn, err = pci.Parse(pf)
	}
	h.sriov = dir.Has("sriov_totalvfs")
	// The kernel shows a new VF before it makes the VF's physfn (pci_iov_add_virtfn in drivers/pci/iov.c).
	h.lasting = numaErr == nil && (h.sriov || h.physfn != "")
	return h, reasonPhysfn, err
}

// pciFunctions puts PFs and VFs together: VFs last, as they take some of what their PF has.
func (s *scanner) pciFunctions(places map[pci.Address]vfPlace, numVFs map[pci.Address]int) []function.Function {
	functions, vfs := make([]function.Function, 0, len(s.known)), make([]function.Function, 0, len(places))
	s.pfs = map[pci.Address]function.Function{}
	for address, h := range s.known {
		if h.class == "" {
			continue
		}
		dir := s.sysfs.PCI(address)
		f := function.Function{
			ID: function.ID{Address: address}, Kind: function.PF, Class: h.class, PF: address, Index: -1, Vendor: h.vendor, Device: h.device,
			ACPIIndex: h.acpiIndex, NUMANode: h.numaNode, PCIeRoot: h.root,
		}
		at, isVF := places[address]
		_, pfExists := s.known[h.physfn]
		switch {
		case isVF:
			f.Kind, f.PF, f.Index = function.VF, at.pf, at.index
			vfs = append(vfs, f)
		case h.physfn == "":
			f.NumVFs = numVFs[address]
			s.pfs[address] = s.complete(f, dir, h.instance)
			functions = append(functions, s.pfs[address])
		case pfExists:
			s.report(dir, reasonVirtfn, fmt.Errorf("PF %s has no virtfn link to it", h.physfn))
		default:
			s.report(dir, reasonPhysfn, fmt.Errorf("PF %s is not there", h.physfn))
		}
	}
	for _, vf := range vfs {
		functions = append(functions, s.complete(vf, s.sysfs.PCI(vf.ID.Address), s.known[vf.ID.Address].instance))
	}
	return functions
}

// vfPlace is where a VF belongs.
type vfPlace struct {
	pf    pci.Address
	index int
}

// findVFs finds where each VF belongs, and how many VFs each PF has, by one look into the directory of each PF.
func (s *scanner) findVFs() (places map[pci.Address]vfPlace, numVFs map[pci.Address]int) {
	places, numVFs = make(map[pci.Address]vfPlace, len(s.known)), map[pci.Address]int{}
	for pf, h := range s.known {
		if h.class == "" || !h.sriov {
			continue
		}
		dir := s.sysfs.PCI(pf)
		entries, _, err := dir.Names()
		if err != nil {
			s.report(dir, reasonDevice, err)
			continue
		}
		for _, name := range entries {
			index, ok := sysfs.VFIndex(name)
			if !ok {
				continue
			}
			vf, err := s.virtfnTarget(dir, name)
			if err != nil {
				s.report(dir.Dir(name), reasonVirtfn, err)
				continue
			}
			numVFs[pf]++
			h, ok := s.known[vf]
			if !ok || h.class == "" || h.physfn != pf && h.physfn != "" {
				continue // what is wrong is wrong with the VF
			}
			if other, taken := places[vf]; !taken || index < other.index {
				places[vf] = vfPlace{pf, index}
			}
		}
	}
	return places, numVFs
}

func (s *scanner) virtfnTarget(dir sysfs.Dir, name string) (pci.Address, error) {
	text, err := dir.Link(name)
	if err != nil {
		return "", err
	}
	vf := pci.Address(text)
	if _, ok := s.known[vf]; ok {
		return vf, nil
	}
	if _, err := os.Stat(string(dir.Dir(name))); err != nil {
		return "", err
	}
	return pci.Parse(text)
}

// addSubfunctions adds the SFs of PFs.
func (s *scanner) addSubfunctions(functions []function.Function) ([]function.Function, error) {
	found, err := subfunctions(s.sysfs, s.report)
	if err != nil {
		return nil, err
	}
	seen := map[function.ID]string{}
	for _, sf := range found {
		pf, ok := s.pfs[sf.parent]
		if !ok || pf.Class != function.Network {
			s.report(sf.dir, reasonParent, fmt.Errorf("PF %s is not there", sf.parent))
			continue
		}
		f := function.PotentialSF(pf, sf.sfnum)
		f.Potential, f.AuxDevice = false, filepath.Base(string(sf.dir))
		if first, taken := seen[f.ID]; taken {
			s.report(sf.dir, reasonSFNum, fmt.Errorf("sfnum %d belongs to %s", sf.sfnum, first))
			continue
		}
		seen[f.ID] = filepath.Join(sysfs.AuxiliaryDevices, f.AuxDevice)
		now, _ := instanceOf(sf.dir) // the zero value, which is no other's, if it just went
		functions = append(functions, s.complete(f, sf.dir, now))
	}
	return functions, nil
}
