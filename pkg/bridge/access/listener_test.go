// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
)

// TestLimitConnections checks that connections beyond the limits are closed at once, and that a
// connection that ends makes room for another one.
func TestLimitConnections(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	limited := &limitedListener{
		Listener: lis, log: testr.New(t), max: 5, maxPerAddress: 3,
		byAddress: map[string]int{},
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

	for range 2 { // the second Close must not count
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

func TestCheckPlaintext(t *testing.T) {
	for address, ok := range map[string]bool{
		"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "127.8.8.8:1": true,
		"0.0.0.0:1": false, ":1": false, "192.0.2.1:1": false, "xpu.example:1": false,
		"127.0.0.1": false,
	} {
		if err := CheckPlaintext(address); (err == nil) != ok {
			t.Errorf("%s: %v", address, err)
		}
	}
}
