package card

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

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
