// SPDX-License-Identifier: Apache-2.0

// Package handover passes a node from the agent that has it to another one that was started there
// to replace it, as an upgrade with maxSurge does, so that no request finds nobody.
//
// The successor connects to a unix socket of the agent that has the node, and asks. The other ends
// its work, closes the journal, and answers; with the answer goes the listening socket of the CNI
// plugin (SCM_RIGHTS of unix(7)), in whose queue requests wait meanwhile. The connection stays open
// as long as both live: its end tells the one that the other has ended.
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
	version = 1 // of the protocol; an agent that is asked in another one refuses
	// helloTimeout is how long a successor may take to ask after it connected; the kubelet learns
	// of it meanwhile.
	helloTimeout = 10 * time.Second
	acceptPause  = 100 * time.Millisecond
	maxMessage   = 4096 // bytes
	maxFiles     = 8
)

// hello is what a successor asks with.
type hello struct {
	Version int    `json:"version"`
	Program string `json:"program"` // version of the successor, for the log
}

// answer comes when the agent that had the node has ended its work.
type answer struct {
	Error string `json:"error,omitempty"` // why it does not end
}

// Holder is the side of the agent that has the node.
type Holder struct {
	Socket string // of which the directory must be the agent's own
	Log    logr.Logger
}

// Await returns the first successor that asks. It returns nil when ctx ends, and an error only if
// it cannot listen.
func (h Holder) Await(ctx context.Context) (*Successor, error) {
	// The journal lets one agent work, so nobody uses a socket that is there.
	if err := os.Remove(h.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("handover socket: %w", err)
	}

	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.Socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	defer listener.Close() // which removes it

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

		if err != nil { // out of file descriptors, say
			h.Log.Error(err, "Connection to the handover socket cannot be taken")
			loop.Sleep(ctx, acceptPause)
			continue
		}

		program, err := listen(conn)
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

// listen hears who asks.
func listen(conn *net.UnixConn) (program string, err error) {
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

// Give tells the successor that the node is its own, and passes it files. They stay open here too.
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

// AwaitGone returns when the successor has ended, or ctx ends.
func (s *Successor) AwaitGone(ctx context.Context) { awaitEnd(ctx, s.conn) }

// Close lets the successor know that this agent has ended.
func (s *Successor) Close() error { return s.conn.Close() }

// awaitEnd reads until the other side closes the connection, or ctx ends. Nobody sends anything.
func awaitEnd(ctx context.Context, conn *net.UnixConn) {
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
	_, _ = io.Copy(io.Discard, conn)
}

// Predecessor is the agent that had the node.
type Predecessor struct {
	conn *net.UnixConn
	// Files are what it gave, in its order. They belong to the caller.
	Files []*os.File
}

// Dial connects to the agent behind a socket. It returns nil without an error if nobody listens:
// there is no other agent, or one that does not hand over.
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

// Take asks for the node, within 10 s of [Dial], and returns when the predecessor has ended its
// work or ctx ends. After an error the Predecessor must not be used any more.
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

// received are the files in a control message.
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

// AwaitEnd returns when the predecessor's process has ended, or ctx ends.
func (p *Predecessor) AwaitEnd(ctx context.Context) { awaitEnd(ctx, p.conn) }

// Close lets the predecessor know that this agent has ended.
func (p *Predecessor) Close() error { return p.conn.Close() }
