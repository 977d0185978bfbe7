// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/listen"
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

// follow follows a source until the test ends.
func follow(t *testing.T, s listen.Source, netNS string) (woken <-chan struct{}) {
	t.Helper()
	wakes := make(chan struct{}, 16)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.Follow(ctx, netNS, func() { wakes <- struct{}{} }, logr.Discard()) })
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	return wakes
}

// TestUevents: the kernel sends uevents about a new netdev.
func TestUevents(t *testing.T) {
	host := netns.New(t)
	woken := follow(t, sources[1], host.Path())
	receiveSoon(t, "subscription", woken)
	if err := host.Handle().
		LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}); err != nil {
		t.Fatal(err)
	}
	receiveSoon(t, "uevent", woken)
}

func TestUeventMatters(t *testing.T) {
	for message, want := range map[string]bool{
		"add@/devices/pci0000:3a/0000:3b:00.0\x00ACTION=add\x00SUBSYSTEM=pci\x00SEQNUM=1\x00": true,
		"remove@/x\x00SUBSYSTEM=net\x00INTERFACE=a\x00":                                       true,
		"add@/x\x00SUBSYSTEM=auxiliary\x00":                                                   true,
		"add@/x\x00SUBSYSTEM=block\x00":                                                       false,
		"add@/x\x00SUBSYSTEM=queues\x00X=SUBSYSTEM=net\x00":                                   false,
		"add@/SUBSYSTEM=pci":                                                                  false,
		"":                                                                                    false,
	} {
		if got := ueventMatters([]byte(message)); got != want {
			t.Errorf("%q matters: %t, want %t", message, got, want)
		}
	}
}

func FuzzUevent(f *testing.F) {
	f.Add([]byte(
		"add@/devices/pci0000:3a/0000:3b:00.0\x00ACTION=add\x00SUBSYSTEM=pci\x00SEQNUM=1\x00",
	))
	f.Add([]byte("SUBSYSTEM=net"))

	f.Fuzz(func(t *testing.T, message []byte) {
		if ueventMatters(message) && !bytes.Contains(message, []byte("SUBSYSTEM=")) {
			t.Errorf("%q matters without a subsystem", message)
		}
	})
}
