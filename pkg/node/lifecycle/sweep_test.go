// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// kubelet stands for the kubelet.
type kubelet struct {
	have map[string]podresources.Assignment
	err  error
	asks int
}

func (k *kubelet) Assigned(context.Context) (map[string]podresources.Assignment, error) {
	k.asks++
	return k.have, k.err
}

func (k *kubelet) Refresh(context.Context) (bool, error) { return false, k.err }

func (k *kubelet) InUse(id function.ID, resource string) string {
	if a, has := k.have[id.String()]; has && a.Resource != resource {
		return a.String() + " still has it"
	}
	return ""
}

// claims stands for the API server. It has the pods that claims are reserved for, by the claim's
// UID.
type claims struct {
	consumers map[types.UID][]types.UID
	err       error
}

func (c claims) Consumers(_ context.Context, of journal.Claim) ([]types.UID, bool, error) {
	pods, exists := c.consumers[of.UID]
	return pods, exists, c.err
}

// TestHealthIsReported: a release reports a change of health at once, and again when a Function
// that is not back yet counts as unhealthy.
func TestHealthIsReported(t *testing.T) {
	for name, call := range map[string]func(context.Context, *Manager) error{
		"release": func(ctx context.Context, m *Manager) error {
			return m.Unprepare(ctx, "claim-1")
		},
		"detach": func(ctx context.Context, m *Manager) error { return m.Detach(ctx, vf, "s") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var notified atomic.Int32
				j := openJournal(t)
				m := New(j, &engine{restore: errors.New("busy")}, netdevs{},
					Options{Changed: func() { notified.Add(1) }}, testr.New(t))
				a := claimedVF()
				a.State, a.StoppedAt, a.Sandbox, a.Before = journal.Releasing, time.Now(), "s", &netdev.Snapshot{}
				if err := j.Put(a); err != nil {
					t.Fatal(err)
				}
				if err := call(t.Context(), m); err == nil || notified.Load() != 1 {
					t.Errorf("error %v, notified %d times; want the engine's error and once", err,
						notified.Load())
				}
				if message := m.Overdue(vf); message != "" {
					t.Errorf("overdue at once: %s", message)
				}

				time.Sleep(releaseGrace)
				synctest.Wait()
				if message := m.Overdue(vf); message == "" || notified.Load() != 2 {
					t.Errorf("overdue %q, notified %d times; want a message and twice", message,
						notified.Load())
				}
			})
		})
	}
}

// TestOverdue: for DRA, only a Function whose release takes longer than usual is unhealthy. For the
// device plugin, every Function is whose pod is gone.
func TestOverdue(t *testing.T) { synctest.Test(t, testOverdue) }

func testOverdue(t *testing.T) {
	j := openJournal(t)
	m := New(j, &engine{}, netdevs{}, Options{}, testr.New(t))
	if overdue, releasing := m.Overdue(vf), m.Releasing(vf); overdue+releasing != "" {
		t.Errorf("a free Function is overdue: %s, releasing: %s", overdue, releasing)
	}

	hooks := &journal.Hooks{Next: "port", Error: "XPU xpu-1 is away"}
	for _, test := range []struct {
		state journal.State
		hooks *journal.Hooks
		// stopped is the age of the release.
		stopped            time.Duration
		overdue, releasing bool
		text               string
	}{
		{journal.Reserved, nil, 0, false, false, ""},
		{journal.Attaching, nil, 0, false, false, ""},
		// the pod gets another sandbox
		{journal.Detaching, nil, releaseGrace / 2, false, false, ""},
		{journal.Releasing, nil, releaseGrace / 2, false, true,
			"is not back from pod default/pod1"},
		{journal.Releasing, nil, 2 * releaseGrace, true, true, "is not back from pod default/pod1"},
		{journal.Releasing, hooks, 0, false,
			true, "hook port, which is tried again: XPU xpu-1 is away"},
		{journal.Releasing, hooks, 2 * releaseGrace, true, true,
			"hook port, which is tried again: XPU xpu-1 is away"},
		{journal.Detaching, nil, 2 * releaseGrace, true, true, "is not back from pod default/pod1"},
	} {
		a := journal.Attachment{Function: vf, State: test.state,
			Pod:    journal.Pod{Namespace: "default", Name: "pod1"},
			Before: &netdev.Snapshot{}, StoppedAt: time.Now(), Hooks: test.hooks}
		if test.hooks != nil {
			a.RestoredAt = time.Now()
		}
		if err := m.put(a); err != nil {
			t.Fatal(err)
		}

		time.Sleep(test.stopped)
		for _, source := range []struct {
			name, message string
			want          bool
		}{{"overdue", m.Overdue(vf), test.overdue},
			{"releasing", m.Releasing(vf), test.releasing}} {
			if (source.message != "") != source.want ||
				source.want && !strings.Contains(source.message, test.text) {
				t.Errorf("%s for %s: %s says %q, want something: %t, with %q",
					test.state, test.stopped, source.name, source.message, source.want, test.text)
			}
		}
	}
}

