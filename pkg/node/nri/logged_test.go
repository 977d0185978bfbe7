// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/containerd/nri/pkg/api"
	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
)

// lines collects the lines of a log.
type lines struct {
	mutex sync.Mutex
	all   []string
}

func (l *lines) logger() logr.Logger {
	return funcr.New(func(_, args string) {
		l.mutex.Lock()
		defer l.mutex.Unlock()
		l.all = append(l.all, args)
	}, funcr.Options{})
}

// count returns how many lines contain the text.
func (l *lines) count(text string) (n int) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	for _, line := range l.all {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// TestStopSaysWhatIsNotBack: the log names a Function that is not back, with its pod, and no
// Function that is back.
func TestStopSaysWhatIsNotBack(t *testing.T) {
	n, log := newNode(t), &lines{}
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod2")
	n.errs["detach 2 s1"] = errors.New("busy")
	p := &Plugin{
		Journal: n.journal, Lifecycle: n, Report: n.Report, Log: log.logger(), ctx: t.Context(),
	}
	for pod, id := range map[string]string{"pod1": "s1", "pod2": "s2"} {
		if err := p.StopPodSandbox(t.Context(), sandbox(pod, id)); err != nil {
			t.Errorf("StopPodSandbox = %v: a runtime goes on whatever is said", err)
		}
	}

	p.background.Wait()
	if log.count("Functions are not back yet") != 1 ||
		log.count("pod default/pod1, claim pod1-claim: busy") != 1 {
		t.Errorf("logged: %q", log.all)
	}
}

// TestContainerOfAFreeFunction: the error for a container whose Function no pod has names no other
// pod.
func TestContainerOfAFreeFunction(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "pod1")
	p := &Plugin{
		Journal: n.journal, Lifecycle: n, Report: n.Report, Log: logr.Discard(), ctx: t.Context(),
	}
	_, _, err := p.CreateContainer(t.Context(), sandbox("pod1", "s1"), &api.Container{Name: "app"})
	if err == nil || strings.Contains(err.Error(), "has it") {
		t.Errorf("error %v", err)
	}
}

// TestOwnIsNotShared: a Function that was prepared for the pod itself is attached once. A Function
// that the journal does not have is not attached.
func TestOwnIsNotShared(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod2")
	claimed := kubelet{"default/pod1": {{Address: "0000:3b:00.2"}, {Address: "0000:3b:00.4"}}}
	p := &Plugin{Journal: n.journal, Lifecycle: n, Claimed: claimed.Claimed, Report: n.Report,
		Log: logr.Discard(), ctx: t.Context()}
	if err := p.RunPodSandbox(t.Context(), sandbox("pod1", "s1")); err != nil {
		t.Fatal(err)
	}

	n.wantCalls(t, "attach 2 s1 /run/netns/s1 pod1", "report pod1-claim")
}

// TestCatchUp: Run waits for the end of catchUp, which logs its failures, and ends when the runtime
// connects again.
func TestCatchUp(t *testing.T) {
	n, log := newNode(t), &lines{}
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod2")

	synctest.Test(t, func(t *testing.T) {
		n.errs["attach 2 s1 /run/netns/s1 pod1"] = errors.New("no netdev")
		n.blocks["attach 3 s2 /run/netns/s2 pod2"] = make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()

		p := &Plugin{
			Journal: n.journal, Lifecycle: n, Report: n.Report, Log: log.logger(), ctx: ctx,
		}
		if _, err := p.Synchronize(t.Context(),
			[]*api.PodSandbox{sandbox("pod1", "s1"), sandbox("pod2", "s2")}, nil); err != nil {
			t.Fatal(err)
		}

		done := make(chan struct{})
		go func() { p.background.Wait(); close(done) }()
		synctest.Wait()

		select {
		case <-done:
			t.Error("a pod that is being attached is not waited for")
		default:
		}

		if log.count("Pod has not an interface that it claimed") != 1 ||
			log.count("no netdev") != 1 {
			t.Errorf("logged: %q", log.all)
		}

		n.mutex.Lock()
		delete(n.blocks, "attach 3 s2 /run/netns/s2 pod2")
		n.mutex.Unlock()
		// keeps the group from ending while the test waits for it
		p.background.Add(1)
		// This call ends the work of the one before.
		if _, err := p.Synchronize(t.Context(), nil, nil); err != nil {
			t.Fatal(err)
		}

		p.background.Done()
		<-done
		if log.count("Pod has not an interface that it claimed") != 1 {
			t.Errorf("what was ended is taken for an error: %q", log.all)
		}
	})
}
