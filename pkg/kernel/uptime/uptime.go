// SPDX-License-Identifier: Apache-2.0

// Package uptime orders moments by the time since a boot, which no change of the wall clock moves.
package uptime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Moment is so long after a boot.
type Moment struct {
	BootID string `json:"bootID"` // of the boot, as /proc/sys/kernel/random/boot_id has it
	// Since is the time since that boot in nanoseconds. It counts while the machine is suspended
	// (CLOCK_BOOTTIME).
	Since time.Duration `json:"since"`
}

// Of is the present moment of a boot.
func Of(bootID string) Moment {
	var now unix.Timespec
	// Linux has the clock since 2.6.39
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return Moment{}
	}
	return Moment{BootID: bootID, Since: time.Duration(now.Nano())}
}

// BootID is the ID of the present boot. procRoot is where procfs is: "/proc".
func BootID(procRoot string) (string, error) {
	id, err := os.ReadFile(filepath.Join(procRoot, "sys/kernel/random/boot_id"))
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

// Known says whether the moment was told at all.
func (m Moment) Known() bool { return m.BootID != "" }

// After says whether m is after other, while bootID is the present boot. known is false where that
// cannot be found out: one of the two was not told, or both are of other boots.
func (m Moment) After(other Moment, bootID string) (after, known bool) {
	switch {
	case !m.Known() || !other.Known():
		return false, false
	case m.BootID == other.BootID:
		return m.Since > other.Since, true
	case m.BootID == bootID:
		return true, true
	}
	return false, other.BootID == bootID
}
