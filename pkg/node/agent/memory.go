package agent

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// startTime is how long a start needs memory: until the slices of many Functions are read, made and compared.
const startTime = 3 * time.Second

// trim gives back, once, what only the start needed: heap, which is as much again as the agent keeps and which the Go
// runtime would hold on to for minutes, and pages of the program, most of which only initialise the libraries.
func trim(ctx context.Context, log logr.Logger) error {
	if !loop.Sleep(ctx, startTime) {
		return nil
	}
	debug.FreeOSMemory()
	if err := unmapProgram(); err != nil {
		log.V(1).Info("The pages of the program that only its start needed stay in memory", "error", err.Error())
	}
	return nil
}

// unmapProgram takes the pages of the program's code and constants out of the process. The kernel maps those that are
// needed again from its page cache, or from the file; see madvise(2), MADV_DONTNEED. Pages that can be written are left
// alone, as what was written to them would be lost.
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
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.StartAddr, m.EndAddr-m.StartAddr, unix.MADV_DONTNEED); errno != 0 {
			errs = append(errs, fmt.Errorf("madvise %x-%x: %w", m.StartAddr, m.EndAddr, errno))
		}
	}
	return errors.Join(errs...)
}
