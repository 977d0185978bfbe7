// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// Properties of Functions, as they are shown to people. docs/reference/verification.md lists them.
const (
	propertyDriver      = "driver"      // of a PF or VF
	propertyNetdev      = "netdev"      // of every Function
	propertyNumVFs      = "vfs"         // how many VFs a PF has
	propertySFs         = "sfs"         // how many SFs a PF has
	propertyUplink      = "uplink"      // the netdev of a PF that stands for the wire
	propertyPF          = "pf"          // of a VF
	propertyVFIndex     = "vf-index"    // of a VF at its PF
	propertySFNum       = "sfnum"       // of an SF's auxiliary device
	propertyAuxDevice   = "aux-device"  // of the SF with an sfnum at a PF
	propertyRepresentor = "representor" // of a VF or SF
	propertyPKey        = "pkey"        // first InfiniBand partition key
)

// vfioDriver is the only driver that sriovnet knows.
const vfioDriver = "vfio-pci"

// answer is what sriovnet says about a property.
type answer struct {
	says string
	// agrees reports whether the inventory says the same.
	agrees bool
}

// question is a property of a Function with the inventory's value.
type question struct {
	property  string
	inventory string
	look      string // shell command that shows what the kernel says
	// ask asks sriovnet. An error means that the inventory or sriovnet cannot say what the
	// property is.
	ask func() (answer, error)
}

// view is what questions refer to beside the Function.
type view struct {
	reader   Reader
	netdevs  map[pci.Address]string     // of PFs
	sfs      map[pci.Address]int        // number of SFs by PF
	owners   map[string]function.ID     // Functions by netdev
	ports    map[portKey][]devlink.Port // local ports of VFs and SFs
	portsErr error
}

// portKey identifies the port of a VF or SF at its eswitch.
type portKey struct {
	device  devlink.Device
	flavour devlink.Flavour
	number  uint32
}

func newView(
	functions []function.Function, ports []devlink.Port, portsErr error, reader Reader,
) *view {
	v := &view{
		reader: reader, netdevs: map[pci.Address]string{}, sfs: map[pci.Address]int{},
		owners: map[string]function.ID{}, ports: map[portKey][]devlink.Port{}, portsErr: portsErr,
	}

	for _, f := range functions {
		switch f.Kind {
		case function.PF:
			v.netdevs[f.PF] = f.Netdev
		case function.SF:
			v.sfs[f.PF]++
		}

		if f.Netdev != "" {
			v.owners[f.Netdev] = f.ID
		}
	}

	for _, port := range ports {
		key := portKey{port.Device, port.Flavour, uint32(port.VF)}
		if port.Flavour == devlink.PCISF {
			key.number = port.SF
		}
		if !port.External {
			v.ports[key] = append(v.ports[key], port)
		}
	}

	return v
}

// questions returns all questions about a Function.
func (v *view) questions(f function.Function) []question {
	switch {
	case f.Kind == function.SF:
		return []question{v.netdev(f), v.sfNum(f), v.auxDevice(f), v.representor(f)}
	case f.Kind == function.VF:
		all := []question{v.driver(f), v.netdev(f), v.pf(f), v.vfIndex(f), v.representor(f)}
		return append(all, v.pkey(f)...)
	case f.Class == function.Network:
		all := []question{v.driver(f), v.netdev(f), v.numVFs(f), v.countSFs(f), v.uplink(f)}
		return append(all, v.pkey(f)...)
	}
	return []question{v.driver(f)}
}

func (v *view) driver(f function.Function) question {
	return question{
		propertyDriver, cmp.Or(f.Driver, "none"), "readlink " + sysfsOf(f) + "/driver",
		func() (answer, error) {
			if !v.reader.IsBoundToVFIO(string(f.ID.Address)) {
				return answer{}, errors.New("sriovnet knows no driver but " + vfioDriver)
			}
			return answer{vfioDriver, f.Driver == vfioDriver}, nil
		},
	}
}

func (v *view) netdev(f function.Function) question {
	ask := func() ([]string, error) { return v.reader.NetDevicesFromPCI(string(f.ID.Address)) }
	if f.Kind == function.SF {
		ask = func() ([]string, error) { return v.reader.NetDevicesFromAux(f.AuxDevice) }
	}

	inventory := f.Netdev
	switch {
	case f.Netdev == "" && f.NoNetdev:
		inventory = "none"
	case f.Netdev == "":
		inventory = "none on the host"
	}

	return question{
		propertyNetdev, inventory, "ls " + sysfsOf(f) + "/net", func() (answer, error) {
			if isOnVirtioVDPA(f) {
				return answer{}, errors.New("sriovnet knows no vDPA devices")
			}

			names, err := ask()
			agrees := slices.Contains(names, f.Netdev)
			if f.Netdev == "" {
				agrees = len(names) == 0
			}

			return answer{listed(names), agrees}, err
		},
	}
}

func (v *view) numVFs(f function.Function) question {
	return question{
		propertyNumVFs, strconv.Itoa(f.NumVFs), "ls -d " + sysfsOf(f) + "/virtfn*",
		func() (answer, error) {
			switch {
			case f.Netdev == "":
				return answer{}, errors.New("sriovnet finds VFs by the netdev of their PF, which " +
					"is not on the host")
			case f.Driver == quirk.VirtioDriver || isOnVirtioVDPA(f):
				return answer{}, errors.New("sriovnet does not find the VFs of a PF whose netdev " +
					"belongs to a virtio device")
			}

			links, err := v.reader.VFsOf(f.Netdev)
			return answer{strconv.Itoa(len(links)), len(links) == f.NumVFs}, err
		},
	}
}

