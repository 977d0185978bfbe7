// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
)

// TestLimitConnections: connections beyond the limits are closed at once, and there is room again
// when others end.
func TestLimitConnections(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	limited := &limitedListener{
		Listener: lis, log: testr.New(t), max: 5, maxOfAnAddress: 3, of: map[string]int{},
	}
	t.Cleanup(func() { _ = limited.Close() })

	accepted := make(chan net.Conn, 100)
	go func() {
		for {
			conn, err := limited.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- conn
		}
	}()

	dial := func(from string) net.Conn {
		t.Helper()
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		conn, err := dialer.Dial("tcp", lis.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}

	refused := func(from string) {
		t.Helper()
		conn := dial(from)
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !isReset(err) {
			t.Errorf("a connection of %s beyond the limit: %v, want it closed", from, err)
		}
	}

	var first net.Conn
	for range 3 {
		dial("127.0.0.2")
		first = <-accepted
	}

	refused("127.0.0.2")
	for range 2 {
		dial("127.0.0.3")
		<-accepted
	}

	refused("127.0.0.3")
	refused("127.0.0.4")

	for range 2 { // the second time nothing is given back
		_ = first.Close()
	}

	dial("127.0.0.2")
	<-accepted
	refused("127.0.0.2")
}

func isReset(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && !op.Timeout()
}
