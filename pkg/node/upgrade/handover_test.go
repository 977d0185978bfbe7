// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// hold starts to wait for a successor, and returns the socket and a channel with the successor.
func hold(t *testing.T) (socket string, successors <-chan *Successor) {
	t.Helper()
	socket = filepath.Join(must.SocketDir(t), "handover.sock")
	found := make(chan *Successor, 1)
	go func() {
		s, err := AwaitSuccessor(t.Context(), socket, testr.New(t))
		if err != nil {
			t.Error(err)
		}
		found <- s
	}()

	must.Eventually(t, "the socket is there", func() bool {
		_, err := os.Stat(socket)
		return err == nil
	})

	return socket, found
}

// TestHandover passes a listener with a connection in its queue.
func TestHandover(t *testing.T) {
	socket, successors := hold(t)
	taken := make(chan *Predecessor, 1)
	go func() {
		p, err := dial(t.Context(), socket)
		if err == nil {
			err = p.take(t.Context(), "v2")
		}
		if err != nil {
			t.Error(err)
		}
		taken <- p
	}()

	successor := <-successors
	listener, err := net.ListenUnix("unix",
		&net.UnixAddr{Name: filepath.Join(must.SocketDir(t), "cni.sock"), Net: "unix"})
	must.Succeed(t, err)
	listener.SetUnlinkOnClose(false)
	waiting, err := net.Dial("unix", listener.Addr().String())
	must.Succeed(t, err)
	defer waiting.Close()

	file, err := listener.File()
	must.Succeed(t, err)
	must.Succeed(t, successor.Give(file))
	must.Succeed(t, errors.Join(file.Close(), listener.Close()))

	predecessor := <-taken
	inherited, err := predecessor.Listener()
	if err != nil || inherited == nil {
		t.Fatalf("got listener %v, %v, want the one of the predecessor", inherited, err)
	}
	defer inherited.Close()

	conn, err := inherited.Accept()
	must.Succeed(t, err)
	_, err = io.WriteString(conn, "here")
	must.Succeed(t, errors.Join(err, conn.Close()))
	if text, err := io.ReadAll(waiting); err != nil || string(text) != "here" {
		t.Errorf("the connection that waited got %q, %v", text, err)
	}

	// Each agent sees the end of the other one.
	ended := make(chan struct{})
	go func() { predecessor.AwaitEnd(t.Context()); close(ended) }()
	must.Succeed(t, successor.Close())
	<-ended
}

// TestSuccessorEnds: the agent that gave the node away sees when the successor has ended.
func TestSuccessorEnds(t *testing.T) {
	socket, successors := hold(t)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		p, err := dial(ctx, socket)
		if err == nil {
			err = p.take(ctx, "v2")
		}
		failed <- err
	}()

	successor := <-successors
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("take = %v, want that it was cancelled", err)
	}

	successor.AwaitEnd(t.Context())
}

func TestNoListener(t *testing.T) {
	dir := must.SocketDir(t)
	if p, err := dial(t.Context(), filepath.Join(dir, "none.sock")); p != nil || err != nil {
		t.Errorf("without a socket: %v, %v", p, err)
	}

	dead := filepath.Join(dir, "dead.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	must.Succeed(t, err)
	listener.SetUnlinkOnClose(false)
	must.Succeed(t, listener.Close())
	if p, err := dial(t.Context(), dead); p != nil || err != nil {
		t.Errorf("with the socket of a killed agent: %v, %v", p, err)
	}
}

// TestRefuses: another program that connects gets a reason, and the agent keeps the node.
func TestRefuses(t *testing.T) {
	socket, successors := hold(t)
	for request, want := range map[string]string{
		`{"version": 2}` + "\n": "this agent speaks 1",
		"hello\n":               "request: invalid character",
	} {
		conn, err := net.Dial("unix", socket)
		must.Succeed(t, err)
		_, err = io.WriteString(conn, request)
		must.Succeed(t, err)
		text, err := io.ReadAll(conn)
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%q: answer %q, %v, want %q", request, text, err, want)
		}
		conn.Close()
	}

	select {
	case s := <-successors:
		t.Errorf("the node was given to %v", s)
	default:
	}
}
