// SPDX-License-Identifier: Apache-2.0

package listen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// soon is how long a test waits for an event that must come.
const soon = 20 * time.Second

func receiveSoon(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(soon):
		t.Fatalf("%s: did not come", what)
	}
}

// listen runs a source until the test ends.
func listen(t *testing.T, s Source, netNS string, log logr.Logger) (woken <-chan struct{}) {
	t.Helper()
	wakes := make(chan struct{}, 16)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.Follow(ctx, netNS, func() { wakes <- struct{}{} }, log) })
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	return wakes
}

func rtnetlink(matters func([]byte) bool) Source {
	return Source{
		Name: "rtnetlink", Protocol: unix.NETLINK_ROUTE, Groups: Groups(unix.RTNLGRP_LINK),
		Matters: matters,
	}
}

// uevents returns the source of the kernel's uevents.
func uevents(matters func([]byte) bool) Source {
	return Source{
		Name: "uevent", Protocol: unix.NETLINK_KOBJECT_UEVENT, Groups: Groups(1), Matters: matters,
	}
}

// TestMessagesLost checks that changed is called when too many messages arrive at once, even if no
// message matters.
func TestMessagesLost(t *testing.T) {
	host := netns.New(t)
	first, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	woken := listen(t, rtnetlink(func([]byte) bool {
		once.Do(func() {
			close(first)
			<-goOn
		})
		return false
	}), host.Path(), logr.Discard())

	receiveSoon(t, "subscription", woken)

	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "storm"}}
	if err := host.Handle().LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}

	receiveSoon(t, "first message", first)
	// The kernel counts at least 512 bytes for each message, and its limit is twice the size of the
	// buffer (socket(7)).
	for n := range 2*receiveBuffer/512 + 1 {
		if err := host.Handle().LinkSetMTU(bridge, 1000+n%2); err != nil {
			t.Fatal(err)
		}
	}

	close(goOn)
	receiveSoon(t, "news of lost messages", woken)
}

// TestSubscribesAgain covers a subscription that fails at first.
func TestSubscribesAgain(t *testing.T) {
	host := netns.New(t)
	path := filepath.Join(t.TempDir(), "later")
	failed := make(chan struct{}, 64)
	log := funcr.New(func(string, string) { failed <- struct{}{} }, funcr.Options{})
	woken := listen(t, rtnetlink(nil), path, log)
	receiveSoon(t, "problem", failed)
	if err := os.Symlink(host.Path(), path); err != nil {
		t.Fatal(err)
	}

	receiveSoon(t, "subscription", woken)
	if err := host.Handle().
		LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}); err != nil {
		t.Fatal(err)
	}

	receiveSoon(t, "message", woken)
}

// TestForeignMessages checks that messages of other senders than the kernel are ignored.
func TestForeignMessages(t *testing.T) {
	host := netns.New(t)
	messages := make(chan []byte, 64)
	s := uevents(func(message []byte) bool {
		messages <- bytes.Clone(message)
		return false
	})

	receiveSoon(t, "subscription", listen(t, s, host.Path(), logr.Discard()))
	forged := []byte("add@/forged\x00SUBSYSTEM=pci\x00")
	err := host.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC,
			unix.NETLINK_KOBJECT_UEVENT)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, forged, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1})
	})

	if err != nil {
		t.Fatal(err)
	}
	if err := host.Handle().
		LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}); err != nil {
		t.Fatal(err)
	}

	select {
	case got := <-messages:
		if bytes.Equal(got, forged) {
			t.Error("a message that the kernel did not send was listened to")
		}
	case <-time.After(soon):
		t.Fatal("the kernel's message did not come")
	}
}

// watching is a kernel on which listening may fail.
type watching struct {
	fail  error // error of the next listen, or nil to listen
	lasts time.Duration
	times []time.Time
}

func (w *watching) watch(ctx context.Context) error {
	w.times = append(w.times, time.Now())
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(w.lasts):
		return w.fail
	}
}

func TestFollow(t *testing.T) {
	for name, test := range map[string]struct {
		watching
		during   time.Duration
		min, max int // calls of listen
		log      string
	}{
		"cannot listen": {
			watching{fail: errors.New("no socket")}, time.Minute, 9, 12, "no socket",
		},
		"is interrupted": {
			watching{fail: unix.ENOMEM, lasts: time.Hour}, 10 * time.Hour, 10, 10, `"retry"="1`,
		},
		"is not there": {watching{fail: fmt.Errorf("no devlink: %w", unix.EOPNOTSUPP)}, time.Hour,
			1, 1, "no devlink"},
		"listens": {watching{lasts: 2 * time.Hour}, time.Hour, 1, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), test.during)
				defer cancel()

				var logged []string
				log := funcr.New(func(_, args string) {
					logged = append(logged, args)
				}, funcr.Options{Verbosity: 1})
				Source{Name: "devlink"}.follow(ctx, test.watch, log)
				if n := len(test.times); n < test.min || n > test.max {
					t.Errorf("%d watches, want %d-%d", n, test.min, test.max)
				}

				for _, line := range logged {
					if !strings.Contains(line, test.log) {
						t.Errorf("logged %s, want %s", line, test.log)
					}
				}

				if (len(logged) > 0) != (test.log != "") {
					t.Errorf("logged %q", logged)
				}
			})
		})
	}
}
