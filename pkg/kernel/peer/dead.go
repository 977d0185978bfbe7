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

// RemoveDead removes unix sockets whose server has ended without removing them. It looks at the
// sockets that match a pattern of [filepath.Glob].
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
			continue // the socket has gone, or the file is not a socket
		}

		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}
