// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

const (
	// of a message on its way: both sides are on this machine
	messageTimeout    = 10 * time.Second
	succeededPatience = 3 * time.Second
	// after the socket could not be made, or a connection could not be taken
	retryPause = 100 * time.Millisecond
	// of directories that are the server's alone
	ownMode fs.FileMode = 0o700
)

// Run drains the spool and serves the socket until ctx ends; requests that run then may end. It
// tries what is in the spool once before it takes the first connection, so that an old DEL cannot
// come after a new ADD. An error means that it cannot serve at all.
func (s *Server) Run(ctx context.Context) error {
	changes, err := watchdir.Open(s.SpoolDir, func(event fsnotify.Event) bool {
		return event.Has(fsnotify.Create) && isRequest(filepath.Base(event.Name))
	})
	if err == nil {
		defer changes.Close()
		err = s.watchSpool(changes)
	}
	if err != nil {
		return fmt.Errorf("CNI spool: %w", err)
	}

	first, cancel := context.WithTimeout(ctx, firstTimeout)
	s.drainSpool(first, changes)
	cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.followSpool(ctx, changes) })
	group.Go(func() error { return s.serve(ctx) })

	return group.Wait()
}

// serve listens until ctx ends, and listens again when the socket or its directory was removed.
func (s *Server) serve(ctx context.Context) error {
	watch, err := watchdir.Open(filepath.Dir(s.Path), nil)
	if err != nil {
		return fmt.Errorf("CNI socket: %w", err)
	}
	defer watch.Close()

	// Requests that run outlive ctx for a while.
	working, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(s.patience(), end) })()

	var requests sync.WaitGroup
	defer requests.Wait()

	for again := false; ; again = true {
		l, err := s.listen(watch, again)
		switch {
		case err != nil && !again:
			return fmt.Errorf("CNI socket: %w", err)
		case err != nil: // the directory may still be being removed
			s.Log.Error(err, "CNI socket cannot be made; trying again")
			if !loop.Sleep(ctx, retryPause) {
				return nil
			}
			continue
		}

		requests.Go(func() { s.accept(working, l, &requests) })
		socket, _ := os.Lstat(s.Path) // nil, which is no file, if it was removed already
		ended := loop.Until(ctx, func(context.Context) <-chan struct{} {
			return watch.Changes()
		}, func() bool {
			now, err := os.Lstat(s.Path)
			return err != nil || !os.SameFile(now, socket)
		})

		if ended != nil && s.Succeeded != nil && s.Succeeded() {
			s.left, err = l.File()
			return errors.Join(err, l.Close())
		}

		l.Close()
		if ended != nil {
			_ = os.Remove(s.Path)
			return nil
		}

		s.Log.Info("CNI socket was removed; it is made again", "socket", s.Path)
	}
}

// patience is how long requests that run may go on when the server ends. Another agent does not
// wait long: runtimes repeat an ADD.
func (s *Server) patience() time.Duration {
	usual := cmp.Or(s.StopTimeout, 10*time.Second)
	if s.Succeeded != nil && s.Succeeded() {
		return min(usual, succeededPatience)
	}
	return usual
}

// Socket is the listening socket after [Server.Run] has returned, if another agent takes the node
// over; else nil. It belongs to the caller.
func (s *Server) Socket() *os.File { return s.left }

// listen makes the socket and watches it. It replaces an old socket, which nobody uses: the journal
// lets one agent run. The first one may be inherited.
func (s *Server) listen(watch *watchdir.Dir, again bool) (*net.UnixListener, error) {
	ours := func(name string) bool { return name == filepath.Base(s.Path) }
	if err := makeOwnDir(filepath.Dir(s.Path), ours); err != nil {
		return nil, err
	}
	// The watch comes first, so that a removal is not missed.
	if err := watch.Watch(); err != nil {
		return nil, err
	}
	if s.Inherited != nil && !again {
		s.Inherited.SetUnlinkOnClose(false)
		return s.Inherited, nil
	}
	if err := os.Remove(s.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}

	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.Path, Net: "unix"})
	if err != nil {
		return nil, err
	}

	l.SetUnlinkOnClose(false) // by then the path may be another socket
	if err := os.Chmod(s.Path, 0o600); err != nil {
		l.Close()
		return nil, err
	}

	return l, nil
}

