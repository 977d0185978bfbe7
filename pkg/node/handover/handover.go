// SPDX-License-Identifier: Apache-2.0

// Package handover passes a node from the running agent to an agent that was started to replace it,
// as an upgrade with maxSurge does. No request finds the node without an agent.
//
// The new agent (the successor) connects to a unix socket of the running agent (the predecessor)
// and asks for the node. The predecessor completes its work, closes the journal, and answers. The
// answer carries the listening socket of the CNI server (SCM_RIGHTS, see unix(7)), in whose queue
// requests wait in the meantime. The connection stays open as long as both agents run, so that each
// agent sees when the other one has ended.
package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

const (
	// version is the version of the protocol. A request in another version is refused.
	version = 1
	// helloTimeout is how long a successor may take from its connection to its request. The kubelet
	// registers the successor in the meantime.
	helloTimeout = 10 * time.Second
	acceptPause  = 100 * time.Millisecond
	// maxMessage is the size limit of a message in bytes.
	maxMessage = 4096
	maxFiles   = 8
)

// hello is the request of a successor.
type hello struct {
	Version int `json:"version"`
	// Program is the version of the successor, for the log.
	Program string `json:"program"`
}

// answer is sent when the predecessor has completed its work.
type answer struct {
	// Error is the reason of a refusal.
	Error string `json:"error,omitempty"`
}

// Holder is the agent that has the node.
type Holder struct {
	// Socket is the path of the socket. Only the agent may use its directory.
	Socket string
	Log    logr.Logger
}

// Await waits for the first successor that asks for the node. It returns nil without an error when
// ctx ends. It returns an error only if it cannot listen.
func (h Holder) Await(ctx context.Context) (*Successor, error) {
	// The journal is open in one agent only, so that no other agent listens on an existing socket.
	if err := os.Remove(h.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("handover socket: %w", err)
	}

	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.Socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	defer listener.Close() // removes the socket

	if err := os.Chmod(h.Socket, 0o600); err != nil {
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	defer context.AfterFunc(ctx, func() { listener.Close() })()

	for {
		conn, err := listener.AcceptUnix()
		if ctx.Err() != nil {
			return nil, nil
		}
		if errors.Is(err, net.ErrClosed) {
			return nil, fmt.Errorf("handover socket: %w", err)
		}

		if err != nil { // for example, no file descriptor is left
			h.Log.Error(err, "Connection to the handover socket cannot be taken")
			loop.Sleep(ctx, acceptPause)
			continue
		}

		program, err := receiveHello(conn)
		if err == nil {
			h.Log.Info("Another agent asks for the node; it gets it once the requests that run "+
				"are done", "version", program)
			return &Successor{conn: conn}, nil
		}

		h.Log.Error(err, "Connection to the handover socket refused")
		reply, _ := json.Marshal(answer{Error: err.Error()})
		_, _ = conn.Write(reply)
		conn.Close()
	}
}

// receiveHello reads the request of a successor, and returns the successor's version.
func receiveHello(conn *net.UnixConn) (program string, err error) {
	if err := peer.Check(conn); err != nil {
		return "", err
	}
	if err := conn.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return "", err
	}

	var asked hello
	if err := json.NewDecoder(io.LimitReader(conn, maxMessage)).Decode(&asked); err != nil {
		return "", fmt.Errorf("request: %w", err)
	}
	if asked.Version != version {
		return "", fmt.Errorf("handover in version %d of the protocol, this agent speaks %d",
			asked.Version, version)
	}

	return asked.Program, conn.SetReadDeadline(time.Time{})
}

// Successor is an agent that waits for the node.
type Successor struct{ conn *net.UnixConn }

// Give passes the node and the files to the successor. The files stay open in this process too.
func (s *Successor) Give(files ...*os.File) error {
	message, err := json.Marshal(answer{})
	if err != nil {
		return err
	}

	var descriptors []int
	for _, file := range files {
		descriptors = append(descriptors, int(file.Fd()))
	}
	if _, _, err := s.conn.WriteMsgUnix(message, unix.UnixRights(descriptors...), nil); err != nil {
		return fmt.Errorf("give the node to the other agent: %w", err)
	}

	return nil
}

// AwaitEnd returns when the successor's process has ended, or when ctx ends.
func (s *Successor) AwaitEnd(ctx context.Context) { awaitEnd(ctx, s.conn) }

// Close shows the successor that this agent has ended.
func (s *Successor) Close() error { return s.conn.Close() }

// awaitEnd reads until the other agent closes the connection, or until ctx ends. Neither agent
// sends anything in this phase.
func awaitEnd(ctx context.Context, conn *net.UnixConn) {
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
	_, _ = io.Copy(io.Discard, conn)
}

// Predecessor is the agent that had the node before.
type Predecessor struct {
	conn *net.UnixConn
	// Files are the files that the predecessor gave, in its order. The caller must close them.
	Files []*os.File
}

// Dial connects to the agent behind a socket. It returns nil without an error if no process listens
// there: there is no other agent, or it does not support handovers.
func Dial(ctx context.Context, socket string) (*Predecessor, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for the node: %w", err)
	}
	return &Predecessor{conn: conn.(*net.UnixConn)}, nil
}

// Take asks for the node and returns when the predecessor has completed its work, or when ctx ends.
// It must be called within 10 s after [Dial]. After an error, the Predecessor must not be used any
// more.
func (p *Predecessor) Take(ctx context.Context, program string) (err error) {
	if p.Files, err = ask(ctx, p.conn, program); err != nil {
		p.conn.Close()
		return fmt.Errorf("ask for the node: %w", errors.Join(err, context.Cause(ctx)))
	}
	return nil
}

func ask(ctx context.Context, conn *net.UnixConn, program string) ([]*os.File, error) {
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
	if err := json.NewEncoder(conn).Encode(hello{Version: version, Program: program}); err != nil {
		return nil, err
	}

	message, rights := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(maxFiles*4))
	n, rightsLen, _, _, err := conn.ReadMsgUnix(message, rights)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, errors.New("the other agent ended before it answered")
	}

	files, err := received(rights[:rightsLen])
	if err != nil {
		return nil, err
	}

	var got answer
	if err := json.Unmarshal(message[:n], &got); err != nil {
		return nil, errors.Join(fmt.Errorf("answer: %w", err), closeAll(files))
	}
	if got.Error != "" {
		return nil, errors.Join(errors.New(got.Error), closeAll(files))
	}

	return files, nil
}

// received returns the files of a control message.
func received(rights []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}

	for i := range messages {
		descriptors, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return nil, errors.Join(err, closeAll(files))
		}
		for _, fd := range descriptors {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "handed over"))
		}
	}

	return files, nil
}

func closeAll(files []*os.File) error {
	var errs []error
	for _, file := range files {
		errs = append(errs, file.Close())
	}
	return errors.Join(errs...)
}

// AwaitEnd returns when the predecessor's process has ended, or when ctx ends.
func (p *Predecessor) AwaitEnd(ctx context.Context) { awaitEnd(ctx, p.conn) }

// Close shows the predecessor that this agent has ended.
func (p *Predecessor) Close() error { return p.conn.Close() }
