package inventory

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// soon is how long a test waits for what must come.
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
func listen(t *testing.T, s source, netNS string, log logr.Logger) (woken <-chan struct{}) {
	t.Helper()
	wakes := make(chan struct{}, 16)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.listen(ctx, netNS, func() { wakes <- struct{}{} }, log) })
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	return wakes
}

func rtnetlink(matters func([]byte) bool) source {
	s := sources[0]
	s.matters = matters
	return s
}

// TestMessagesLost covers that too many messages at once make one look at everything, although none of them matters.
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
	// The kernel counts at least 512 bytes for each message, and twice the buffer's size as its limit (socket(7)).
	for n := range 2*receiveBuffer/512 + 1 {
		if err := host.Handle().LinkSetMTU(bridge, 1000+n%2); err != nil {
			t.Fatal(err)
		}
	}
	close(goOn)
	receiveSoon(t, "news of lost messages", woken)
}

// TestSubscribesAgain covers a subscription that is not possible at first.
func TestSubscribesAgain(t *testing.T) {
	host := netns.New(t)
	path := filepath.Join(t.TempDir(), "later")
	failed := make(chan struct{}, 64)
	log := funcr.New(func(string, string) { failed <- struct{}{} }, funcr.Options{})
	woken := listen(t, rtnetlink(func([]byte) bool { return true }), path, log)
	receiveSoon(t, "complaint", failed)
	if err := os.Symlink(host.Path(), path); err != nil {
		t.Fatal(err)
	}
	receiveSoon(t, "subscription", woken)
	if err := host.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}); err != nil {
		t.Fatal(err)
	}
	receiveSoon(t, "message", woken)
}

// TestUevents covers the kernel's own messages about devices: a new netdev has some.
func TestUevents(t *testing.T) {
	host := netns.New(t)
	woken := listen(t, sources[1], host.Path(), logr.Discard())
	receiveSoon(t, "subscription", woken)
	if err := host.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}); err != nil {
		t.Fatal(err)
	}
	receiveSoon(t, "uevent", woken)
}

// TestForeignMessages covers that only the kernel is listened to.
func TestForeignMessages(t *testing.T) {
	host := netns.New(t)
	messages := make(chan []byte, 64)
	s := sources[1]
	s.matters = func(message []byte) bool {
		messages <- bytes.Clone(message)
		return false
	}
	receiveSoon(t, "subscription", listen(t, s, host.Path(), logr.Discard()))
	forged := []byte("add@/forged\x00SUBSYSTEM=pci\x00")
	err := host.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, forged, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}); err != nil {
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

// TestThreadsStay covers that every thread is in the process's own namespace again, also the first, which does not end
// when a goroutine that is locked to it does.
func TestThreadsStay(t *testing.T) {
	host := netns.New(t)
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	const goroutines = 64 // each has a thread of its own, so that one has the first
	var inside, running sync.WaitGroup
	inside.Add(goroutines)
	for range goroutines {
		running.Go(func() {
			err := inNamespace(host.Path(), func() error {
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
		if now, err := os.Readlink(thread); err == nil && now != own { // it may have ended meanwhile
			t.Errorf("%s is %s, want %s", thread, now, own)
		}
	}
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
	f.Add([]byte("add@/devices/pci0000:3a/0000:3b:00.0\x00ACTION=add\x00SUBSYSTEM=pci\x00SEQNUM=1\x00"))
	f.Add([]byte("SUBSYSTEM=net"))
	f.Fuzz(func(t *testing.T, message []byte) {
		if ueventMatters(message) && !bytes.Contains(message, []byte("SUBSYSTEM=")) {
			t.Errorf("%q matters without a subsystem", message)
		}
	})
}
