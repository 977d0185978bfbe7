package card

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/vpd"
)

// readSerial asks the driver, and if that does not tell, reads the card's Vital Product Data.
func readSerial(sysRoot string, pf pci.Address) (string, error) {
	serial, err := devlinkSerial(pf)
	if err != nil || serial != "" {
		return serial, err
	}
	return vpdSerial(sysRoot, pf)
}

// devlinkSerial returns what "devlink dev info" shows as serial_number, "" where a driver tells none. Its socket is its own, so that a
// card that hangs holds up no other.
func devlinkSerial(pf pci.Address) (string, error) {
	conn, err := devlink.Dial("")
	if err != nil {
		return "", err
	}
	defer conn.Close()
	info, err := conn.Info(devlink.OfPCI(pf))
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) {
		return "", nil
	}
	return info.Serial, err
}

// vpdSerial returns "" where a card has no Vital Product Data.
func vpdSerial(sysRoot string, pf pci.Address) (string, error) {
	file, err := os.Open(string(sysfs.Root(sysRoot).PCI(pf).Dir("vpd")))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer file.Close()
	serial, err := vpd.SerialNumber(file)
	if err != nil {
		return "", fmt.Errorf("vpd: %w", err)
	}
	return serial, nil
}

// permanentMAC asks the kernel for the address that a netdev was made with, "" if it has none or is gone.
func permanentMAC(netdev string) (function.MAC, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return "", fmt.Errorf("socket: %w", err)
	}
	defer handle.Close()
	link, err := handle.LinkByName(netdev)
	if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("netdev %s: %w", netdev, err)
	}
	address := link.Attrs().PermHWAddr
	if len(address) != 6 { // InfiniBand's are longer
		return "", nil
	}
	return function.MAC(address.String()), nil
}
