// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// runtimeTimeout is how long runtimes wait for a plugin by default.
const runtimeTimeout = 2 * time.Second

// inBubble runs a test with a plugin in a synctest bubble. The journal is opened outside, because
// it waits for the disk.
func inBubble(t *testing.T, n *node, log logr.Logger, test func(t *testing.T, p *Plugin)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := &Plugin{Journal: n.journal, Lifecycle: n, Report: n.Report, Log: log, ctx: ctx}
		defer p.background.Wait()
		defer cancel()
		test(t, p)
	})
}

func run(t *testing.T, p *Plugin, pod *api.PodSandbox) (took time.Duration, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runtimeTimeout)
	defer cancel()
	begin := time.Now()
	err = p.RunPodSandbox(ctx, pod)
	return time.Since(begin), err
}

func create(t *testing.T, p *Plugin, pod *api.PodSandbox) (took time.Duration, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runtimeTimeout)
	defer cancel()
	begin := time.Now()
	_, _, err = p.CreateContainer(ctx, pod, &api.Container{Name: "app"})
	return time.Since(begin), err
}

func (n *node) wantState(t *testing.T, want journal.State) {
	t.Helper()
	for _, a := range n.journal.All() {
		if a.State != want {
			t.Errorf("Function %s is %s, want %s", a.Function, a.State, want)
		}
	}
}

// TestManySlowFunctions: the Functions of a pod are attached and taken back in parallel. If even
// this takes too long, the sandbox starts, and its containers start later.
func TestManySlowFunctions(t *testing.T) {
	for takes, at := range map[time.Duration]struct{ run, create, stop time.Duration }{
		250 * time.Millisecond:  {250 * time.Millisecond, 0, 250 * time.Millisecond},
		1400 * time.Millisecond: {1400 * time.Millisecond, 0, 1400 * time.Millisecond},
		2 * time.Second: {
			1500 * time.Millisecond, 500 * time.Millisecond, 1500 * time.Millisecond,
		},
	} {
		t.Run(takes.String(), func(t *testing.T) {
			n := newNode(t)
			for f := range 8 {
				n.reserve(t, fmt.Sprint(f), "pod1")
			}

			n.takes = takes
			inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
				if took, err := run(t, p, sandbox("pod1", "s1")); err != nil || took != at.run {
					t.Errorf("RunPodSandbox after %s: %v, want it after %s", took, err, at.run)
				}
				if took, err := create(t, p, sandbox("pod1", "s1")); err != nil ||
					took != at.create {
					t.Errorf("CreateContainer after %s: %v, want it after %s", took, err, at.create)
				}

				n.wantState(t, journal.Attached)

				begin := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), runtimeTimeout)
				defer cancel()

				must.Succeed(t, p.StopPodSandbox(ctx, sandbox("pod1", "s1")))
				if took := time.Since(begin); took != at.stop {
					t.Errorf("StopPodSandbox after %s, want it after %s", took, at.stop)
				}

				p.background.Wait()
				n.wantState(t, journal.Reserved)
			})
		})
	}
}

// TestOneFunctionFails: an error fails the sandbox at once, even while other Functions are being
// attached. All Functions are taken back.
func TestOneFunctionFails(t *testing.T) {
	n := newNode(t)
	for f := range 4 {
		n.reserve(t, fmt.Sprint(f), "pod1")
	}

	n.errs["attach 2 s1 /run/netns/s1 pod1"] = errors.New("driver says no")
	n.blocks["attach 1 s1 /run/netns/s1 pod1"] = make(chan struct{})
	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		took, err := run(t, p, sandbox("pod1", "s1"))
		if took != 0 || err == nil ||
			!strings.Contains(err.Error(), "pod default/pod1, claim pod1-claim: driver says no") {
			t.Errorf("after %s: error %v", took, err)
		}

		p.background.Wait()
		if len(p.attempts) != 0 {
			t.Errorf("attempts are left: %v", p.attempts)
		}

		n.wantState(t, journal.Reserved)
		if took, err := run(t, p, sandbox("pod1", "s2")); took != 0 || err != nil {
			t.Errorf("the next sandbox after %s: %v", took, err)
		}
	})
}

// TestCatchUpTriesAgain: Functions that could not be attached when the runtime or the agent started
// are retried, until they are attached or the sandbox ends. Until then containers are refused with
// the reason.
func TestCatchUpTriesAgain(t *testing.T) {
	n, log := newNode(t), &lines{}
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod2")

	for _, call := range []string{
		"attach 2 s1 /run/netns/s1 pod1", "attach 3 s2 /run/netns/s2 pod2",
	} {
		n.errs[call] = errors.New("PF does not answer")
	}

	inBubble(t, n, log.logger(), func(t *testing.T, p *Plugin) {
		pods := []*api.PodSandbox{sandbox("pod1", "s1"), sandbox("pod2", "s2")}
		_, err := p.Synchronize(t.Context(), pods, nil)
		must.Succeed(t, err)
		synctest.Wait()

		for range 3 {
			time.Sleep(longestPause)
			took, err := create(t, p, pods[0])
			if took != 0 || err == nil ||
				!strings.Contains(err.Error(), "not attached to the pod: PF does not answer") {
				t.Errorf("after %s: error %v, want the reason", took, err)
			}
		}

		must.Succeed(t, p.StopPodSandbox(t.Context(), pods[1]))
		n.mutex.Lock()
		clear(n.errs)
		n.mutex.Unlock()
		time.Sleep(2 * longestPause)
		synctest.Wait()
		if _, err := create(t, p, pods[0]); err != nil {
			t.Errorf("the Function is there by now: %v", err)
		}

		p.background.Wait()
		if a, _ := n.journal.Get(function.ID{
			Address: "0000:3b:00.3",
		}); a.State != journal.Reserved {
			t.Errorf("the Function of a sandbox that has ended is %s", a.State)
		}

		if tries := log.count("trying again"); tries < 6 || tries > 20 {
			t.Errorf("%d tries failed within a minute", tries)
		}
	})
}

