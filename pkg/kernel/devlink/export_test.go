// SPDX-License-Identifier: Apache-2.0

package devlink

import (
	"errors"

	"github.com/vishvananda/netns"
)

// These functions are exported for tests.
var (
	DecodePort     = decodePort
	DecodeReporter = decodeReporter
	DecodeRate     = decodeRate
)

// HasDevlink reports whether the kernel has devlink.
func HasDevlink() bool {
	_, err := findFamily(netns.None())
	return !errors.Is(err, ErrNoDevlink)
}
