// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// oneTable is the only table of this process, because two would reap each other's children.
var oneTable = sync.OnceValue(func() *Table { return NewTable(context.Background()) })

func TestRun(t *testing.T) {
	table := oneTable()
	for script, want := range map[string]string{
		"exit 0":        "",
		"exit 3":        "x: exited with 3",
		"kill -TERM $$": "x: killed by SIGTERM",
	} {
		err := table.Run(t.Context(), "x", exec.Command("sh", "-c", script))
		if got := errorString(err); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}

	if err := table.Run(t.Context(), "x", exec.Command("/nonexistent")); err == nil {
		t.Error("a program that does not exist ran")
	}
}

func TestRunEndsWithContext(t *testing.T) {
	table := oneTable()
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	if err := table.Run(ctx, "x", exec.Command("sleep", "60")); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
}

func TestManyAtOnce(t *testing.T) {
	table := oneTable()
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if err := table.Run(t.Context(), "true", exec.Command("true")); err != nil {
				t.Error(err)
			}
		})
	}

	all.Wait()
}

func TestOrphansAreReaped(t *testing.T) {
	// A subreaper inherits the children of its dead descendants, like PID 1 (prctl(2)).
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

	table := oneTable()
	fifo := filepath.Join(t.TempDir(), "pid")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}

	// The orphan ends after its PID has been read.
	p, err := table.Start("parent",
		exec.Command("sh", "-c", `sh -c 'echo $$ > "$0"' "$0" & exit 0`, fifo))
	if err != nil {
		t.Fatal(err)
	}

	content, err := os.ReadFile(fifo)
	if err != nil {
		t.Fatal(err)
	}

	<-p.Done()
	orphan := strings.TrimSpace(string(content))
	deadline := time.Now().Add(10 * time.Second)
	for {
		if _, err := os.Stat("/proc/" + orphan); errors.Is(err, os.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %s is not reaped", orphan)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestStop(t *testing.T) {
	table := oneTable()
	ready := filepath.Join(t.TempDir(), "ready")
	if err := syscall.Mkfifo(ready, 0o600); err != nil {
		t.Fatal(err)
	}

	for _, test := range []struct {
		name, script, want string
	}{
		{"obeys", `echo > "$0"; exec sleep 60`, "killed by SIGTERM"},
		{"does not obey", `trap "" TERM; echo > "$0"; while :; do sleep 0.01; done`,
			"killed by SIGKILL"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, err := table.Start("x", exec.Command("sh", "-c", test.script, ready))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := os.ReadFile(ready); err != nil {
				t.Fatal(err)
			}
			if p.Err() != nil || !p.Running() {
				t.Fatalf("before Stop: %v", p.Err())
			}

			p.Stop(300 * time.Millisecond)
			if got := errorString(p.Err()); !strings.Contains(got, test.want) {
				t.Errorf("%q, want %q", got, test.want)
			}

			p.Signal(syscall.SIGTERM) // no effect, and no harm to another process with this PID
		})
	}
}

func TestTail(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	if got, err := Tail(file, 3); got != "" || err != nil {
		t.Errorf("no file: %q, %v", got, err)
	}

	long := strings.Repeat("x", 1000) + "\n"
	for content, want := range map[string]string{
		"":                                   "",
		"a\n":                                "a",
		"a\nb\nc\nd\n":                       "b\nc\nd",
		"a\nb":                               "a\nb",
		strings.Repeat(long, 200) + "y\nz\n": strings.Repeat("x", 1000) + "\ny\nz",
	} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := Tail(file, 3); got != want || err != nil {
			t.Errorf("%.20q: %q, %v; want %q", content, got, err, want)
		}
	}
}

func errorString(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
