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

// acceptPause is the pause after a failed accept.
const acceptPause = 50 * time.Millisecond

// forward accepts connections on a listener in the machine's network namespace and connects each to
// target, an address in the cluster's. It needs no change of the machine's links. It ends with the
// listener.
func forward(ctx context.Context, listener net.Listener, target string) {
	for {
		outer, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}

		if err != nil {
			// Too many open files and a connection that was closed at once are both temporary.
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

// pour copies until the source closes its direction, and then closes it at the destination too. The
// kernel moves the bytes (splice). A broken connection ends both directions.
func pour(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		from.Close()
		return
	}
	to.CloseWrite()
}
