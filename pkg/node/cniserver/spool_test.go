// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// spoolFile leaves a request as the shim does: it is complete, because it is renamed last.
func (n *node) spoolFile(name string, content []byte) {
	n.t.Helper()
	dir := filepath.Join(n.dir, "spool")
	must.Succeed(n.t, os.MkdirAll(dir, 0o700))
	temporary := filepath.Join(dir, "."+name)
	must.Succeed(n.t, os.WriteFile(temporary, content, 0o600))
	must.Succeed(n.t, os.Rename(temporary, filepath.Join(dir, name)))
}

func (n *node) spool(name string, r wire.Request) {
	n.t.Helper()
	content, err := json.Marshal(r)
	must.Succeed(n.t, err)
	n.spoolFile(name, content)
}

func (n *node) spooled() []string {
	files, err := filepath.Glob(filepath.Join(n.dir, "spool", "*.json"))
	must.Succeed(n.t, err)
	return files
}

// Requests that came while the agent did not run are handled before it listens. Later requests are
// handled when they come.
func TestSpool(t *testing.T) {
	t.Parallel()
	n := newNode(t, 3)
	var before [3]netdev.Snapshot
	for i := range before {
		before[i] = n.Snapshot(i)
	}

	n.run(func(r *running) {
		for i := range before {
			r.must(request(wire.Add, i, fmt.Sprint("c", i), netns.New(t),
				map[string]any{"network": "blue"}))
		}
	})

	n.spool("a.json", request(wire.Del, 0, "c0", nil, nil))
	n.spoolFile("bad.json", []byte(`{"version":1,"command":"ADD"}`))
	n.spoolFile("worse.json", []byte(`{`))
	n.spoolFile("old.json", []byte(`{"version":0,"command":"DEL"}`))
	n.spoolFile("undated.json",
		[]byte(`{"version":1,"command":"DEL","containerID":"c1","ifName":"net1"}`))
	must.Succeed(t, os.Symlink("/etc/passwd", filepath.Join(n.dir, "spool", "link.json")))
	later := request(wire.Del, 1, "c1", nil, nil)
	later.Version = wire.Version + 1
	n.spool("later.json", later)
	n.spoolFile("unfinished", []byte(`{`))

	n.serve(func(r *running) {
		r.checkFree(0, before[0]) // handled before the first connection was accepted
		if _, ok := r.Journal.Get(lifecycletest.ID(1)); !ok {
			t.Error("a request of a later version was done")
		}
		if bad := testutil.ToFloat64(r.Metrics.badFile); bad != 5 {
			t.Errorf("%v bad files", bad)
		}

		entries, err := os.ReadDir(filepath.Join(n.dir, "spool", badDir))
		if err != nil || len(entries) != 5 {
			t.Errorf("%d files put aside, error %v", len(entries), err)
		}

		n.spool("b.json", request(wire.Del, 2, "c2", nil, nil))
		must.Eventually(t, "a request is left", func() bool { return len(n.spooled()) == 1 })
		r.checkFree(2, before[2])
		if left := testutil.ToFloat64(r.Metrics.spool); left != 1 {
			t.Errorf("%v files left", left)
		}

		n.spool("later.json", wire.Request{
			Version: wire.Version, Command: wire.GC, At: time.Now(),
			Config: json.RawMessage(`{"name":"sriov","cni.dev/valid-attachments":[]}`),
		})

		must.Eventually(t, "no request is left", func() bool { return len(n.spooled()) == 0 })
		r.checkFree(1, before[1])
	})
}

