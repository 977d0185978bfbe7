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

// TestThreadsStay checks that every thread returns to the namespace of the process. This includes
// the first thread, which does not end with a goroutine that is locked to it.
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

	const goroutines = 64 // each on a thread of its own, so that one of them is on the first thread
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
		// The thread may have ended meanwhile.
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

// TestNew checks that a new namespace is not the namespace of the process.
func TestNew(t *testing.T) {
	netns.New(t) // skips the test where namespaces cannot be created
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