// TestRun: unfinished work continues without a request.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		notified, j := 0, openJournal(t)
		e := &engine{restore: errors.New("busy")}
		m := New(j, e, netdevs{}, Options{Changed: func() { notified++ }}, testr.New(t))

		if err := j.Put(journal.Attachment{
			Function: vf, State: journal.Releasing, Before: &netdev.Snapshot{},
		}); err != nil {
			t.Fatal(err)
		}

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx, nil) }()
		time.Sleep(2*time.Minute + time.Second)
		synctest.Wait()
		// The Function is quarantined by then, which is another report.
		if len(e.calls) != 2 || notified != 3 {
			t.Errorf("engine did %q, notified %d times in two minutes, want two restores and three",
				e.calls, notified)
		}

		stop()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil when its context ends", err)
		}
	})
}

// TestSweep: only reservations that no pod needs any more are released.
func TestSweep(t *testing.T) {
	const resource = "xpu.opiproject.org/fast"
	// Two sweeps are needed, and the first one counts only once the reservation is old enough.
	after := 5*time.Minute + time.Minute
	has := map[string]podresources.Assignment{
		vf.String(): {Resource: resource, Namespace: "default", Pod: "pod1"},
	}
	claim := journal.Claim{Namespace: "default", Name: "c", UID: "c"}
	known := func(pods ...types.UID) claims {
		return claims{consumers: map[types.UID][]types.UID{"c": pods}}
	}
	request := &journal.CNI{ContainerID: "c1", IfName: "net1"}
	for name, test := range map[string]struct {
		record  journal.Attachment
		kubelet kubelet
		claims  Claims
		// after is the time until the Function is free; 0 for never.
		after time.Duration
		asked bool
	}{
		"no pod has it": {journal.Attachment{Resource: resource, State: journal.Reserved},
			kubelet{}, nil, after, true},
		"a pod has it": {journal.Attachment{Resource: resource, State: journal.Reserved},
			kubelet{have: has}, nil, 0, true},
		"kubelet away": {journal.Attachment{Resource: resource, State: journal.Reserved},
			kubelet{err: errors.New("no such socket")}, nil, 0, true},
		"attached": {
			journal.Attachment{
				Resource: resource, State: journal.Attaching, BootID: "b",
				Before: &netdev.Snapshot{},
			}, kubelet{}, nil, 0, false,
		},
		"an ADD that never ended": {
			journal.Attachment{State: journal.Reserved, CNI: request}, kubelet{}, nil, after, true,
		},
		"another has another": {journal.Attachment{Resource: resource, State: journal.Reserved},
			kubelet{have: map[string]podresources.Assignment{"0000:3b:00.3": {}}},
			nil, after, true},
		"the claim is gone": {
			journal.Attachment{Claim: claim, State: journal.Reserved}, kubelet{}, claims{},
			after, true,
		},
		"no pod uses the claim": {
			journal.Attachment{Claim: claim, State: journal.Reserved}, kubelet{},
			known(), after, true,
		},
		"a pod uses the claim": {
			journal.Attachment{Claim: claim, State: journal.Reserved}, kubelet{},
			known("pod-1"), 0, true,
		},
		"the claim is gone, the pod not": {
			journal.Attachment{Claim: claim, State: journal.Reserved}, kubelet{have: has},
			claims{}, 0, true,
		},
		"the API server is away": {
			journal.Attachment{Claim: claim, State: journal.Reserved}, kubelet{},
			claims{err: errors.New("refused")}, 0, true,
		},
		"there is no API server for claims": {
			journal.Attachment{Claim: claim, State: journal.Reserved}, kubelet{}, nil, 0, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := openJournal(t)
				test.record.Function, test.record.ReservedAt = vf, time.Now()
				if err := j.Put(test.record); err != nil {
					t.Fatal(err)
				}

				m := New(j, &engine{restore: errors.New("in the pod")}, netdevs{},
					Options{BootID: "b", Kubelet: &test.kubelet, Claims: test.claims}, testr.New(t))
				go m.Run(t.Context(), nil)
				begin := time.Now()
				var took time.Duration
				for time.Since(begin) < time.Hour && took == 0 {
					time.Sleep(time.Minute)
					synctest.Wait()
					if _, exists := j.Get(vf); !exists {
						took = time.Since(begin)
					}
				}

				if took != test.after {
					t.Errorf("free after %s, want %s", took, test.after)
				}
				if asked := test.kubelet.asks > 0; asked != test.asked {
					t.Errorf("kubelet asked %d times, want any: %t", test.kubelet.asks, test.asked)
				}
			})
		})
	}
}

