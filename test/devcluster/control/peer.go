// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// ServerPID returns the process that listens on a unix socket, as a PID in the caller's PID
// namespace. The kernel translates it (SO_PEERCRED, unix(7)).
func ServerPID(ctx context.Context, socket string) (int, error) {
	conn, err := Dial(ctx, socket)
	if err != nil {
		return 0, err
	}
	defer conn.Close()

	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}

	var credentials *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		credentials, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}

	if failed != nil {
		return 0, fmt.Errorf("socket %s: %w", socket, failed)
	}

	return int(credentials.Pid), nil
}
