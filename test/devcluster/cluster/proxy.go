// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// acceptPause is the wait after a connection could not be accepted.
const acceptPause = 50 * time.Millisecond

// forward accepts connections on a listener of the machine's network namespace and joins each with
// one to target, an address in the cluster's. The machine's links stay as they are. It ends with
// the listener.
func forward(ctx context.Context, listener net.Listener, target string) {
	for {
		outer, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}

		if err != nil {
			// Too many open files, or a connection that was gone at once: both pass.
			select {
			case <-ctx.Done():
				return
			case <-time.After(acceptPause):
				continue
			}
		}

		go join(ctx, outer.(*net.TCPConn), target)
	}
}

func join(ctx context.Context, outer *net.TCPConn, target string) {
	defer outer.Close()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", target)
	if err != nil {
		return
	}

	inner := conn.(*net.TCPConn)
	defer inner.Close()

	var both sync.WaitGroup
	both.Go(func() { pour(outer, inner) })
	both.Go(func() { pour(inner, outer) })
	both.Wait()
}

// pour copies until the source says that it will send no more, and passes that on. The kernel moves
// the bytes (splice). A broken connection ends both directions.
func pour(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		from.Close()
		return
	}
	to.CloseWrite()
}
