// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"io"
	"net"
	"strings"
	"testing"
)

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// TestForward uses a server that answers after its client has closed its direction, which checks
// that each direction ends separately.
func TestForward(t *testing.T) {
	target, outer := listen(t), listen(t)
	go func() {
		for {
			conn, err := target.Accept()
			if err != nil {
				return
			}
			content, _ := io.ReadAll(conn)
			io.WriteString(conn, strings.ToUpper(string(content)))
			conn.Close()
		}
	}()

	go forward(t.Context(), outer, target.Addr().String())
	for range 3 {
		conn, err := net.Dial("tcp", outer.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()

		long := strings.Repeat("hello ", 100_000)
		if _, err := io.WriteString(conn, long); err != nil {
			t.Fatal(err)
		}
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}

		got, err := io.ReadAll(conn)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != strings.ToUpper(long) {
			t.Errorf("got %d bytes, want %d in upper case", len(got), len(long))
		}
	}
}

func TestForwardClosesWithoutTarget(t *testing.T) {
	target, outer := listen(t), listen(t)
	target.Close()
	go forward(t.Context(), outer, target.Addr().String())
	conn, err := net.Dial("tcp", outer.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("data came from nowhere")
	}
}
