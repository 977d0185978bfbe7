// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// Listed calls list, which lists netdevs, addresses or routes, until nothing changed during a call.
func Listed[T any](list func() ([]T, error)) ([]T, error) {
	for {
		all, err := list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
}
