// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// stateOf returns the state of a Function as the agent reports it to administrators.
func (s *site) stateOf(id function.ID) nodestate.Function {
	s.t.Helper()
	state, err := s.administrators().State(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}

	for _, f := range state.Functions {
		if f.ID == id {
			return f
		}
	}

	s.t.Fatalf("Function %s is not in %+v", id, state)
	return nodestate.Function{}
}

func (s *site) administrators() nodestate.Client {
	return nodestate.Client{Socket: filepath.Join(s.config.StateDir, "admin.sock")}
}

// TestAdministrator follows a Function into a pod and back in the reports for administrators. The
// administrator frees the Function when neither its xPU nor its hook does.
func TestAdministrator(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		vf := s.vfs[0]
		pf := function.ID{Address: "0000:3b:00.0"}
		s.script("hooks.d/10-note", "echo cannot note; exit 75")
		s.start()
		s.wantHealthy(s.vfs...)
		if f := s.stateOf(pf); f.Kind != function.PF || f.NumVFs != 2 || f.Pool != "" ||
			f.Attachment != nil {
			t.Errorf("PF: %+v", f)
		}
		if f := s.stateOf(vf); f.Kind != function.VF || f.Pool != "fast" ||
			f.Publish != "DevicePlugin" || f.Netdev == "" || f.Attachment != nil {
			t.Errorf("a free VF: %+v", f)
		}

		p := newPod(t, "pod1")
		if _, err := s.give(p.name, vf); err != nil {
			t.Fatal(err)
		}

		s.mustAdd(p, vf)
		s.eventually("the netdev is seen to be in the pod", func() bool {
			return s.stateOf(vf).Netdev == ""
		})
		f := s.stateOf(vf)
		a := f.Attachment
		if a == nil || a.State != "Attached" ||
			a.Pod != (nodestate.Pod{Namespace: "default", Name: "pod1", UID: "pod1-uid"}) ||
			a.Interface.Name != "net1" || a.Interface.MTU != labMTU || a.Network != "lab" ||
			a.Resource != resource || a.AttachedAt.IsZero() {
			t.Fatalf("a VF in a pod: %+v, %+v", f, a)
		}

		s.opi.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
		s.del(p, vf)
		s.pods.Set()
		s.wantHealthy(s.vfs[1])
		if f := s.stateOf(vf); f.Attachment.Hook == nil ||
			f.Attachment.Hook.Name != nodestate.PortHook || len(f.Problems) != 1 {
			t.Errorf("a VF whose Port does not go: %+v, %+v", f, f.Attachment)
		}

		wish := nodestate.Release{Function: vf, Hook: nodestate.PortHook}
		if _, err := s.administrators().Release(t.Context(), wish); err == nil ||
			!strings.Contains(err.Error(), "may still serve its Port") {
			t.Errorf("a Port that is there is given up: %v", err)
		}

		wish.PortGone = true
		if _, err := s.administrators().Release(t.Context(), wish); err != nil {
			t.Fatal(err)
		}

		s.eventually("the executable has failed", func() bool {
			hook := s.stateOf(vf).Attachment.Hook
			return hook.Name == "10-note" && hook.Attempts > 0 &&
				strings.Contains(hook.Error, "cannot note")
		})

		wish = nodestate.Release{Function: vf, Hook: "10-note"}
		if _, err := s.administrators().Release(t.Context(), wish); err != nil {
			t.Fatal(err)
		}

		s.wantHealthy(s.vfs...)
		state, err := s.administrators().State(t.Context())
		if err != nil || len(state.DeadLetters) != 2 || state.DeadLetters[1].Hook != "10-note" ||
			state.DeadLetters[1].Pod.Name != "pod1" {
			t.Errorf("dead letters %+v, %v", state.DeadLetters, err)
		}

		s.end()
		if _, err := s.administrators().State(t.Context()); err == nil ||
			!strings.Contains(err.Error(), "xpu-agent is away: dial unix") {
			t.Errorf("after the agent's end: %v", err)
		}
	})
}
