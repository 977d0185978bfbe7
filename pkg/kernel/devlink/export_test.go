// SPDX-License-Identifier: Apache-2.0

package devlink

import (
	"errors"

	"github.com/vishvananda/netns"
)

// What the tests decode.
var (
	DecodePort     = decodePort
	DecodeReporter = decodeReporter
	DecodeRate     = decodeRate
)

// HasDevlink says whether the kernel has it at all.
func HasDevlink() bool {
	_, err := findFamily(netns.None())
	return !errors.Is(err, ErrNoDevlink)
}
