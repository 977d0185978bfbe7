// SPDX-License-Identifier: Apache-2.0

package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// node is a host with Functions and an agent that can be ended and started again.
type node struct {
	*lifecycletest.Node
	t testing.TB
}

// agent is one run of the agent.
type agent struct {
	*lifecycletest.Agent
	hooks *hooks
}

// hooks is a queue with at most one hook after every release.
type hooks struct {
	name  string
	mutex sync.Mutex
	added []function.ID
}

func (h *hooks) First(journal.Attachment) string { return h.name }

func (h *hooks) Add(id function.ID) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.added = append(h.added, id)
}

func newNode(t testing.TB, functions int) *node {
	t.Helper()
	return &node{lifecycletest.New(t, functions), t}
}

// start starts an agent, which runs until stop is called.
func (n *node) start() (a *agent, stop func()) {
	n.t.Helper()
	a = &agent{hooks: &hooks{}}
	a.Agent, stop = n.Start(func(*lifecycletest.Agent) lifecycle.Queue { return a.hooks })
	return a, stop
}

func (n *node) run(f func(a *agent)) {
	n.t.Helper()
	a, stop := n.start()
	defer stop()
	f(a)
}

func mustFail(t testing.TB, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want one with %q", err, want)
	}
}

func claimed(i int) journal.Attachment {
	return journal.Attachment{
		Function: lifecycletest.ID(i), PF: "0000:3b:00.0", VFIndex: i,
		Claim: journal.Claim{Namespace: "default", Name: "c", UID: "claim-1", Request: "nic"},
		Pod:   pod1,
		Interface: function.Interface{
			Name: fmt.Sprintf("net%d", i), MTU: 1400, MAC: "02:00:00:00:00:01",
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")},
			Routes: []function.Route{
				{To: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 2, byte(i), 0}), 24),
					Via: netip.MustParseAddr("10.1.0.1")},
			},
		},
	}
}

var pod1 = journal.Pod{Namespace: "default", Name: "pod", UID: "pod-1"}

func sandbox(id string, ns *netns.Namespace) lifecycle.Sandbox {
	return lifecycle.Sandbox{ID: id, NetNS: ns.Path(), Pod: pod1}
}

// useAsPodWould makes changes that a pod with NET_ADMIN can make.
func useAsPodWould(t testing.TB, ns *netns.Namespace, name string) {
	t.Helper()
	h := ns.Handle()
	l, err := h.LinkByName(name)
	must.Succeed(t, err)
	leave(t, ns, name)
	must.Succeed(t, h.LinkSetDown(l))
	must.Succeed(t, h.LinkSetName(l, "mine0"))
	must.Succeed(t, h.LinkSetMTU(l, 1300))
	must.Succeed(t, h.LinkSetHardwareAddr(l, function.MAC("02:00:00:00:00:66").HardwareAddr()))
	must.Succeed(t, h.LinkAddAltName(l, "lo0"))
	must.Succeed(t, h.LinkAddAltName(l, "a-rather-long-alternative-name"))
	must.Succeed(t, h.LinkSetAlias(l, "mine"))
	must.Succeed(t, h.LinkSetUp(l))
	address, err := netlink.ParseAddr("192.0.2.1/24")
	must.Succeed(t, err)
	must.Succeed(t, h.AddrAdd(l, address))
}