// An old DEL does not touch what the same container got later.
func TestSpoolLate(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	n.run(func(r *running) {
		r.must(request(wire.Add, 0, "c1", netns.New(t), nil))
	})
	del := request(wire.Del, 0, "c1", nil, nil)
	del.At = time.Now().Add(-time.Hour)
	n.spool("late.json", del)

	n.serve(func(r *running) {
		if a, _ := r.Journal.Get(lifecycletest.ID(0)); a.State != journal.Attached {
			t.Errorf("record %+v", a)
		}
		if left := n.spooled(); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// A request that fails is retried, and delays no other request.
func TestSpoolRetries(t *testing.T) {
	t.Parallel()
	n := newNode(t, 2)
	pod, elsewhere := netns.New(t), netns.New(t)
	var before [2]netdev.Snapshot
	for i := range before {
		before[i] = n.Snapshot(i)
	}

	n.run(func(r *running) {
		r.must(request(wire.Add, 0, "c0", pod, nil))
		r.must(request(wire.Add, 1, "c1", netns.New(t), nil))
	})

	// the pod moved the interface on
	must.Succeed(t, pod.Handle().LinkSetNsFd(mustLink(t, pod, "net1"), elsewhere.Fd()))
	n.spool("a.json", request(wire.Del, 0, "c0", nil, nil))
	n.spool("b.json", request(wire.Del, 1, "c1", nil, nil))

	n.serve(func(r *running) {
		if left := n.spooled(); len(left) != 1 || filepath.Base(left[0]) != "a.json" {
			t.Errorf("left: %q", left)
		}
		must.Succeed(t, elsewhere.Handle().LinkSetNsFd(mustLink(t, elsewhere, "net1"), pod.Fd()))
		must.Eventually(t, "no request is left", func() bool { return len(n.spooled()) == 0 })
		r.checkFree(0, before[0])
		r.checkFree(1, before[1])
	})
}

// A request that replaces the request that is being handled is handled after it.
func TestSpoolReplaced(t *testing.T) {
	t.Parallel()
	n := newNode(t, 2)
	before := []netdev.Snapshot{n.Snapshot(0), n.Snapshot(1)}
	n.run(func(r *running) {
		for i := range before {
			r.must(request(wire.Add, i, fmt.Sprint("c", i), netns.New(t), nil))
		}
	})

	collect := func(valid string) wire.Request {
		return wire.Request{
			Version: wire.Version, Command: wire.GC, At: time.Now(),
			Config: json.RawMessage(`{"name":"sriov","cni.dev/valid-attachments":[` + valid + `]}`),
		}
	}

	n.spool("GC:sriov.json", collect(`{"containerID":"c1","ifname":"net1"}`))
	later := sync.OnceFunc(func() { n.spool("GC:sriov.json", collect("")) })
	n.Event = func(what string) {
		if what == "before "+string(journal.Releasing) {
			later()
		}
	}

	n.serve(func(r *running) {
		must.Eventually(t, "no request is left", func() bool { return len(n.spooled()) == 0 })
		for i := range before {
			r.checkFree(i, before[i])
		}
	})
}

// The spool comes back after it was removed, and requests in it are handled.
func TestSpoolRemoved(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	n.serve(func(r *running) {
		for range 2 {
			r.must(request(wire.Add, 0, "c0", netns.New(t), nil))
			must.Succeed(t, os.RemoveAll(filepath.Join(n.dir, "spool")))
			n.spool("a.json", request(wire.Del, 0, "c0", nil, nil))
			must.Eventually(t, "no request is left", func() bool { return len(n.spooled()) == 0 })
			r.checkFree(0, before)
		}
	})
}

// TestSpoolUnread checks that a file that cannot be read now stays, because it may be a request. The
// memory of a process, which has nothing at its beginning, stands for such a file.
func TestSpoolUnread(t *testing.T) {
	needs.Root(t, "a mount takes the place of the file")
	dir := filepath.Join(t.TempDir(), "spool")
	file := filepath.Join(dir, "a.json")
	must.Succeed(t, os.Mkdir(dir, privateMode))
	must.Succeed(t, os.WriteFile(file, nil, 0o600))

	s := &Server{
		SpoolDir: dir, Metrics: NewMetrics(prometheus.NewRegistry()), Log: testr.New(t),
	}
	changes, err := watchdir.Open(dir, nil)
	must.Succeed(t, err)
	defer changes.Close()

	empty := make(chan bool)
	go func() {
		defer close(empty)
		runtime.LockOSThread() // the mount ends with the thread
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount("/proc/self/mem", file, "", unix.MS_BIND, "")
		}
		if err != nil {
			t.Error(err)
			return
		}
		empty <- s.drainSpool(t.Context(), changes)
	}()

	if <-empty {
		t.Error("no request is left")
	}
	if bad := testutil.ToFloat64(s.Metrics.badFile); bad != 0 {
		t.Errorf("%v bad files", bad)
	}
}

// TestClockSetWhileAway: the clock is set while the agent does not run. A DEL that came after its
// ADD is done, and a DEL that came before it is not. The shim and the record have the time since
// the boot. An older shim has only the clock.
func TestClockSetWhileAway(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		// clock is the clock's change between the ADD and the DEL.
		clock time.Duration
		asked func(made uptime.Moment) uptime.Moment
		done  bool
	}{
		"DEL later, clock set back":      {-time.Hour, later(time.Second), true},
		"DEL at once, clock set back":    {-time.Hour, later(0), true},
		"DEL earlier, clock set forward": {time.Hour, later(-time.Second), false},
		"DEL of an earlier boot": {time.Hour, func(uptime.Moment) uptime.Moment {
			return uptime.Moment{BootID: "boot-0", Since: 1 << 60}
		}, false},
		"DEL of an older shim": {time.Hour, func(uptime.Moment) uptime.Moment {
			return uptime.Moment{}
		}, true},
		"DEL of an older shim, set back": {-time.Hour, func(uptime.Moment) uptime.Moment {
			return uptime.Moment{}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			before := n.Snapshot(0)
			del := request(wire.Del, 0, "c1", nil, nil)
			n.run(func(r *running) {
				r.must(request(wire.Add, 0, "c1", netns.New(t), nil))
				record, _ := r.Journal.Get(lifecycletest.ID(0))
				del.At, del.Asked = record.AttachedAt.Add(test.clock), test.asked(record.Made)
			})

			n.spool("a.json", del)
			n.serve(func(r *running) {
				if test.done {
					r.checkFree(0, before)
				} else if a, _ := r.Journal.Get(lifecycletest.ID(0)); a.State != journal.Attached {
					t.Errorf("record %+v", a)
				}
				if left := n.spooled(); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		})
	}
}

func later(by time.Duration) func(uptime.Moment) uptime.Moment {
	return func(m uptime.Moment) uptime.Moment {
		m.Since += by
		return m
	}
}

// TestOrderOfRequests: requests of this boot are ordered by the time since the boot, and come after
// all others.
func TestOrderOfRequests(t *testing.T) {
	t.Parallel()
	s := &Server{BootID: "boot-1"}
	at := func(clock int64, boot string, madeAfter time.Duration) wire.Request {
		return wire.Request{
			At: time.Unix(clock, 0), Asked: uptime.Moment{BootID: boot, Since: madeAfter},
		}
	}

	want := []wire.Request{at(1, "", 0), at(2, "boot-0", 9), at(3, "", 0), at(9, "boot-1", 1),
		at(5, "boot-1", 2), at(7, "boot-1", 3)}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortStableFunc(got, s.order)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}
