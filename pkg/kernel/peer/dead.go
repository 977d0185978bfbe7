// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// RemoveDead removes the unix sockets that match a pattern of [filepath.Glob] and that nobody
// serves, as a killed process leaves them.
func RemoveDead(pattern string) error {
	paths, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}

	var errs []error
	for _, path := range paths {
		conn, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			conn.Close()
			continue
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			continue // it is gone, or no socket
		}

		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}
