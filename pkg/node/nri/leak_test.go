// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"net"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"testing"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestRefusedConnection: connections that an ending runtime accepts and closes leave no goroutine
// or file behind.
func TestRefusedConnection(t *testing.T) {
	socket := filepath.Join(must.SocketDir(t), "nri.sock")
	listener, err := net.Listen("unix", socket)
	must.Succeed(t, err)
	closing := make(chan struct{})
	go func() {
		defer close(closing)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()

	p := &Plugin{Socket: socket, Log: logr.Discard()}
	for range 300 {
		if err := p.connect(t.Context()); err == nil {
			t.Fatal("connected to a runtime that refuses")
		}
	}

	listener.Close()
	<-closing

	must.Eventually(t, "no goroutine configures a plugin", func() bool {
		var stacks strings.Builder
		must.Succeed(t, pprof.Lookup("goroutine").WriteTo(&stacks, 2))
		return !strings.Contains(stacks.String(), "Configure(")
	})
}
