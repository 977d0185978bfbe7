// SPDX-License-Identifier: Apache-2.0

// Package peer checks who is at the other end of a unix socket.
package peer

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Check returns an error unless the process at the other end of the connection ran as root or as
// the user of this program when it connected (SO_PEERCRED of unix(7)).
func Check(conn syscall.Conn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}

	var peer *unix.Ucred
	var peerErr error
	err = raw.Control(func(fd uintptr) {
		peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, peerErr); err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}
	if peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("user %d (process %d): only root and user %d may use this socket",
			peer.Uid, peer.Pid, os.Geteuid())
	}

	return nil
}
