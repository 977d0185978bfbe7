// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// report calls the method of the Manager that reports the event.
func (p trigger) report(ctx context.Context, m *Manager, id function.ID) error {
	switch p.event {
	case Prepare, Allocate, Add:
		want := journal.Attachment{
			Function: id, Pod: p.pod, Interface: function.Interface{Name: "net1"},
		}
		switch p.event {
		case Prepare:
			want.Claim = journal.Claim{Namespace: "default", Name: "c", UID: p.claim}
		case Allocate:
			want.Resource, want.Pod, want.Interface = p.resource, journal.Pod{}, function.Interface{}
		case Add:
			want.CNI = &journal.CNI{ContainerID: p.sandbox, IfName: p.ifName}
		}

		admitted, err := m.Admit(ctx, want)
		if err == nil && p.event == Add && admitted.Claim.UID != "" {
			claimed := admitted.Interface
			want.Claim, want.CNI.Claimed = admitted.Claim, &claimed
		}

		if err == nil {
			err = m.Reserve(ctx, want)
		}
		if err != nil || p.event != Add {
			return err
		}

		fallthrough
	case SandboxStarts:
		_, err := m.Attach(ctx, id, Sandbox{ID: p.sandbox, NetNS: p.netNS, Pod: p.pod})
		return err
	case SandboxStops:
		return m.Detach(ctx, id, p.sandbox)
	case Del:
		return m.EndRequest(ctx, p.sandbox, p.ifName, nil)
	case Unprepare:
		return m.Unprepare(ctx, p.claim)
	case GiveUp:
		return m.GiveUp(ctx, id, p.resource)
	case Sweep:
		m.sweep(ctx)
		m.sweep(ctx)
		return nil
	case Resume:
		return m.Recover(ctx)
	case DeviceChanges:
		_, err := m.reconcile(ctx, trigger{event: DeviceChanges}, id, nil)
		return err
	}
	panic("unknown event " + p.event)
}

// TestEveryEventInEveryPhase tries every event in every phase, for every owner, with an agent that
// ends after each of its writes, and with one that does not. The next agent must continue all
// interrupted work. When no pod needs the Function any more, it must be free and as it was.
func TestEveryEventInEveryPhase(t *testing.T) {
	for _, phase := range Phases {
		records := []journal.Attachment{{}}
		if phase != Free {
			records = recordsOf(phase)
		}

		for _, p := range triggers() {
			for r, record := range records {
				t.Run(fmt.Sprintf("%s_while_%s_%s_%d", p.event, phase, p.sandbox, r),
					func(t *testing.T) {
						t.Parallel()
						for writes := 1; ; writes++ {
							if !eventWithCrash(t, p, record, phase != Free, writes) {
								break
							}
						}
					})
			}
		}
	}
}

// eventWithCrash reports whether the agent ended before it had handled the event.
func eventWithCrash(
	t *testing.T, p trigger, record journal.Attachment, exists bool, writes int,
) (crashed bool) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, vf)
		p.netNS = t.TempDir() // Attach looks for this path
		w.alive[p.netNS] = true
		if exists {
			record.ReservedAt = time.Now().Add(-time.Hour)
			if record.Sandbox != "" {
				record.Place.NetNS = "/run/netns/before"
				record.Before = &netdev.Snapshot{
					Name: vf.String(), Identity: w.netdevs[vf].identity(vf.String()),
				}
				// The second sandbox starts after the first one is gone.
				w.alive["/run/netns/before"] = p.sandbox != "c2"
			}

			if err := w.records.Put(record); err != nil {
				t.Fatal(err)
			}

			w.inSandbox(record)
			if record.Restored() {
				w.due[vf] = "port"
			}
		}

		w.start(writes)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()

		_ = p.report(ctx, w.agent.Manager, vf)
		crashed = w.agent.dead()
		if !crashed {
			w.look()
			w.check("after the event")
		}

		w.start(-1)
		if err := w.agent.Recover(t.Context()); err != nil {
			t.Errorf("Recover: %v", err)
		}

		w.look()
		w.check("after the next agent's start")
		w.settleAll("in the end")
	})
	return crashed
}

// lives is the number of random lives in TestRandomLives.
var lives = flag.Int("lives", 150, "number of random lives of a node")

