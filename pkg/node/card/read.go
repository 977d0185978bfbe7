// SPDX-License-Identifier: Apache-2.0

package card

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// permanentMAC returns the permanent MAC address of a netdev in the agent's network namespace. It
// returns "" if the netdev has no such address or does not exist.
func permanentMAC(netdev string) (function.MAC, error) {
	handle, err := links.OpenReader(netns.None())
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
	if len(address) != 6 { // addresses of InfiniBand are longer
		return "", nil
	}

	return function.MAC(address.String()), nil
}
