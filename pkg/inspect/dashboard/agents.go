// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// maxParallelAgents is how many agents are asked in parallel.
const maxParallelAgents = 16

// askPause is how long an agent is left in peace after it was asked.
const askPause = 5 * time.Second

// askAgain is the time until an agent is asked again that did not answer.
const askAgain = 30 * time.Second

// answer is what the agent of a node said.
type answer struct {
	node  string
	state *nodestate.State // the last one; nil if there is none yet
	err   error            // of the last time
	at    time.Time

	about string // which pods the node had when the agent was asked
	asked bool   // whether it was asked, or is being asked
}

// asker asks agents in direct mode, where they alone know of Functions: once, and again when pods
// of their node have changed. Its methods are for concurrent use.
type asker struct {
	ask     func(ctx context.Context, node string) (*nodestate.State, error)
	now     func() time.Time
	changed func()
	slots   chan struct{}

	mu    sync.Mutex
	nodes map[string]*answer
}

func newAsker(
	ask func(context.Context, string) (*nodestate.State, error), now func() time.Time, changed func(),
) *asker {
	return &asker{ask: ask, now: now, changed: changed, nodes: map[string]*answer{},
		slots: make(chan struct{}, maxParallelAgents)}
}

// answers returns the last answers, sorted by node.
func (a *asker) answers() []answer {
	a.mu.Lock()
	defer a.mu.Unlock()

	var out []answer
	for _, one := range a.nodes {
		out = append(out, *one)
	}
	slices.SortFunc(out, func(x, y answer) int { return strings.Compare(x.node, y.node) })
	return out
}

// follow asks the agents of nodes about which something has changed. The pods of agents say where
// agents run, and pods what their answers are about.
func (a *asker) follow(ctx context.Context, agents, pods []*corev1.Pod) {
	about := map[string]*strings.Builder{}
	for _, pod := range agents {
		if pod.Spec.NodeName != "" && pod.DeletionTimestamp == nil {
			about[pod.Spec.NodeName] = &strings.Builder{}
		}
	}
	for _, pod := range slices.Concat(agents, pods) {
		if text := about[pod.Spec.NodeName]; text != nil {
			text.WriteString(string(pod.UID) + " " + pod.ResourceVersion + "\n")
		}
	}

	a.mu.Lock()
	defer a.mu.Unlock()
	for node := range a.nodes {
		if about[node] == nil {
			delete(a.nodes, node)
		}
	}
	for node, text := range about {
		one := a.nodes[node]
		if one == nil {
			one = &answer{node: node}
			a.nodes[node] = one
		}
		if one.about != text.String() && !one.asked {
			one.about, one.asked = text.String(), true
			go a.one(ctx, node)
		}
	}
}

// one asks an agent, and lets it be asked again a little later.
func (a *asker) one(ctx context.Context, node string) {
	select {
	case a.slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	bounded, cancel := context.WithTimeout(ctx, requestTimeout)
	state, err := a.ask(bounded, node)
	cancel()
	<-a.slots

	pause := askPause
	a.mu.Lock()
	if one := a.nodes[node]; one != nil {
		if one.err, one.at = err, a.now().UTC().Truncate(time.Second); err == nil {
			one.state = state
		} else { // ask again, although nothing may change
			one.about, pause = "", askAgain
		}
	}
	a.mu.Unlock()
	a.changed()

	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return
	}
	a.mu.Lock()
	if one := a.nodes[node]; one != nil {
		one.asked = false
	}
	a.mu.Unlock()
	a.changed()
}