// TestRandomLives lets pods come and go at random over a few Functions: by claims, by the device
// plugin with CNI, and by CNI alone. Events are lost, repeated or late. Namespaces end, agents end
// after any write, the kubelet does not answer, and hours pass. At no moment may a Function have
// two owners, or an owner that is gone, or be offered or taken before the hooks of its last owner
// are done. In the end everything must be as it was.
func TestRandomLives(t *testing.T) {
	for seed := range *lives {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				randomLife(t, rand.New(rand.NewPCG(uint64(seed), 1)))
			})
		})
	}
}

func randomLife(t *testing.T, random *rand.Rand) {
	functions := []function.ID{vf, {Address: "0000:3b:02.2"}, {Address: "0000:3b:02.3"}}
	w := newWorld(t, functions...)
	var history []string
	defer func() {
		if t.Failed() {
			for _, h := range history {
				t.Log(h)
			}
		}
	}()

	namespaces := []string{w.namespace(), w.namespace(), w.namespace()}
	for range 60 {
		id, i := functions[random.IntN(len(functions))], random.IntN(3)
		pod := journal.Pod{
			Namespace: "default", Name: fmt.Sprint("pod", i),
			UID: types.UID(fmt.Sprint("pod", i, "-", random.IntN(2))),
		}

		p := trigger{
			event: Events[random.IntN(len(Events))], pod: pod,
			claim:    types.UID(fmt.Sprint("claim", random.IntN(4))),
			resource: "xpu.opiproject.org/fast", ifName: "net1", sandbox: fmt.Sprint("s", i),
			netNS: namespaces[i],
		}

		what := ""
		switch random.IntN(16) {
		case 0:
			w.alive[p.netNS] = false
			w.returnFrom(p.netNS)
			namespaces[i] = w.namespace()
			what = fmt.Sprintf("namespace %d ends", i)
		case 1:
			w.endHooks()
			what = "hooks done"
		case 2:
			time.Sleep(time.Duration(random.IntN(7200)) * time.Second)
			what = "time passes"
		case 3:
			w.kubelet.err = map[bool]error{true: errDead}[random.IntN(2) == 0]
			what = fmt.Sprintf("kubelet answers: %t", w.kubelet.err == nil)
		case 4:
			delete(w.kubelet.have, id.String())
			if random.IntN(2) == 0 {
				w.kubelet.have[id.String()] = podresources.Assignment{
					Resource: p.resource, Namespace: "default", Pod: pod.Name,
				}
			}
			what = fmt.Sprintf("kubelet: %s is of %v", id, w.kubelet.have[id.String()])
		case 5:
			delete(w.claims.consumers, p.claim)
			if random.IntN(2) == 0 {
				w.claims.consumers[p.claim] = []types.UID{pod.UID}
			}
			what = fmt.Sprintf("API server: %s is for %v", p.claim, w.claims.consumers[p.claim])
		case 6:
			w.unplug(id)
			what = fmt.Sprintf("%s is unplugged", id)
		case 7:
			w.plug(id)
			what = fmt.Sprintf("%s is plugged", id)
		case 8:
			w.netdevs[id].leaks = !w.netdevs[id].leaks
			what = fmt.Sprintf("%s leaks: %t", id, w.netdevs[id].leaks)
		default:
			writes := -1
			if random.IntN(4) == 0 {
				writes = 1 + random.IntN(4)
			}

			w.agent.writes.Store(int64(writes))
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := p.report(ctx, w.agent.Manager, id)
			cancel()
			what = fmt.Sprintf("%s of %s for %s in %s by %s: %v", p.event, id, pod.UID, p.sandbox,
				p.claim, err)
			if w.agent.dead() {
				what += "; the agent ends"
				w.start(-1)
				if err := w.agent.Recover(t.Context()); err != nil {
					t.Errorf("Recover: %v", err)
				}
			}
		}

		history = append(history, what)
		w.look()
		w.check(what)
		if t.Failed() {
			return
		}
	}

	w.settleAll("in the end")
}

// namespace makes a network namespace, and returns its path.
func (w *world) namespace() string {
	path := w.t.TempDir()
	w.alive[path] = true
	return path
}

// returnFrom does what the kernel does with netdevs whose namespace ends.
func (w *world) returnFrom(path string) {
	for _, d := range w.netdevs {
		if d.in == path {
			d.in = ""
		}
	}
}