func TestLife(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	first, second := netns.New(t), netns.New(t)
	id := lifecycletest.ID(0)
	n.run(func(a *agent) {
		ctx := t.Context()
		must.Succeed(t, a.Lifecycle.Reserve(ctx, claimed(0)))
		must.Succeed(t, a.Lifecycle.Reserve(ctx, claimed(0))) // the kubelet prepares again
		other := claimed(0)
		other.Claim.UID = "claim-2"
		mustFail(t, a.Lifecycle.Reserve(ctx, other),
			"Function "+id.String()+": belongs to claim default/c (UID claim-1)")

		observed, err := a.Lifecycle.Attach(ctx, id, sandbox("s1", first))
		must.Succeed(t, err)
		if observed.Name != "net0" || observed.MTU != 1400 || observed.MAC != "02:00:00:00:00:01" ||
			len(observed.Addresses) != 1 {
			t.Errorf("observed %+v", observed)
		}

		again, err := a.Lifecycle.Attach(ctx, id, sandbox("s1", first))
		must.Succeed(t, err)

		if diff := cmp.Diff(observed, again, cmp.Comparer(func(a, b netip.Prefix) bool {
			return a == b
		})); diff != "" {
			t.Errorf("attached again (-first +again):\n%s", diff)
		}

		must.Succeed(t, a.Lifecycle.Reserve(ctx, claimed(0)))
		useAsPodWould(t, first, "net0")

		must.Succeed(t, a.Lifecycle.Detach(ctx, id, "s0")) // a late stop
		must.Succeed(t, a.Lifecycle.Unprepare(ctx, "claim-0"))
		if record, _ := a.Journal.Get(id); record.State != journal.Attached {
			t.Errorf("state %s after a late stop and a late release", record.State)
		}

		// The pod's sandbox died, and the pod gets another sandbox before the stop of the first one
		// is reported.
		_, err = a.Lifecycle.Attach(ctx, id, sandbox("s2", second))
		must.Succeed(t, err)
		must.Succeed(t, a.Lifecycle.Detach(ctx, id, "s1"))
		if record, _ := a.Journal.Get(id); record.State != journal.Attached ||
			record.Sandbox != "s2" {
			t.Errorf("state %s for sandbox %s after the late stop", record.State, record.Sandbox)
		}

		useAsPodWould(t, second, "net0")
		must.Succeed(t, a.Lifecycle.Detach(ctx, id, "s2"))
		must.Succeed(t, a.Lifecycle.Detach(ctx, id, "s2"))
		want := claimed(0)
		want.State = journal.Reserved
		record, _ := a.Journal.Get(id)
		want.ReservedAt, want.Made = record.ReservedAt, record.Made
		if use, ok := record.LastUse(); !ok || use.Sandbox != "s2" || use.AttachedAt.IsZero() ||
			use.StoppedAt.Before(use.AttachedAt) {
			t.Errorf("last use %+v", use)
		}

		want.Ended = record.Ended
		if diff := cmp.Diff(want, record, cmp.Comparer(func(a, b netip.Prefix) bool {
			return a == b
		}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("record after detach (-want +got):\n%s", diff)
		}

		n.WantAsBefore(0, before)

		must.Succeed(t, a.Lifecycle.Unprepare(ctx, "claim-1"))
		must.Succeed(t, a.Lifecycle.Unprepare(ctx, "claim-1"))
		if _, ok := a.Journal.Get(id); ok {
			t.Error("not free after release")
		}
		if len(a.hooks.added) > 0 {
			t.Errorf("handed over: %v, although there are no hooks", a.hooks.added)
		}

		_, err = a.Lifecycle.Attach(ctx, id, sandbox("s3", second))
		mustFail(t, err, "is not reserved")
	})
}

func TestAttachRefuses(t *testing.T) {
	t.Parallel()
	n := newNode(t, 2)
	first, second := netns.New(t), netns.New(t)
	id := lifecycletest.ID(0)
	n.run(func(a *agent) {
		ctx := t.Context()
		bad := claimed(0)
		bad.Interface.Name = "a/b"
		mustFail(t, a.Lifecycle.Reserve(ctx, bad),
			`Function 0000:3b:00.0/sf0: interface name "a/b"`)
		must.Succeed(t, a.Lifecycle.Reserve(ctx, claimed(0)))
		otherPod := sandbox("s2", second)
		otherPod.Pod = journal.Pod{Namespace: "default", Name: "other", UID: "pod-2"}
		_, err := a.Lifecycle.Attach(ctx, id, otherPod)
		mustFail(t, err,
			"belongs to claim default/c (UID claim-1) and is for pod default/pod (UID pod-1)")
		_, err = a.Lifecycle.Attach(ctx, id, lifecycle.Sandbox{ID: "s1", Pod: pod1})
		mustFail(t, err, "both must be given")
		_, err = a.Lifecycle.Attach(ctx, id, sandbox("s1", first))
		must.Succeed(t, err)
		_, err = a.Lifecycle.Attach(ctx, id, otherPod)
		mustFail(t, err, "is Attached in pod default/pod (sandbox s1)")
		late := sandbox("s0", second)
		late.NetNS += "-gone"
		_, err = a.Lifecycle.Attach(ctx, id, late)
		mustFail(t, err, "no such file")
		if record, _ := a.Journal.Get(id); record.Sandbox != "s1" ||
			record.State != journal.Attached {
			t.Errorf("record %+v", record)
		}

		unknown := claimed(7)
		must.Succeed(t, a.Lifecycle.Reserve(ctx, unknown))
		ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()

		_, err = a.Lifecycle.Attach(ctx, unknown.Function, sandbox("s1", first))
		mustFail(t, err, "Function 0000:3b:00.0/sf7: no netdev in the host's network namespace")
	})
}

// The netdev appears a moment after the pod, here from another namespace.
func TestNetdevComesLate(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	pod, elsewhere := netns.New(t), netns.New(t)
	l, err := n.Host.Handle().LinkByName(lifecycletest.Netdev(0))
	must.Succeed(t, err)
	must.Succeed(t, n.Host.Handle().LinkSetNsFd(l, elsewhere.Fd()))

	n.run(func(a *agent) {
		must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
		looked := make(chan struct{})
		first := sync.OnceFunc(func() { close(looked) })
		late := lifecycle.New(a.Journal, a.Engine, finderFunc(func(id function.ID) (string, error) {
			defer first()
			return n.Netdev(id)
		}), lifecycle.Options{BootID: n.BootID}, logr.Discard())

		var group sync.WaitGroup
		group.Go(func() {
			<-looked
			if err := elsewhere.Handle().LinkSetNsFd(l, n.Host.Fd()); err != nil {
				t.Error(err)
			}
		})

		_, err := late.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
		group.Wait()
		must.Succeed(t, err)
	})
}

type finderFunc func(function.ID) (string, error)

func (f finderFunc) Netdev(id function.ID) (string, error) { return f(id) }

// crashes runs what an agent does and ends the agent at the given event. It returns false if there
// were fewer events.
func (n *node) crashes(at int, do func(a *agent)) (crashed bool) {
	a, stop := n.start()
	defer stop()
	return n.Crashes(at, func() { do(a) })
}

// TestCrash ends the agent at every point of every operation. The next agent completes the
// operation.
func TestCrash(t *testing.T) {
	t.Parallel()
	id := lifecycletest.ID(0)
	attachIt := func(t *testing.T, a *agent, pod *netns.Namespace) {
		t.Helper()
		_, err := a.Lifecycle.Attach(t.Context(), id, sandbox("s1", pod))
		must.Succeed(t, err)
	}

	operations := []struct {
		name     string
		attached bool // the operation starts with the Function in the pod
		do       func(t *testing.T, a *agent, pod *netns.Namespace)
		// atLeast is the least number of events.
		atLeast int
	}{
		{"attach", false, attachIt, 9},
		{"detach", true, func(t *testing.T, a *agent, _ *netns.Namespace) {
			must.Succeed(t, a.Lifecycle.Detach(t.Context(), id, "s1"))
		}, 6},
		{"release", true, func(t *testing.T, a *agent, _ *netns.Namespace) {
			must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
		}, 6},
	}

	heals := map[string]func(t *testing.T, a *agent) (settled bool){
		"recover": func(t *testing.T, a *agent) bool {
			must.Succeed(t, a.Lifecycle.Recover(t.Context()))
			record, ok := a.Journal.Get(id)
			return !ok || record.State == journal.Reserved
		},
		"stop": func(t *testing.T, a *agent) bool {
			must.Succeed(t, a.Lifecycle.Detach(t.Context(), id, "s1"))
			record, ok := a.Journal.Get(id)
			return !ok || record.State == journal.Reserved
		},
		"release": func(t *testing.T, a *agent) bool { return true },
	}

	for _, operation := range operations {
		for healName, heal := range heals {
			t.Run(operation.name+", then "+healName, func(t *testing.T) {
				t.Parallel()
				for at := 1; ; at++ {
					n := newNode(t, 1)
					must.Succeed(t,
						n.Host.Handle().LinkAddAltName(mustLink(t, n.Host, lifecycletest.Netdev(0)),
							"net0"))
					before := n.Snapshot(0)
					pod := netns.New(t)
					n.run(func(a *agent) {
						must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
						if operation.attached {
							attachIt(t, a, pod)
							useAsPodWould(t, pod, "net0")
						}
					})

					crashed := n.crashes(at, func(a *agent) { operation.do(t, a, pod) })
					n.run(func(a *agent) {
						if healed := heal(t, a); healed && healName != "release" {
							n.WantAsBefore(0, before)
						} else if !healed &&
							(healName != "recover" || crashed && operation.attached && at > 1) {
							record, _ := a.Journal.Get(id)
							if record.State != journal.Attached {
								t.Errorf("event %d: state %s", at, record.State)
							}
						}

						must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
						if _, ok := a.Journal.Get(id); ok {
							t.Errorf("event %d: not free after release", at)
						}
					})

					n.WantAsBefore(0, before)
					if t.Failed() {
						t.Fatalf("failed at event %d", at)
					}

					if !crashed {
						if at-1 < operation.atLeast {
							t.Errorf("only %d events", at-1)
						}
						return
					}
				}
			})
		}
	}
}

// Functions that are attached to a namespace that exists stay where they are when the agent starts
// again.
func TestRecoverLeavesAttached(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	pod := netns.New(t)
	n.run(func(a *agent) {
		must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
		_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
		must.Succeed(t, err)
	})

	n.Event = func(what string) { t.Errorf("touched: %s", what) }
	n.run(func(a *agent) { must.Succeed(t, a.Lifecycle.Recover(t.Context())) })
	n.Event = nil
	mustLink(t, pod, "net0")
	n.run(func(a *agent) { must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1")) })
	n.WantAsBefore(0, before)
}

// The namespace ended while the agent was away, and the kernel brought the netdev back: with the
// pod's name, and down.
func TestNamespaceEndedNetdevReturned(t *testing.T) {
	t.Parallel()
	for name, heal := range map[string]func(a *agent) error{
		"recover": func(a *agent) error { return a.Lifecycle.Recover(t.Context()) },
		"detach": func(a *agent) error {
			return a.Lifecycle.Detach(t.Context(), lifecycletest.ID(0), "s1")
		},
		"release": func(a *agent) error { return a.Lifecycle.Unprepare(t.Context(), "claim-1") },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			before := n.Snapshot(0)
			pod := netns.New(t)
			n.run(func(a *agent) {
				must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
				_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
				must.Succeed(t, err)
			})

			useAsPodWould(t, pod, "net0")
			must.Succeed(t, pod.Handle().LinkSetNsFd(mustLink(t, pod, "mine0"), n.Host.Fd()))
			must.Succeed(t, pod.Unmount())

			n.run(func(a *agent) {
				must.Succeed(t, heal(a))
				if record, ok := a.Journal.Get(lifecycletest.ID(0)); ok &&
					record.State != journal.Reserved {
					t.Errorf("state %s", record.State)
				}
			})

			n.WantAsBefore(0, before)
		})
	}
}

// An end of a veth pair ends with its namespace. There is nothing to restore, and the Function must
// become free.
func TestNamespaceEndedNetdevGone(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	a, stop := n.start()
	defer stop()

	t.Run("pod", func(t *testing.T) { // its end is the namespace's
		pod := netns.New(t)
		must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
		_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
		must.Succeed(t, err)
	})

	must.Succeed(t, a.Lifecycle.Recover(t.Context()))
	if record, ok := a.Journal.Get(lifecycletest.ID(0)); !ok || record.State != journal.Reserved {
		t.Errorf("after recover: %v %v", record.State, ok)
	}

	must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
	if _, ok := a.Journal.Get(lifecycletest.ID(0)); ok {
		t.Error("not free after release")
	}
}

// After a reboot there are no namespaces and the netdevs are new. Nothing may be touched.
func TestBoot(t *testing.T) {
	t.Parallel()
	for _, state := range []journal.State{
		journal.Attaching, journal.Attached, journal.Detaching, journal.Releasing,
	} {
		t.Run(string(state), func(t *testing.T) {
			n := newNode(t, 1)
			pod := netns.New(t)
			n.run(func(a *agent) {
				must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
				_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
				must.Succeed(t, err)
				record, _ := a.Journal.Get(lifecycletest.ID(0))
				record.State = state
				must.Succeed(t, a.Journal.Put(record))
			})

			n.BootID = "boot-2"
			n.Event = func(what string) {
				if !strings.HasPrefix(what, "before ") && !strings.HasPrefix(what, "after ") {
					t.Errorf("touched: %s", what)
				}
			}

			n.run(func(a *agent) {
				must.Succeed(t, a.Lifecycle.Recover(t.Context()))
				record, ok := a.Journal.Get(lifecycletest.ID(0))
				if free := state == journal.Releasing; ok == free {
					t.Errorf("there is a record: %v", ok)
				}
				if ok && (record.State != journal.Reserved || record.Before != nil ||
					record.Place != (netdev.Place{})) {
					t.Errorf("record %+v", record)
				}
			})
		})
	}
}

// The pod moved the netdev on to another namespace. The netdev cannot be reached, and the state
// says so until it can.
func TestNetdevMovedOn(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	pod, nested := netns.New(t), netns.New(t)
	n.run(func(a *agent) {
		must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
		_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
		must.Succeed(t, err)
		l := mustLink(t, pod, "net0")
		must.Succeed(t, pod.Handle().LinkSetNsFd(l, nested.Fd()))
		if err := a.Lifecycle.Unprepare(t.Context(), "claim-1"); !errors.Is(err, netdev.ErrAway) {
			t.Errorf("error %v, want %v", err, netdev.ErrAway)
		}
		if record, _ := a.Journal.Get(lifecycletest.ID(0)); record.State != journal.Releasing {
			t.Errorf("state %s", record.State)
		}

		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()

		mustFail(t, a.Lifecycle.Reserve(ctx, claimed(0)), "is not back from pod default/pod")
		must.Succeed(t, nested.Handle().LinkSetNsFd(mustLink(t, nested, "net0"), pod.Fd()))
		must.Succeed(t, a.Lifecycle.Recover(t.Context()))
		if _, ok := a.Journal.Get(lifecycletest.ID(0)); ok {
			t.Error("not free after recover")
		}
	})

	n.WantAsBefore(0, before)
}

// Every call that finds a Function that is back and has hooks queues it, and does not touch it any
// more.
func TestHandedOver(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	id := lifecycletest.ID(0)
	pod := netns.New(t)

	again := map[string]func(a *agent) error{
		"release": func(a *agent) error {
			return a.Lifecycle.Unprepare(t.Context(), "claim-1")
		},
		"late release": func(a *agent) error {
			return a.Lifecycle.Unprepare(t.Context(), "claim-0")
		},
		"detach":  func(a *agent) error { return a.Lifecycle.Detach(t.Context(), id, "s1") },
		"recover": func(a *agent) error { return a.Lifecycle.Recover(t.Context()) },
	}

	n.run(func(a *agent) {
		a.hooks.name = "10-tell"
		must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
		_, err := a.Lifecycle.Attach(t.Context(), id, sandbox("s1", pod))
		must.Succeed(t, err)
		must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
	})

	n.WantAsBefore(0, before)
	for name, call := range again {
		t.Run(name, func(t *testing.T) {
			n.Event = func(what string) { t.Errorf("touched: %s", what) }
			defer func() { n.Event = nil }()

			n.run(func(a *agent) {
				must.Succeed(t, call(a))
				if want := []function.ID{id}; name != "late release" &&
					!slices.Equal(a.hooks.added, want) {
					t.Errorf("handed over %v, want %v", a.hooks.added, want)
				}

				record, _ := a.Journal.Get(id)
				if !record.Restored() || record.Hooks.Next != "10-tell" || record.Sandbox != "s1" ||
					record.AttachedAt.IsZero() {
					t.Errorf("record %+v", record)
				}
			})
		})
	}

	n.run(func(a *agent) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		mustFail(t, a.Lifecycle.Reserve(ctx, claimed(0)), "waits for its post-delete hooks")
		_, err := a.Lifecycle.Attach(t.Context(), id, sandbox("s2", pod))
		mustFail(t, err, "is being released from claim default/c")
	})
}

