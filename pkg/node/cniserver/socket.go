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
	// messageTimeout limits the transfer of a message between two processes of this machine.
	messageTimeout    = 10 * time.Second
	succeededPatience = 3 * time.Second
	// retryPause follows a failure to create the socket or to accept a connection.
	retryPause = 100 * time.Millisecond
	// privateMode is the mode of directories that only the server uses.
	privateMode fs.FileMode = 0o700
)

// Run handles the requests in the spool and serves the socket until ctx ends. Running requests may
// end after that. Run tries every request in the spool once before it accepts the first connection,
// so that an old DEL cannot come after a new ADD. An error means that it cannot serve at all.
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

	// Running requests may continue for a while after ctx ends.
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
		// nil, which equals no file, if the socket was removed already
		socket, _ := os.Lstat(s.Path)
		ended := loop.Until(ctx, func(context.Context) <-chan struct{} {
			return watch.Changes()
		}, func() bool {
			now, err := os.Lstat(s.Path)
			return err != nil || !os.SameFile(now, socket)
		})

		if ended != nil && s.Succeeded != nil && s.Succeeded() {
			s.handedOver, err = l.File()
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

// patience returns how long running requests may continue when the server ends. It is short if a
// successor waits for the node, because runtimes repeat an ADD.
func (s *Server) patience() time.Duration {
	usual := cmp.Or(s.StopTimeout, 10*time.Second)
	if s.Succeeded != nil && s.Succeeded() {
		return min(usual, succeededPatience)
	}
	return usual
}

// Socket returns the listening socket after [Server.Run] has returned, if a successor takes over
// the node; otherwise nil. The caller must close it.
func (s *Server) Socket() *os.File { return s.handedOver }

// listen creates the socket and watches it. It replaces an old socket, which no agent uses, because
// only one agent has the journal. Unless again is set, it may use the inherited socket.
func (s *Server) listen(watch *watchdir.Dir, again bool) (*net.UnixListener, error) {
	isOwn := func(name string) bool { return name == filepath.Base(s.Path) }
	if err := makePrivateDir(filepath.Dir(s.Path), isOwn); err != nil {
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

	l.SetUnlinkOnClose(false) // by then another socket may be at the path
	if err := os.Chmod(s.Path, 0o600); err != nil {
		l.Close()
		return nil, err
	}

	return l, nil
}

// makePrivateDir creates a directory that no other user may enter. It fails for an existing
// directory with foreign files, such as "/run", and leaves it as it is.
func makePrivateDir(dir string, isOwn func(name string) bool) error {
	if err := os.MkdirAll(dir, privateMode); err != nil {
		return err
	}

	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() == privateMode {
		return err
	}

	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}

	for _, entry := range entries {
		if !isOwn(entry.Name()) {
			return fmt.Errorf("%s: must be a directory of its own, of mode %04o; this one has "+
				"%s in it", dir, privateMode, entry.Name())
		}
	}

	return os.Chmod(dir, privateMode)
}

// accept accepts connections until the listener is closed, and handles each of them as one of the
// requests.
func (s *Server) accept(ctx context.Context, l *net.UnixListener, requests *sync.WaitGroup) {
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}

		if err != nil { // for example, no file descriptor is left until a request ends
			s.Log.Error(err, "Connection of the CNI plugin cannot be taken")
			time.Sleep(retryPause)
			continue
		}

		requests.Go(func() { s.serveConn(ctx, conn) })
	}
}

// serveConn handles the one request of a connection.
func (s *Server) serveConn(ctx context.Context, conn *net.UnixConn) {
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
		reply = s.handleConnected(ctx, conn, raw, request)
	} else {
		reply = errorReply(types.ErrDecodingFailure, err)
		s.Log.Error(err, "Request of the CNI plugin cannot be read")
	}

	if err := send(conn, reply); err != nil {
		s.Log.Error(err, "CNI plugin did not wait for its answer",
			"command", request.Command, "container", request.ContainerID)
	}
}

// handleConnected handles a request. An ADD ends when the shim has ended, because no runtime would
// know of the interface.
func (s *Server) handleConnected(
	ctx context.Context, conn *net.UnixConn, raw syscall.RawConn, request wire.Request,
) wire.Reply {
	if request.Command != wire.Add || conn.SetReadDeadline(time.Time{}) != nil {
		return s.handle(ctx, request, nil)
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	var watching sync.WaitGroup
	defer watching.Wait()

	watching.Go(func() {
		// Go's network poller wakes this function for every change of the socket, and for the
		// deadline.
		if raw.Read(hungUp) == nil {
			cancel(errors.New("the CNI plugin did not wait any longer"))
		}
	})

	defer conn.SetReadDeadline(time.Unix(1, 0))
	return s.handle(ctx, request, nil)
}

// hungUp reports whether the other side closed its socket, and not only its sending direction after
// the request.
func hungUp(fd uintptr) bool {
	state := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(state, 0)
	return err == nil && n > 0 && state[0].Revents&unix.POLLHUP != 0
}

// readRequest reads one request, up to the end of the reader.
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

// send writes the reply. It sends an error in place of a reply that is longer than
// [wire.MaxMessage], because the shim would refuse that.
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
