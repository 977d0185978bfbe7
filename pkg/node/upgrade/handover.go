// SPDX-License-Identifier: Apache-2.0

package upgrade

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
	// protocol is the version of the messages below. A request in another version is refused.
	protocol = 1
	// helloTimeout is how long a successor may take from its connection to its request. The kubelet
	// registers the successor in the meantime.
	helloTimeout = 10 * time.Second
	acceptPause  = 100 * time.Millisecond
	// maxMessage is the size limit of a message in bytes.
	maxMessage = 4096
)

// hello is the request of a successor, the first message on the connection.
type hello struct {
	Version int `json:"version"`
	// Program is the version of the successor, for the log.
	Program string `json:"program"`
}

// answer is the second and last message. The predecessor sends it, with the listening socket of the
// CNI server (SCM_RIGHTS, see unix(7)), when it has completed its work.
type answer struct {
	// Error is the reason of a refusal.
	Error string `json:"error,omitempty"`
}

// AwaitSuccessor listens at the socket of the agent that has the node, and returns the first
// successor that asks for the node. Only the agent may use the directory of the socket.
// AwaitSuccessor returns nil without an error when ctx ends. It returns an error only if it cannot
// listen.
func AwaitSuccessor(ctx context.Context, socket string, log logr.Logger) (*Successor, error) {
	// The journal is open in one agent only, so that no other agent listens on an existing socket.
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("handover socket: %w", err)
	}

	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	defer listener.Close() // removes the socket

	if err := os.Chmod(socket, 0o600); err != nil {
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
			log.Error(err, "Connection to the handover socket cannot be taken")
			loop.Sleep(ctx, acceptPause)
			continue
		}

		program, err := receiveHello(conn)
		if err == nil {
			log.Info("Another agent asks for the node; it gets it once the requests that run "+
				"are done", "version", program)
			return &Successor{agent{conn}}, nil
		}

		log.Error(err, "Connection to the handover socket refused")
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
	if asked.Version != protocol {
		return "", fmt.Errorf("handover in version %d of the protocol, this agent speaks %d",
			asked.Version, protocol)
	}

	return asked.Program, conn.SetReadDeadline(time.Time{})
}

// agent is the other agent during an upgrade, at the other end of the connection. The connection
// stays open as long as both agents run, so that each sees the end of the other.
type agent struct{ conn *net.UnixConn }

// AwaitEnd returns when the process of the other agent has ended, or when ctx ends.
func (a agent) AwaitEnd(ctx context.Context) {
	defer context.AfterFunc(ctx, func() { _ = a.conn.SetReadDeadline(time.Unix(1, 0)) })()
	_, _ = io.Copy(io.Discard, a.conn) // neither agent sends anything after the answer
}

// Close shows the other agent that this one has ended.
func (a agent) Close() error { return a.conn.Close() }

// Successor is an agent that waits for the node.
type Successor struct{ agent }

// Give passes the node to the successor, with the listening socket of the CNI server unless it is
// nil. The socket stays open in this process too.
func (s *Successor) Give(socket *os.File) error {
	message, err := json.Marshal(answer{})
	if err != nil {
		return err
	}

	var rights []byte
	if socket != nil {
		rights = unix.UnixRights(int(socket.Fd()))
	}
	if _, _, err := s.conn.WriteMsgUnix(message, rights, nil); err != nil {
		return fmt.Errorf("give the node to the other agent: %w", err)
	}

	return nil
}

// Predecessor is the agent that had the node before.
type Predecessor struct {
	agent
	socket *os.File // nil if the predecessor gave none
}

// Listener returns the listening socket of the CNI server, in whose queue requests wait. It returns
// nil if there is no predecessor, or if the predecessor gave no socket. It must be called at most
// once.
func (p *Predecessor) Listener() (*net.UnixListener, error) {
	if p == nil || p.socket == nil {
		return nil, nil
	}
	defer p.socket.Close()

	listener, err := net.FileListener(p.socket)
	if err != nil {
		return nil, fmt.Errorf("CNI socket that was handed over: %w", err)
	}

	socket, ok := listener.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("CNI socket that was handed over: is a %T", listener),
			listener.Close())
	}

	return socket, nil
}

// dial connects to the agent behind a socket. It returns nil without an error if no process listens
// there: there is no other agent, or it does not support handovers.
func dial(ctx context.Context, socket string) (*Predecessor, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for the node: %w", err)
	}
	return &Predecessor{agent: agent{conn.(*net.UnixConn)}}, nil
}

// take asks for the node and returns when the predecessor has completed its work, or when ctx ends.
// It must be called within helloTimeout after [dial]. After an error, the Predecessor must not be
// used any more.
func (p *Predecessor) take(ctx context.Context, program string) (err error) {
	if p.socket, err = ask(ctx, p.conn, program); err != nil {
		p.conn.Close()
		return fmt.Errorf("ask for the node: %w", errors.Join(err, context.Cause(ctx)))
	}
	return nil
}

// ask sends the request, and returns the socket of the answer; nil if the answer has none.
func ask(ctx context.Context, conn *net.UnixConn, program string) (*os.File, error) {
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
	if err := json.NewEncoder(conn).Encode(hello{Version: protocol, Program: program}); err != nil {
		return nil, err
	}

	message, rights := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4))
	n, rightsLen, _, _, err := conn.ReadMsgUnix(message, rights)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, errors.New("the other agent ended before it answered")
	}

	socket, err := received(rights[:rightsLen])
	if err != nil {
		return nil, err
	}

	var got answer
	if err = json.Unmarshal(message[:n], &got); err != nil {
		err = fmt.Errorf("answer: %w", err)
	} else if got.Error != "" {
		err = errors.New(got.Error)
	}

	if err != nil && socket != nil {
		return nil, errors.Join(err, socket.Close())
	}

	return socket, err
}

// received returns the file of a control message; nil if it has none. A predecessor gives at most
// one.
func received(rights []byte) (socket *os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil || len(messages) == 0 {
		return nil, err
	}

	descriptors, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(descriptors) == 0 {
		return nil, err
	}

	unix.CloseOnExec(descriptors[0])
	return os.NewFile(uintptr(descriptors[0]), "handed over"), nil
}
