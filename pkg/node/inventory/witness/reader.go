// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"fmt"
	"os"
	"sync"

	"github.com/k8snetworkplumbingwg/sriovnet"
	"github.com/k8snetworkplumbingwg/sriovnet/pkg/utils/netlinkops"
	"github.com/vishvananda/netlink"
)

// Reader has the functions of sriovnet that say what the inventory says too. An error means that
// sriovnet cannot say. PCI devices are named by their addresses, and auxiliary devices by names
// such as "mlx5_core.sf.4".
//
// GetPfPciFromAux, GetUplinkRepresentorFromAux and GetPciFromNetDevice are left out, because
// version 1.3.0 never returns from them if the device is below no PCI device with a domain of 16
// bits.
type Reader struct {
	NetDevicesFromPCI func(device string) ([]string, error)
	PFFromVF          func(vf string) (string, error)
	VFIndex           func(vf string) (int, error)
	VFsOf             func(pfNetdev string) ([]string, error) // "virtfn0" and so on
	UplinkRepresentor func(pf string) (string, error)
	VFRepresentor     func(pf string, index int) (string, error)
	AuxDevicesFromPCI func(pf string) ([]string, error)
	SFNumOfAux        func(auxDevice string) (int, error)
	AuxDeviceOfSF     func(pf string, sfnum uint32) (string, error)
	NetDevicesFromAux func(auxDevice string) ([]string, error)
	SFRepresentor     func(pf string, sfnum int) (string, error)
	DefaultPKey       func(device string) (string, error)
	IsBoundToVFIO     func(device string) bool // false also if sriovnet cannot say
}

// Sriovnet returns a Reader that calls sriovnet. All its calls use one list of devlink ports, which
// is read at the first call that needs it, because sriovnet lists the ports of all devices for each
// representor, and cards answer slowly. sriovnet has its access to netlink in a package variable:
// only one Reader may be in use at a time.
func Sriovnet() Reader {
	usePorts(netlink.DevLinkGetAllPortList)
	return Reader{
		NetDevicesFromPCI: sriovnet.GetNetDevicesFromPci,
		PFFromVF:          sriovnet.GetPfPciFromVfPci,
		VFIndex:           sriovnet.GetVfIndexByPciAddress,
		VFsOf:             sriovnet.GetVfPciDevList,
		UplinkRepresentor: sriovnet.GetUplinkRepresentor,
		VFRepresentor:     sriovnet.GetVfRepresentor,
		AuxDevicesFromPCI: sriovnet.GetAuxNetDevicesFromPci,
		SFNumOfAux:        sriovnet.GetSfIndexByAuxDev,
		AuxDeviceOfSF:     sriovnet.GetAuxSFDevByPciAndSFIndex,
		NetDevicesFromAux: sriovnet.GetNetDevicesFromAux,
		SFRepresentor:     sriovnet.GetSfRepresentor,
		DefaultPKey:       sriovnet.GetDefaultPKeyFromPci,
		IsBoundToVFIO:     sriovnet.IsVfPciVfioBound,
	}
}

// usePorts makes sriovnet call list once for all devlink ports.
func usePorts(list func() ([]*netlink.DevlinkPort, error)) {
	netlinkops.SetNetlinkOps(&portList{all: sync.OnceValues(list)})
}

// portList is sriovnet's access to netlink with one list of devlink ports. The functions that
// Sriovnet returns ask netlink for nothing else.
type portList struct {
	netlinkops.NetlinkOps // nil
	all                   func() ([]*netlink.DevlinkPort, error)
}

func (l *portList) DevLinkGetAllPortList() ([]*netlink.DevlinkPort, error) { return l.all() }

func (l *portList) DevLinkGetDevicePortList(
	bus, device string,
) ([]*netlink.DevlinkPort, error) {
	all, err := l.all()
	if err != nil {
		return nil, err
	}

	var ports []*netlink.DevlinkPort
	for _, port := range all {
		if port.BusName == bus && port.DeviceName == device {
			ports = append(ports, port)
		}
	}

	return ports, nil
}

// sriovnetRoot is where sriovnet looks for sysfs, which cannot be changed.
const sriovnetRoot = "/sys"

// checkRoot returns an error if sriovnet does not read the sysfs at sysRoot. A container has the
// host's sysfs at several paths, which then are the same directory of the same file system.
func checkRoot(sysRoot string) error {
	ours, err := os.Stat(sysRoot)
	if err != nil {
		return err
	}

	theirs, err := os.Stat(sriovnetRoot)
	if err != nil {
		return err
	}
	if !os.SameFile(ours, theirs) {
		return fmt.Errorf("the inventory was read below %s, and sriovnet can read only %s, which "+
			"is another file system", sysRoot, sriovnetRoot)
	}

	return nil
}