// makeOwnDir makes a directory that nobody else may enter. A directory that is there and has files
// that are not ours, as "/run" has, is left as it is, with an error.
func makeOwnDir(dir string, ours func(name string) bool) error {
	if err := os.MkdirAll(dir, ownMode); err != nil {
		return err
	}

	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() == ownMode {
		return err
	}

	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}

	for _, entry := range entries {
		if !ours(entry.Name()) {
			return fmt.Errorf("%s: must be a directory of its own, of mode %04o; this one has %s in it",
				dir, ownMode, entry.Name())
		}
	}

	return os.Chmod(dir, ownMode)
}

// accept takes connections until the listener is closed. Each is one of the requests.
func (s *Server) accept(ctx context.Context, l *net.UnixListener, requests *sync.WaitGroup) {
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}

		if err != nil { // out of file descriptors, say: requests that end give some back
			s.Log.Error(err, "Connection of the CNI plugin cannot be taken")
			time.Sleep(retryPause)
			continue
		}

		requests.Go(func() { s.talk(ctx, conn) })
	}
}

// talk answers the one request of a connection.
func (s *Server) talk(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err == nil {
		err = peer.Check(conn)
	}

	if err != nil {
		s.Metrics.refused.Inc()
		s.Log.Error(err, "Connection to the CNI socket refused")
		return
	}

	var request wire.Request
	var reply wire.Reply

	if err = conn.SetReadDeadline(time.Now().Add(messageTimeout)); err == nil {
		request, err = readRequest(conn)
	}

	if err == nil {
		reply = s.answerConnected(ctx, conn, raw, request)
	} else {
		reply = failed(types.ErrDecodingFailure, err)
		s.Log.Error(err, "Request of the CNI plugin cannot be read")
	}

	if err := send(conn, reply); err != nil {
		s.Log.Error(err, "CNI plugin did not wait for its answer",
			"command", request.Command, "container", request.ContainerID)
	}
}

// answerConnected does a request. An ADD ends when the shim is gone, because nobody would know of
// the interface.
func (s *Server) answerConnected(
	ctx context.Context, conn *net.UnixConn, raw syscall.RawConn, request wire.Request,
) wire.Reply {
	if request.Command != wire.Add || conn.SetReadDeadline(time.Time{}) != nil {
		return s.answer(ctx, request, nil)
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	var watching sync.WaitGroup
	defer watching.Wait()

	watching.Go(func() {
		// The runtime's poller wakes this for every change of the socket, and for the deadline.
		if raw.Read(hungUp) == nil {
			cancel(errors.New("the CNI plugin did not wait any longer"))
		}
	})

	defer conn.SetReadDeadline(time.Unix(1, 0))
	return s.answer(ctx, request, nil)
}

// hungUp says whether the other side closed its socket, and not only its direction after the
// request.
func hungUp(fd uintptr) bool {
	state := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(state, 0)
	return err == nil && n > 0 && state[0].Revents&unix.POLLHUP != 0
}

// readRequest reads one request, up to the end of what it comes from.
func readRequest(from io.Reader) (r wire.Request, err error) {
	data, err := io.ReadAll(io.LimitReader(from, wire.MaxMessage+1))
	if err == nil && len(data) > wire.MaxMessage {
		return r, fmt.Errorf("request: is longer than %d bytes", wire.MaxMessage)
	}

	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		return wire.Request{}, fmt.Errorf("request: %w", err)
	}

	return r, nil
}

// send writes the answer. The shim refuses one that is longer than [wire.MaxMessage], so it gets an
// error instead.
func send(conn *net.UnixConn, reply wire.Reply) error {
	reply.Version = wire.Version
	data, err := json.Marshal(reply)
	if err == nil && len(data) > wire.MaxMessage {
		tooLong := types.NewError(types.ErrInternal,
			fmt.Sprintf("answer: is longer than %d bytes", wire.MaxMessage), "")
		data, err = json.Marshal(wire.Reply{Version: wire.Version, Error: tooLong})
	}

	err = errors.Join(err, conn.SetWriteDeadline(time.Now().Add(messageTimeout)))
	if err == nil {
		_, err = conn.Write(data)
	}

	return err
}
