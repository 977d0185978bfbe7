// SPDX-License-Identifier: Apache-2.0

package card

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// permanentMAC asks the kernel for the address that a netdev was made with, "" if it has none or is
// gone.
func permanentMAC(netdev string) (function.MAC, error) {
	handle, err := links.Open(netns.None())
	if err != nil {
		return "", fmt.Errorf("socket: %w", err)
	}
	defer handle.Close()

	link, err := handle.LinkByName(netdev)
	if errors.Is(err, links.ErrNotFound) {
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