// TestSweepLooksTwice: two consecutive sweeps must find the same reservation.
func TestSweepLooksTwice(t *testing.T) {
	t.Parallel()
	j, k := openJournal(t), &kubelet{}
	m := New(j, &engine{}, netdevs{}, Options{Kubelet: k, AbandonedAfter: -1}, testr.New(t))

	reserve := func(ago time.Duration) {
		t.Helper()
		err := j.Put(journal.Attachment{
			Function: vf, Resource: "xpu.opiproject.org/fast", State: journal.Reserved,
			ReservedAt: time.Now().Add(-ago),
		})
		if err != nil {
			t.Fatal(err)
		}
	}

	look := func() { m.sweep(t.Context()) }
	reserve(time.Hour)
	look()
	reserve(2 * time.Hour) // another reservation
	look()
	k.err = errors.New("no such socket")
	look()
	k.err = nil
	look()
	k.have = map[string]podresources.Assignment{vf.String(): {}}
	look()
	k.have = nil
	look()
	if _, exists := j.Get(vf); !exists {
		t.Fatal("released although it was never looked twice in a row")
	}

	look()
	if _, exists := j.Get(vf); exists {
		t.Error("not released")
	}
}

// TestSetUpLate: after a reboot the VFs of a DevicePool may appear later than the agent starts. Old
// allocations of the kubelet are set up then, without a request.
func TestSetUpLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, w := fitting(t)
		if err := w.attacher().Reserve(t.Context(), withSetup()); err != nil {
			t.Fatal(err)
		}

		// a reboot
		w.own, w.bound, w.refuse = "iavf", map[function.ID]string{}, errors.New("is gone from "+
			"this node")
		m := w.attacher()
		if err := m.SetUp(t.Context()); !errors.Is(err, w.refuse) {
			t.Fatalf("SetUp = %v, want %v", err, w.refuse)
		}

		w.refuse = nil
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx, nil) }()
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		stop()
		if err := <-done; err != nil {
			t.Fatal(err)
		}

		w.wantBound(t, "vfio-pci")
	})
}

// TestClaimOfTheNextPod: a claim that was prepared for one pod, and is now reserved for another
// pod, goes to the second pod when the first one is gone. A pod that the API server does not name
// gets nothing.
func TestClaimOfTheNextPod(t *testing.T) {
	t.Parallel()
	next := Sandbox{
		ID: "s2", NetNS: t.TempDir(),
		Pod: journal.Pod{Namespace: "default", Name: "p", UID: "pod-2"},
	}

	refused := errors.New("refused")
	for name, test := range map[string]struct {
		claims Claims
		// dead says that the first pod's namespace is gone.
		dead     bool
		attached bool
		err      error
	}{
		"reserved for it, the first is gone": {
			claims{consumers: map[types.UID][]types.UID{"claim-1": {"pod-2"}}}, true, true, nil,
		},
		"reserved for both, the first lives": {
			claims{consumers: map[types.UID][]types.UID{"claim-1": {"pod-1", "pod-2"}}}, false,
			false, nil,
		},
		"not reserved for it": {
			claims{consumers: map[types.UID][]types.UID{"claim-1": {"pod-1"}}}, true, false, nil,
		},
		"the API server does not answer":     {claims{err: refused}, true, false, refused},
		"there is no API server to be asked": {nil, true, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			j := openJournal(t)
			m := New(j, &engine{parent: string(vf.Address), dead: test.dead},
				netdevs{vf: "v", pf: "p"},
				Options{BootID: "boot-1", Claims: test.claims}, testr.New(t))
			first := claimedVF()
			first.Pod = sandbox().Pod
			if err := m.Reserve(t.Context(), first); err != nil {
				t.Fatal(err)
			}
			if _, err := m.Attach(t.Context(), vf, sandbox()); err != nil {
				t.Fatal(err)
			}

			_, err := m.Attach(t.Context(), vf, next)
			if (err == nil) != test.attached || test.err != nil && !errors.Is(err, test.err) {
				t.Errorf("error %v, want success: %t", err, test.attached)
			}
			if a, _ := j.Get(vf); test.attached && a.Pod.UID != "pod-2" {
				t.Errorf("record %+v, want that of the next pod", a)
			}
		})
	}
}

// TestSweepAsksOnce: a sweep asks the kubelet for its pods once, however many reservations there
// are.
func TestSweepAsksOnce(t *testing.T) {
	t.Parallel()
	j, k := openJournal(t), &kubelet{}
	m := New(j, &engine{}, netdevs{}, Options{Kubelet: k, AbandonedAfter: -1}, testr.New(t))

	for _, id := range []function.ID{vf, {Address: "0000:3b:02.2"}, {Address: "0000:3b:02.3"}} {
		a := journal.Attachment{
			Function: id, Resource: "r", State: journal.Reserved,
			ReservedAt: time.Now().Add(-time.Hour),
		}
		if err := j.Put(a); err != nil {
			t.Fatal(err)
		}
	}

	m.sweep(t.Context())
	if k.asks != 1 {
		t.Errorf("the kubelet was asked %d times, want once", k.asks)
	}

	m.sweep(t.Context())
	if left := j.All(); len(left) > 0 {
		t.Errorf("%+v are left", left)
	}
}
