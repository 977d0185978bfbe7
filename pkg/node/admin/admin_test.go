// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const pf = "0000:3b:00.0"

// server returns a server for a node with a PF, two VFs, an SF that can be created, and an
// attachment of a VF that is gone. The pool fast has the second VF and the SF.
func server(t *testing.T) *Server {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	must.Succeed(t, err)
	t.Cleanup(func() { j.Close() })

	vfs := pooltest.VFs(0x3b, 2)
	must.Succeed(t, j.Put(journal.Attachment{
		Function: function.ID{Address: "0000:3b:07.0"}, PF: pf, PFName: "ens3f0", VFIndex: 48,
		State:      journal.Reserved,
		Claim:      journal.Claim{Namespace: "default", Name: "c", UID: "c-uid", Request: "nic"},
		ReservedAt: time.Unix(1e9, 0).UTC(), Interface: function.Interface{
			Name: "net1", VF: &function.VFConfig{VLAN: new(7)},
		},
	}))

	fast := pooltest.DRA("fast",
		vfs[1], function.PotentialSF(function.Function{ID: function.ID{Address: pf}}, 88))
	return &Server{
		Socket: filepath.Join(t.TempDir(), "admin.sock"), Node: "node1",
		Functions: func() []function.Function {
			return append([]function.Function{
				{ID: function.ID{Address: pf}, Kind: function.PF, PF: pf, Index: -1, NumVFs: 2},
			}, vfs...)
		},
		Pools: func() ([]pool.Pool, bool) { return []pool.Pool{fast}, true },
		Problems: func(_ pool.Pool, f function.Function) []function.Problem {
			if f.ID != vfs[1].ID {
				return nil
			}
			return []function.Problem{
				{Taint: "xpu.opiproject.org/link-down", Message: "PF has no link"},
			}
		},
		Card: func(pci.Address) function.Card {
			return function.Card{Serial: "MT1", Board: "B"}
		},
		Journal: j,
		GiveUp: func(_ context.Context, id function.ID, hook string) error {
			return errors.New(id.String() + " does not wait for " + hook)
		},
		Release: func(_ context.Context, id function.ID, asItIs bool) (string, error) {
			if id != vfs[1].ID {
				return "", errors.New(id.String() + " is not quarantined")
			}
			return map[bool]string{false: "is as it was", true: "is let go"}[asItIs], nil
		},
		Verification: func() *nodestate.Verification { return nil },
		Log:          logr.Discard(),
	}
}

func TestState(t *testing.T) {
	s := server(t)
	must.Succeed(t, os.WriteFile(s.Socket, nil, 0o644)) // left by an agent that was killed
	must.Run(t, s.Run)
	client := nodestate.Client{Socket: s.Socket}
	var state *nodestate.State
	must.Eventually(t, "the server answers", func() (ok bool) {
		var err error
		state, err = client.State(t.Context())
		return err == nil
	})

	info, err := os.Stat(s.Socket)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v; want mode 0600", info.Mode(), err)
	}

	var got []string
	for _, f := range state.Functions {
		got = append(got, strings.TrimSpace(f.ID.String()+" "+f.Pool))
	}

	want := "0000:3b:00.0, 0000:3b:00.0/sf88 fast, 0000:3b:00.2, 0000:3b:00.3 fast, 0000:3b:07.0"
	if strings.Join(got, ", ") != want {
		t.Fatalf("Functions %q, want %s", got, want)
	}
	if f := state.Functions[0]; f.Serial != "MT1" || f.Board != "B" {
		t.Errorf("PF %+v", f)
	}
	if f := state.Functions[3]; len(f.Problems) != 1 || f.Problems[0].Message != "PF has no link" {
		t.Errorf("a VF without link: %+v", f)
	}
	if f := state.Functions[4]; !f.Gone || f.Kind != function.VF || f.Index != 48 ||
		f.Attachment.Claim.Name != "c" || f.Attachment.Interface.VLAN != 7 {
		t.Errorf("a VF that is gone: %+v", f)
	}

	for asItIs, want := range map[bool]string{
		false: "Function 0000:3b:00.3: is as it was", true: "Function 0000:3b:00.3: is let go",
	} {
		outcome, err := client.Release(t.Context(),
			nodestate.Release{Function: state.Functions[3].ID, AsItIs: asItIs})
		if err != nil || outcome != want {
			t.Errorf("as it is %t: %q, error %v; want %q", asItIs, outcome, err, want)
		}
	}

	for body, want := range map[nodestate.Release]string{
		{}:                                "request: ",
		{Function: state.Functions[2].ID}: "0000:3b:00.2 is not quarantined",
		{Function: state.Functions[2].ID, Hook: "10-a"}:                             "0000:3b:00.2 does not wait for 10-a",
		{Function: state.Functions[2].ID, Hook: nodestate.PortHook}:                 "may still serve its Port",
		{Function: state.Functions[2].ID, Hook: nodestate.PortHook, PortGone: true}: "does not wait for port",
	} {
		if _, err := client.Release(t.Context(), body); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want %q", body, err, want)
		}
	}
}