// TestCrashBeforeHooks ends the agent at every point of a release after which hooks run. The next
// agent queues the hooks.
func TestCrashBeforeHooks(t *testing.T) {
	t.Parallel()
	id := lifecycletest.ID(0)
	for at := 1; ; at++ {
		n := newNode(t, 1)
		before := n.Snapshot(0)
		pod := netns.New(t)
		n.run(func(a *agent) {
			must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
			_, err := a.Lifecycle.Attach(t.Context(), id, sandbox("s1", pod))
			must.Succeed(t, err)
			useAsPodWould(t, pod, "net0")
		})

		crashed := n.crashes(at, func(a *agent) {
			a.hooks.name = "10-tell"
			must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
		})

		n.run(func(a *agent) {
			a.hooks.name = "10-tell"
			must.Succeed(t, a.Lifecycle.Recover(t.Context()))
			must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1")) // its caller tries again
			if !slices.Contains(a.hooks.added, id) {
				t.Errorf("event %d: not handed over", at)
			}
			if record, _ := a.Journal.Get(id); !record.Restored() {
				t.Errorf("event %d: record %+v", at, record)
			}
		})

		n.WantAsBefore(0, before)
		if t.Failed() {
			t.FailNow()
		}

		if !crashed {
			if at-1 < 6 {
				t.Errorf("only %d events", at-1)
			}
			return
		}
	}
}

