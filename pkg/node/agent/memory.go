// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// startTime is how long a start takes, including the ResourceSlices of many Functions.
const startTime = 3 * time.Second

// trim returns memory to the kernel that only the start needed. This is half of the heap, which the
// Go runtime would keep for minutes, and pages of the program, most of which only initialise the
// libraries.
func (a *agent) trim(ctx context.Context) error {
	if !loop.Sleep(ctx, startTime) {
		return nil
	}

	debug.FreeOSMemory()
	if err := unmapProgram(); err != nil {
		a.env.log.V(1).Info("The pages of the program that only its start needed stay in memory",
			"error", err.Error())
	}

	return nil
}

// unmapProgram unmaps the pages of the program's code and constants. The kernel maps pages again
// from its page cache or the file when they are needed; see madvise(2), MADV_DONTNEED. Writable
// pages stay, because their content would be lost.
func unmapProgram() error {
	self, err := procfs.Self()
	if err != nil {
		return err
	}

	program, err := self.Executable()
	if err != nil {
		return err
	}

	mappings, err := self.ProcMaps()
	if err != nil {
		return err
	}

	var errs []error
	for _, m := range mappings {
		if m.Pathname != program || m.Perms.Write {
			continue
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.StartAddr, m.EndAddr-m.StartAddr,
			unix.MADV_DONTNEED); errno != 0 {
			errs = append(errs, fmt.Errorf("madvise %x-%x: %w", m.StartAddr, m.EndAddr, errno))
		}
	}

	return errors.Join(errs...)
}