func (v *view) countSFs(f function.Function) question {
	want := v.sfs[f.PF]
	return question{
		propertySFs, strconv.Itoa(want), "ls -d " + sysfsOf(f) + "/*.sf.*",
		func() (answer, error) {
			devices, err := v.reader.AuxDevicesFromPCI(string(f.PF))
			n := 0
			for _, device := range devices {
				if strings.Contains(device, ".sf.") {
					n++
				}
			}
			return answer{strconv.Itoa(n), n == want}, err
		},
	}
}

func (v *view) uplink(f function.Function) question {
	return question{
		propertyUplink, cmp.Or(f.Netdev, "none on the host"),
		"devlink port show; grep . " + sysfsOf(f) + "/net/*/phys_port_name",
		func() (answer, error) {
			if isOnVirtioVDPA(f) {
				return answer{}, errors.New("sriovnet knows no vDPA devices")
			}
			name, err := v.reader.UplinkRepresentor(string(f.PF))
			return answer{name, name == f.Netdev}, err
		},
	}
}

func (v *view) pf(f function.Function) question {
	return question{
		propertyPF, string(f.PF), "readlink " + sysfsOf(f) + "/physfn",
		func() (answer, error) {
			pf, err := v.reader.PFFromVF(string(f.ID.Address))
			return answer{pf, pf == string(f.PF)}, err
		},
	}
}

func (v *view) vfIndex(f function.Function) question {
	return question{
		propertyVFIndex, strconv.Itoa(f.Index),
		fmt.Sprintf("ls -l %s/physfn/ | grep %s", sysfsOf(f), f.ID.Address),
		func() (answer, error) {
			index, err := v.reader.VFIndex(string(f.ID.Address))
			return answer{strconv.Itoa(index), index == f.Index}, err
		},
	}
}

func (v *view) sfNum(f function.Function) question {
	return question{
		propertySFNum, strconv.Itoa(f.Index), "grep . " + sysfsOf(f) + "/sfnum",
		func() (answer, error) {
			sfnum, err := v.reader.SFNumOfAux(f.AuxDevice)
			return answer{strconv.Itoa(sfnum), sfnum == f.Index}, err
		},
	}
}

func (v *view) auxDevice(f function.Function) question {
	return question{
		propertyAuxDevice, f.AuxDevice, "grep . " + sysfsOf(f) + "/sfnum",
		func() (answer, error) {
			sfnum, _ := f.ID.SFNum()
			device, err := v.reader.AuxDeviceOfSF(string(f.PF), sfnum)
			return answer{device, device == f.AuxDevice}, err
		},
	}
}

// representor asks for the netdev that stands for a VF or SF at the eswitch. The inventory has no
// representors, but the list of devlink ports has: opi-bridge finds representors in it. The
// inventory says that no Function has a representor for its netdev.
func (v *view) representor(f function.Function) question {
	ask, flavour := v.reader.VFRepresentor, devlink.PCIVF
	if f.Kind == function.SF {
		ask, flavour = v.reader.SFRepresentor, devlink.PCISF
	}

	ports := v.ports[portKey{devlink.OfPCI(f.PF), flavour, uint32(f.Index)}]
	known := "unknown"
	if len(ports) == 1 && ports[0].Netdev != "" {
		known = ports[0].Netdev
	}

	q := question{
		property: propertyRepresentor, inventory: known,
		look: "devlink port show | grep -A1 pci/" + string(f.PF),
	}

	q.ask = func() (answer, error) {
		name, err := ask(string(f.PF), f.Index)
		switch owner, owned := v.owners[name]; {
		case err != nil:
			return answer{}, err
		case owned:
			return answer{fmt.Sprintf("%s, which the inventory has as netdev of %s", name, owner),
				false}, nil
		case v.portsErr != nil:
			return answer{}, v.portsErr
		case known == "unknown":
			return answer{}, fmt.Errorf("devlink lists %d ports of it, and sriovnet says %s",
				len(ports), name)
		}
		return answer{name, name == known}, nil
	}

	return q
}

// pkey returns no question if the Function has no partition key.
func (v *view) pkey(f function.Function) []question {
	if f.PKey == "" {
		return nil
	}
	return []question{{
		propertyPKey, f.PKey, "grep . " + sysfsOf(f) + "/infiniband/*/ports/1/pkeys/0",
		func() (answer, error) {
			key, err := v.reader.DefaultPKey(string(f.ID.Address))
			return answer{key, key == f.PKey}, err
		},
	}}
}

// isOnVirtioVDPA reports whether the inventory has the netdev below the Function's vDPA device.
func isOnVirtioVDPA(f function.Function) bool { return f.VDPA.Driver == "virtio_vdpa" }

// sysfsOf returns the path of a Function's device in sysfs, for a shell. The path of an SF matches
// all SFs of its PF, so that no name of a device gets into a command.
func sysfsOf(f function.Function) string {
	path := "/sys/bus/pci/devices/" + string(f.ID.Address)
	if f.Kind == function.SF {
		return path + "/*.sf.*"
	}
	return path
}

// maxNames is how many netdevs of a Function are listed.
const maxNames = 4

// listed lists the first of some names.
func listed(names []string) string {
	switch n := len(names); {
	case n == 0:
		return "none"
	case n > maxNames:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNames], ", "), n-maxNames)
	}
	return strings.Join(names, ", ")
}
