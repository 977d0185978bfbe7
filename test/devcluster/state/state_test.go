// SPDX-License-Identifier: Apache-2.0

package state

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestNames(t *testing.T) {
	store := Store{Root: "/state"}
	for name, valid := range map[string]bool{
		"main": true, "a": true, "a-b": true, "a1": true, strings.Repeat("a", 32): true,
		"": false, "-a": false, "a-": false, "A": false, "a.b": false, "a/b": false, "..": false,
		strings.Repeat("a", 33): false,
	} {
		if _, err := store.Dir(name); (err == nil) != valid {
			t.Errorf("%q: %v, want valid %t", name, err, valid)
		}
	}
}

func TestRecord(t *testing.T) {
	store := Store{Root: t.TempDir()}
	if _, _, err := store.Load("main"); !errors.Is(err, ErrNone) {
		t.Errorf("Load of nothing: %v, want %v", err, ErrNone)
	}

	dir, unlock, err := store.Lock("main")
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()

	want := Record{
		Name: "main", Nodes: 2, API: "https://127.0.0.1:1",
		Leader: Leader{PID: 7, Start: 8, BootID: "9"},
	}

	for range 2 {
		if err := WriteRecord(dir, want); err != nil {
			t.Fatal(err)
		}
	}

	_, got, err := store.Load("main")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	names, err := store.Names()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"main"}, names); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
}

func TestLock(t *testing.T) {
	store := Store{Root: t.TempDir()}
	dir, unlock, err := store.Lock("main")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(string(dir)); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v; want 0700", info.Mode(), err)
	}
	if _, _, err := store.Lock("main"); err == nil || !strings.Contains(err.Error(), "main") {
		t.Errorf("a second lock: %v, want an error that names the cluster", err)
	}

	if _, unlock, err := store.Lock("other"); err != nil {
		t.Errorf("lock of another cluster: %v", err)
	} else {
		unlock()
	}

	unlock()
	_, unlock, err = store.Lock("main")
	if err != nil {
		t.Fatalf("after unlock: %v", err)
	}

	unlock()
}

func start(t *testing.T) (Leader, *exec.Cmd) {
	t.Helper()
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})

	leader, err := NewLeader(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}

	return leader, cmd
}

func TestLeaderKill(t *testing.T) {
	leader, _ := start(t)
	if !leader.Alive() {
		t.Fatal("a running process is not alive")
	}

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()

	// The second time, the process is a zombie.
	for range 2 {
		if err := leader.Kill(ctx); err != nil {
			t.Fatal(err)
		}
		if leader.Alive() {
			t.Error("a killed process is alive")
		}
	}
}

func TestLeaderIsNotAnotherProcess(t *testing.T) {
	leader, cmd := start(t)
	for what, other := range map[string]Leader{
		"another start time": {PID: leader.PID, Start: leader.Start + 1, BootID: leader.BootID},
		"another boot":       {PID: leader.PID, Start: leader.Start, BootID: "earlier"},
		"nothing":            {},
		"init":               {PID: 1, Start: leader.Start, BootID: leader.BootID},
	} {
		if other.Alive() {
			t.Errorf("%s: alive", what)
		}
		if err := other.Kill(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}

	if !leader.Alive() {
		t.Errorf("the process %d was killed for another", cmd.Process.Pid)
	}
}

func TestParseStat(t *testing.T) {
	const tail = " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21"
	for _, test := range []struct {
		stat  string
		start uint64
		dead  bool
		fails bool
	}{
		{stat: "12 (sleep) S" + tail, start: 4711},
		{stat: "12 (a) S (b) R" + tail, start: 4711},
		{stat: "12 (sleep) Z" + tail, start: 4711, dead: true},
		{stat: "12 (sleep) S 1 2", fails: true},
		{stat: "", fails: true},
		{stat: "12 (sleep", fails: true},
		{stat: "12 (sleep) S" + strings.Replace(tail, "4711", "x", 1), fails: true},
	} {
		start, dead, err := parseStat(test.stat)
		if (err != nil) != test.fails ||
			(err == nil && (start != test.start || dead != test.dead)) {
			t.Errorf("%q: %d, %t, %v", test.stat, start, dead, err)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	content, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(content))
	f.Add(") Z")
	f.Fuzz(func(_ *testing.T, stat string) { parseStat(stat) })
}

func TestPathsAreBelowTheDirectory(t *testing.T) {
	dir := Dir("/state/main")
	for _, path := range []string{dir.Record(), dir.Kubeconfig(), dir.Socket(), dir.Logs(),
		dir.Log("etcd"), dir.PKI(), dir.Config(), dir.Data(), dir.Settings(),
		dir.Node("node1").Disk(), dir.Node("node1").Socket(), dir.Node("node1").Log("kubelet")} {
		if rel, err := filepath.Rel(string(dir), path); err != nil || strings.HasPrefix(rel, "..") {
			t.Errorf("%s is not below %s", path, dir)
		}
	}
}
