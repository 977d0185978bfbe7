// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

func mode(t *testing.T, path string) os.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	must.Succeed(t, err)
	return info.Mode().Perm()
}

// The socket is for root, and comes back when it or its directory is removed.
func TestSocket(t *testing.T) {
	t.Parallel()
	n := newNode(t, 0)
	socket := filepath.Join(n.dir, "run", "cni.sock")
	must.Succeed(t, os.MkdirAll(filepath.Dir(socket), 0o755))
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	must.Succeed(t, err)
	stale.SetUnlinkOnClose(false)
	must.Succeed(t, stale.Close())

	n.serve(func(r *running) {
		if mode(t, socket) != 0o600 || mode(t, filepath.Dir(socket)) != 0o700 ||
			mode(t, r.SpoolDir) != 0o700 {
			t.Errorf("modes %s, %s, %s", mode(t, socket), mode(t, filepath.Dir(socket)),
				mode(t, r.SpoolDir))
		}
		for _, path := range []string{socket, filepath.Dir(socket), socket, filepath.Dir(socket)} {
			// the server may be faster than the removal
			must.Eventually(t, "the socket is removed", func() bool {
				return os.RemoveAll(path) == nil
			})
			must.Eventually(t, "the server answers again", func() bool {
				reply, err := r.call(wire.Request{Command: wire.Status})
				return err == nil && reply.Error == nil
			})
		}
	})

	if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket after the end: %v", err)
	}
}

func TestGarbage(t *testing.T) {
	t.Parallel()
	n := newNode(t, 0)
	n.serve(func(r *running) {
		for name, message := range map[string]string{
			"nothing": "", "no JSON": "hello", "half": `{"version":1,`,
			"too long": strings.Repeat(" ", wire.MaxMessage+1),
		} {
			conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.Path, Net: "unix"})
			must.Succeed(t, err)
			_, _ = conn.Write([]byte(message)) // the message may be refused before it is complete
			must.Succeed(t, conn.CloseWrite())
			var reply wire.Reply
			if err := json.NewDecoder(conn).Decode(&reply); err != nil && name != "too long" {
				t.Errorf("%s: %v", name, err)
			} else if err == nil &&
				(reply.Error == nil || reply.Error.Code != types.ErrDecodingFailure) {
				t.Errorf("%s: %+v", name, reply)
			}

			conn.Close()
		}
		if reply, err := r.call(wire.Request{Command: wire.Status}); err != nil ||
			reply.Error != nil {
			t.Errorf("after garbage: %v %v", err, reply.Error)
		}
	})
}

// dialAs connects as another user, from a thread that is not used again.
func dialAs(path string, uid uintptr) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		const unchanged = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(syscall.SYS_SETRESUID, unchanged,
			uid, unchanged); errno != 0 {
			result <- errno
			return
		}

		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			result <- err
			return
		}
		defer unix.Close(fd)

		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			result <- err
			return
		}

		n, err := unix.Read(fd, make([]byte, 1))
		if err == nil && n == 0 {
			err = errClosed
		}

		result <- err
	}()

	return <-result
}

var errClosed = errors.New("the server closed the connection")

// Other users cannot reach the socket, and would be refused if they could.
func TestPeer(t *testing.T) {
	t.Parallel()
	needs.Root(t, "to become another user")

	const nobody = 65534
	n := newNode(t, 0)
	n.serve(func(r *running) {
		if err := dialAs(r.Path, nobody); !errors.Is(err, unix.EACCES) {
			t.Errorf("error %v, want %v", err, unix.EACCES)
		}

		for path := r.Path; path != os.TempDir() && path != "/"; path = filepath.Dir(path) {
			must.Succeed(t, os.Chmod(path, 0o777))
		}
		if err := dialAs(r.Path, nobody); !errors.Is(err, errClosed) &&
			!errors.Is(err, unix.ECONNRESET) {
			t.Errorf("error %v, want the connection closed", err)
		}
	})
}

// An ADD of a shim that is killed ends.
func TestShimGone(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	pod := netns.New(t)
	n.xpuAgent.entered = make(chan struct{})
	n.serve(func(r *running) {
		ctx, kill := context.WithCancel(t.Context())
		var shim sync.WaitGroup
		shim.Go(func() {
			if _, err := wire.Call(ctx, r.Path,
				request(wire.Add, 0, "c1", pod, map[string]any{"network": "blue"})); err == nil {
				t.Error("no error")
			}
		})

		<-n.xpuAgent.entered
		kill()
		shim.Wait()
		must.Eventually(t, "the ADD has ended", func() bool {
			return !r.adds.Held(types.GCAttachment{ContainerID: "c1", IfName: "net1"})
		})
		if a, _ := r.Journal.Get(lifecycletest.ID(0)); a.State != journal.Reserved {
			t.Errorf("record %+v", a)
		}

		r.must(request(wire.Del, 0, "c1", nil, nil))
	})
}

// Running requests may end when the server stops.
func TestStop(t *testing.T) {
	t.Parallel()
	for name, patience := range map[string]time.Duration{
		"in time": time.Minute, "too late": time.Millisecond,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			pod := netns.New(t)
			n.xpuAgent.entered = make(chan struct{})
			n.run(func(r *running) {
				r.StopTimeout, r.AddTimeout = patience, 200*time.Millisecond
				ctx, stop := context.WithCancel(t.Context())
				var server, shim sync.WaitGroup
				server.Go(func() { must.Succeed(t, r.Run(ctx)) })

				must.Eventually(t, "the server answers", func() bool {
					_, err := r.call(wire.Request{Command: wire.Status})
					return err == nil
				})

				shim.Go(func() {
					reply, err := r.call(request(wire.Add, 0, "c1", pod,
						map[string]any{"network": "blue"}))
					if err != nil || reply.Error == nil || reply.Error.Code != CodeProvision {
						t.Errorf("reply %+v, error %v", reply, err)
					} else if timedOut := strings.Contains(reply.Error.Msg,
						"the agent waited"); timedOut != (patience == time.Minute) {
						t.Errorf("reply %v", reply.Error)
					}
				})

				<-n.xpuAgent.entered
				stop()
				server.Wait()
				shim.Wait()
			})
		})
	}
}

// Directories with foreign files are not made private, because that would close /run, for example,
// to all other users.
func TestDirectoriesOfOthers(t *testing.T) {
	t.Parallel()
	for name, choose := range map[string]func(s *Server, dir string){
		"socket": func(s *Server, dir string) { s.Path = filepath.Join(dir, "cni.sock") },
		"spool":  func(s *Server, dir string) { s.SpoolDir = dir },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 0)
			dir := filepath.Join(t.TempDir(), "run")
			must.Succeed(t, os.Mkdir(dir, 0o755))
			must.Succeed(t, os.WriteFile(filepath.Join(dir, "other.pid"), nil, 0o644))

			n.run(func(r *running) {
				choose(r.Server, dir)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if err := r.Run(ctx); err == nil || !strings.Contains(err.Error(), "other.pid") {
					t.Errorf("error %v, want that the directory has other files", err)
				}
			})

			if got := mode(t, dir); got != 0o755 {
				t.Errorf("mode %04o", got)
			}
		})
	}
}