// Several goroutines work on different Functions and on the same Function at the same time.
func TestParallel(t *testing.T) {
	t.Parallel()
	const functions, rounds, workers = 4, 5, 3
	n := newNode(t, functions)
	var before [functions]netdev.Snapshot
	for i := range functions {
		before[i] = n.Snapshot(i)
	}

	pod := netns.New(t)
	n.run(func(a *agent) {
		var group sync.WaitGroup
		for i := range functions {
			for range workers {
				group.Go(func() {
					for range rounds {
						errs := []error{a.Lifecycle.Reserve(t.Context(), claimed(i))}
						_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(i),
							sandbox("s1", pod))
						// Another worker may just have released the Function, or be about to
						// release it.
						if err != nil && !strings.Contains(err.Error(), "is not reserved") &&
							!strings.Contains(err.Error(), "is being released") {
							errs = append(errs, err)
						}

						errs = append(errs, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
						if err := errors.Join(errs...); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}

		group.Wait()
		if left := a.Journal.All(); len(left) > 0 {
			t.Errorf("left: %+v", left)
		}
	})

	for i := range functions {
		n.WantAsBefore(i, before[i])
	}
}

func mustLink(t testing.TB, ns *netns.Namespace, name string) netlink.Link {
	t.Helper()
	l, err := ns.Handle().LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return l
}

// BenchmarkLife attaches and releases a Function, with the journal on the disk. Compare it with
// BenchmarkBareMove of package netdev.
func BenchmarkLife(b *testing.B) {
	n := newNode(b, 1)
	// The journal is beside the test, because a temporary directory may be on a file system without
	// a disk.
	n.JournalPath = "bench-journal.db"
	b.Cleanup(func() { must.Succeed(b, os.Remove(n.JournalPath)) })

	pod := netns.New(b)
	n.run(func(a *agent) {
		var attach, release time.Duration
		for b.Loop() {
			must.Succeed(b, a.Lifecycle.Reserve(b.Context(), claimed(0)))
			start := time.Now()
			_, err := a.Lifecycle.Attach(b.Context(), lifecycletest.ID(0), sandbox("s1", pod))
			must.Succeed(b, err)
			attach += time.Since(start)
			start = time.Now()
			must.Succeed(b, a.Lifecycle.Unprepare(b.Context(), "claim-1"))
			release += time.Since(start)
		}

		b.ReportMetric(float64(attach.Microseconds())/float64(b.N), "attach-us")
		b.ReportMetric(float64(release.Microseconds())/float64(b.N), "release-us")
	})
}
