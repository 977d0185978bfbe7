// SPDX-License-Identifier: Apache-2.0

// Package uptime orders moments by the time since a boot, because changes of the wall clock do not
// affect it.
package uptime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Moment is a point in time, given as the time since a boot.
type Moment struct {
	BootID string `json:"bootID"` // content of /proc/sys/kernel/random/boot_id
	// Since is the time since the boot in nanoseconds. It includes the time in which the machine
	// was suspended (CLOCK_BOOTTIME).
	Since time.Duration `json:"since"`
}

// Of returns the current moment. bootID is the current boot.
func Of(bootID string) Moment {
	var now unix.Timespec
	// The call cannot fail, because Linux has had the clock since 2.6.39.
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return Moment{}
	}
	return Moment{BootID: bootID, Since: time.Duration(now.Nano())}
}

// BootID returns the ID of the current boot. procRoot is the path where procfs is mounted: "/proc".
func BootID(procRoot string) (string, error) {
	id, err := os.ReadFile(filepath.Join(procRoot, "sys/kernel/random/boot_id"))
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

// Known reports whether the moment is set.
func (m Moment) Known() bool { return m.BootID != "" }

// After reports whether m is after other. bootID is the current boot, which is after all other
// boots. known is false if the order cannot be determined: a moment is not set, or the moments
// belong to two earlier boots.
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
