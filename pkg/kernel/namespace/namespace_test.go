// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	vnetns "github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestThreadsStay covers that every thread is in the process's own namespace again, also the first,
// which does not end when a goroutine that is locked to it does.
func TestThreadsStay(t *testing.T) {
	host := netns.New(t)
	ns, err := namespace.Open(host.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()

	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}

	const goroutines = 64 // each has a thread of its own, so that one has the first
	var inside, running sync.WaitGroup
	inside.Add(goroutines)

	for range goroutines {
		running.Go(func() {
			err := namespace.Do(ns, func() error {
				inside.Done()
				inside.Wait()
				now, err := os.Readlink("/proc/thread-self/ns/net")
				if now == own {
					t.Error("is not in the namespace")
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}

	running.Wait()
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(threads) == 0 {
		t.Fatalf("threads %q, %v", threads, err)
	}

	for _, thread := range threads {
		// it may have ended meanwhile
		if now, err := os.Readlink(thread); err == nil && now != own {
			t.Errorf("%s is %s, want %s", thread, now, own)
		}
	}
}

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	if _, err := namespace.Open(path); !errors.Is(err, os.ErrNotExist) ||
		!strings.Contains(err.Error(), path) {
		t.Errorf("error %v", err)
	}

	ns, err := namespace.Open("")
	if err != nil || ns.IsOpen() {
		t.Errorf("namespace %v, %v", ns, err)
	}

	called := false
	if err := namespace.Do(ns, func() error { called = true; return os.ErrInvalid }); !called ||
		!errors.Is(err, os.ErrInvalid) {
		t.Errorf("called: %t, error %v", called, err)
	}
}

// TestNew: a new namespace is another one than that of the process.
func TestNew(t *testing.T) {
	netns.New(t) // skips the test where namespaces cannot be made
	made, err := namespace.New()
	if err != nil {
		t.Fatal(err)
	}
	defer made.Close()

	own, err := vnetns.GetFromPath("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()

	if made.Equal(own) {
		t.Error("the namespace is that of the process")
	}
}
