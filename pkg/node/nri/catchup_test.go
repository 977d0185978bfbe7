// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestCatchUpLeavesNewSandboxes: a sandbox that starts after the runtime gave its list is not in the
// list, and keeps its Functions, even if the work from before the list takes long.
func TestCatchUpLeavesNewSandboxes(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "old")
	n.reserve(t, "3", "new")
	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		slow := make(chan struct{})
		n.slow["attach 2 s-old /run/netns/s-old old"] = slow
		_, err := run(t, p, sandbox("old", "s-old"))
		must.Succeed(t, err)

		_, err = p.Synchronize(t.Context(), nil, nil) // s-old has ended
		must.Succeed(t, err)
		synctest.Wait()
		_, err = run(t, p, sandbox("new", "s-new"))
		must.Succeed(t, err)

		close(slow)
		synctest.Wait()
		for f, want := range map[string]journal.State{
			"0000:3b:00.2": journal.Reserved, "0000:3b:00.3": journal.Attached,
		} {
			id, _ := function.ParseID(f)
			if a, _ := n.journal.Get(id); a.State != want {
				t.Errorf("Function %s is %s, want %s", f, a.State, want)
			}
		}
	})
}

// TestCatchUpWaitsForNoOther: while the Function of a sandbox that has ended does not come back, a
// sandbox that has started gets its own. Once that sandbox stops, nothing is attached to it.
func TestCatchUpWaitsForNoOther(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "2", "ended")
	n.reserve(t, "3", "started")
	n.reserve(t, "4", "stops")
	_, err := n.Attach(t.Context(), function.ID{Address: "0000:3b:00.2"},
		lifecycle.Sandbox{ID: "s-ended"})
	must.Succeed(t, err)
	n.calls = nil

	inBubble(t, n, logr.Discard(), func(t *testing.T, p *Plugin) {
		slow := make(chan struct{})
		n.slow["detach 2 s-ended"] = slow
		n.errs["attach 4 s-stops /run/netns/s-stops stops"] = errors.New("no netdev")
		stops := sandbox("stops", "s-stops")
		_, err := p.Synchronize(t.Context(),
			[]*api.PodSandbox{sandbox("started", "s-started"), stops}, nil)
		must.Succeed(t, err)
		synctest.Wait()
		a, _ := n.journal.Get(function.ID{Address: "0000:3b:00.3"})
		if a.State != journal.Attached {
			t.Errorf("while another PF hangs, the Function of a started sandbox is %s", a.State)
		}

		must.Succeed(t, p.StopPodSandbox(t.Context(), stops))
		n.mutex.Lock()
		n.calls = nil
		n.mutex.Unlock()
		close(slow)
		time.Sleep(time.Hour)
		n.wantCalls(t)
	})
}