// TestTriesAgainByEvent: a change of the journal causes a retry soon, but no pod is retried
// continuously.
func TestTriesAgainByEvent(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "other")
	n.errs["attach 2 s1 /run/netns/s1 pod1"] = errors.New("another pod has it")
	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		_, err := p.Synchronize(t.Context(), []*api.PodSandbox{sandbox("pod1", "s1")}, nil)
		must.Succeed(t, err)
		time.Sleep(4 * time.Minute) // after this, the pauses are the longest
		n.mutex.Lock()
		n.calls = nil
		n.mutex.Unlock()

		for range 100 {
			n.reserve(t, "3", "other")
			time.Sleep(50 * time.Millisecond)
		}

		n.mutex.Lock()
		if len(n.calls) < 3 || len(n.calls) > 6 {
			t.Errorf("%d tries within 5 s, want about one per second", len(n.calls))
		}

		clear(n.errs)
		n.mutex.Unlock()
		n.reserve(t, "3", "other")
		time.Sleep(firstPause + time.Millisecond)
		synctest.Wait()

		if a, _ := n.journal.Get(function.ID{
			Address: "0000:3b:00.2",
		}); a.State != journal.Attached {
			t.Errorf("the Function is %s after a change", a.State)
		}
	})
}

// TestNameIsTakenMeanwhile: if the agent chose a name that another Function of the pod got at the
// same time, the Function gets another name afterwards.
func TestNameIsTakenMeanwhile(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod1")
	a, _ := n.journal.Get(function.ID{Address: "0000:3b:00.2"})
	a.AnyName = true
	must.Succeed(t, n.journal.Put(a))
	call := "attach 2 s1 /run/netns/s1 pod1"
	n.errs[call] = netdev.ErrNameTaken
	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		n.slow["attach 3 s1 /run/netns/s1 pod1"] = make(chan struct{})
		go func() {
			synctest.Wait()
			n.mutex.Lock()
			delete(n.errs, call)
			n.mutex.Unlock()
			close(n.slow["attach 3 s1 /run/netns/s1 pod1"])
		}()

		if _, err := run(t, p, sandbox("pod1", "s1")); err != nil {
			t.Error(err)
		}

		n.wantCalls(t, call, call, "attach 3 s1 /run/netns/s1 pod1", "report pod1-claim")
	})
}

// TestContainersWaitOnce: a Function that takes very long does not block the runtime repeatedly.
func TestContainersWaitOnce(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "pod1")
	n.takes = 10 * time.Second
	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		if _, err := run(t, p, sandbox("pod1", "s1")); err != nil {
			t.Fatal(err)
		}

		for _, want := range []time.Duration{1500 * time.Millisecond, 0, 0} {
			if took, err := create(t, p, sandbox("pod1", "s1")); took != want || err == nil {
				t.Errorf("refused after %s, want after %s: %v", took, want, err)
			}
		}

		time.Sleep(10 * time.Second)
		if took, err := create(t, p, sandbox("pod1", "s1")); took != 0 || err != nil {
			t.Errorf("after %s: %v", took, err)
		}
	})
}

// TestStopWhileAttaching: a sandbox that ends while its Functions are attached gives all of them
// back.
func TestStopWhileAttaching(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod1")
	n.takes = 1600 * time.Millisecond
	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		if _, err := run(t, p, sandbox("pod1", "s1")); err != nil {
			t.Fatal(err)
		}
		must.Succeed(t, p.StopPodSandbox(t.Context(), sandbox("pod1", "s1")))
		time.Sleep(time.Hour)
		p.background.Wait()
		n.wantState(t, journal.Reserved)
	})
}

// TestFailureAfterTheAnswer: a failure after the sandbox was allowed to start is retried in the
// same sandbox.
func TestFailureAfterTheAnswer(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "pod1")
	n.takes = 1600 * time.Millisecond
	n.errs["attach 2 s1 /run/netns/s1 pod1"] = errors.New("PF does not answer")
	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		if took, err := run(t, p, sandbox("pod1", "s1")); took != 1500*time.Millisecond ||
			err != nil {
			t.Fatalf("after %s: %v", took, err)
		}

		time.Sleep(time.Second)
		if _, err := create(t, p, sandbox("pod1", "s1")); err == nil ||
			!strings.Contains(err.Error(), "PF does not answer") {
			t.Errorf("error %v, want the reason", err)
		}

		n.mutex.Lock()
		clear(n.errs)
		n.mutex.Unlock()
		p.background.Wait()
		n.wantState(t, journal.Attached)
	})
}