// TestSocketInTheWay checks that Run does not remove a directory in place of the socket.
func TestSocketInTheWay(t *testing.T) {
	s := server(t)
	must.Succeed(t, os.MkdirAll(filepath.Join(s.Socket, "x"), 0o755))
	if err := s.Run(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "socket for administrators") {
		t.Errorf("error %v", err)
	}
}

// TestGarbage checks that a malformed HTTP request does no harm.
func TestGarbage(t *testing.T) {
	s := server(t)
	must.Run(t, s.Run)

	must.Eventually(t, "a connection", func() bool {
		conn, err := net.Dial("unix", s.Socket)
		if err != nil {
			return false
		}
		defer conn.Close()

		_, err = conn.Write(
			[]byte("POST /release HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{{{"),
		)
		return err == nil
	})

	if _, err := (nodestate.Client{Socket: s.Socket}).State(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestStateOfQuarantine checks that an administrator sees why a Function is quarantined and sees
// the hook that deletes its Port, but no hook that cannot run yet.
func TestStateOfQuarantine(t *testing.T) {
	a := journal.Attachment{
		State: journal.Releasing, Hooks: &journal.Hooks{Done: []string{"port"}},
		Quarantine: &journal.Quarantine{
			Reason: journal.WrongDriver, Message: "driver is vfio-pci, was igbvf", Attempts: 2,
		},
	}

	got := attachment(a)
	if q := got.Quarantine; q == nil || q.Reason != "WrongDriver" ||
		q.Message != a.Quarantine.Message || q.Attempts != 2 || got.Hook != nil {
		t.Errorf("quarantine %+v, hook %+v", q, got.Hook)
	}

	a.Hooks = &journal.Hooks{Next: "port", Attempts: 1}
	if got := attachment(a); got.Hook == nil || got.Hook.Name != "port" {
		t.Errorf("hook %+v", got.Hook)
	}
}

// TestVerify checks that a state has the last comparison, and a new one only on request.
func TestVerify(t *testing.T) {
	s := server(t)
	last, failure := &nodestate.Verification{Same: 1}, error(nil)
	s.Verification = func() *nodestate.Verification { return last }
	s.Verify = func(ctx context.Context) (*nodestate.Verification, error) {
		if _, limited := ctx.Deadline(); !limited {
			t.Error("a comparison may take for ever")
		}
		last = &nodestate.Verification{Same: last.Same + 1}
		return last, failure
	}
	must.Run(t, s.Run)
	client := nodestate.Client{Socket: s.Socket}
	must.Eventually(t, "the server answers", client.Runs)

	for _, ask := range []struct {
		state func(context.Context) (*nodestate.State, error)
		want  int
	}{{client.State, 1}, {client.Verify, 2}, {client.State, 2}} {
		state, err := ask.state(t.Context())
		must.Succeed(t, err)
		if v := state.Verification; v == nil || v.Same != ask.want || len(state.Functions) == 0 {
			t.Errorf("%+v, want %d", v, ask.want)
		}
	}

	failure = errors.New("the comparison has not ended")
	if _, err := client.Verify(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "has not ended") {
		t.Errorf("error %v", err)
	}
}
