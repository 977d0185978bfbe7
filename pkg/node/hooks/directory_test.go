// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// logged collects log messages.
type logged struct {
	mutex sync.Mutex
	lines []string
}

func (l *logged) logger() logr.Logger {
	return funcr.New(func(_, args string) {
		l.mutex.Lock()
		defer l.mutex.Unlock()
		l.lines = append(l.lines, args)
	}, funcr.Options{})
}

func (l *logged) text() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return strings.Join(l.lines, "\n")
}

// outputs is a log that collects the output of hooks.
type outputs struct{ said []string }

func (o *outputs) Init(logr.RuntimeInfo) {}

func (o *outputs) Enabled(int) bool { return true }

func (o *outputs) Info(_ int, _ string, keysAndValues ...any) {
	if keysAndValues[0] == "output" {
		o.said = append(o.said, keysAndValues[1].(string))
	}
}

func (o *outputs) Error(error, string, ...any) {}

func (o *outputs) WithValues(...any) logr.LogSink { return o }

func (o *outputs) WithName(string) logr.LogSink { return o }

// hooksDir returns a directory as an administrator makes it.
func hooksDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "hooks.d")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	return dir
}

func write(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o600))
	must.Succeed(t, os.Chmod(path, mode))
}

func TestList(t *testing.T) {
	t.Parallel()
	dir := hooksDir(t)
	for name, mode := range map[string]fs.FileMode{
		"20-second": 0o755, "10-first": 0o500, "b.sh": 0o755, ".hidden": 0o755, "README": 0o644,
		"Z":              0o711,
		"group-writable": 0o775, "world-writable": 0o757, "not-roots": 0o755, "copy~": 0o755,
		"a space": 0o755, "port": 0o755,
	} {
		write(t, filepath.Join(dir, name), "#!/bin/sh\n", mode)
	}

	must.Succeed(t, os.Chown(filepath.Join(dir, "not-roots"), 12345, 0))
	must.Succeed(t, os.Mkdir(filepath.Join(dir, "directory"), 0o755))
	must.Succeed(t, os.Mkdir(filepath.Join(dir, "..data"), 0o755))
	write(t, filepath.Join(dir, "..data", "x"), "#!/bin/sh\n", 0o755)

	for name, target := range map[string]string{
		"linked": "..data/x", "outside": "/bin/sh", "dangling": "nothing", "out-relative": "../x",
	} {
		must.Succeed(t, os.Symlink(target, filepath.Join(dir, name)))
	}

	write(t, filepath.Join(filepath.Dir(dir), "x"), "#!/bin/sh\n", 0o755)

	var log logged
	d := newDirectory(Options{Dir: dir, Log: log.logger()})
	for range 2 {
		list, err := d.list()
		must.Succeed(t, err)
		if diff := cmp.Diff([]string{"10-first", "20-second", "Z", "b.sh", "linked"},
			list); diff != "" {
			t.Errorf("list (-want +got):\n%s", diff)
		}
	}

	for _, name := range []string{"group-writable", "world-writable", "not-roots", "copy~",
		"a space", "port", "outside", "out-relative"} {
		if count := strings.Count(log.text(), dir+"/"+name+`"`); count != 1 {
			t.Errorf("%q is in the log %d times, want once", name, count)
		}
	}

	if len(log.lines) != 8 {
		t.Errorf("log:\n%s\nwant 8 lines", log.text())
	}

	must.Succeed(t, os.Chmod(filepath.Join(dir, "group-writable"), 0o755))
	list, err := d.list()
	must.Succeed(t, err)
	if len(list) != 6 || list[4] != "group-writable" {
		t.Errorf("list %q after chmod", list)
	}
}

func TestDirectoryMissing(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"", filepath.Join(t.TempDir(), "missing")} {
		if list, err := newDirectory(Options{Dir: dir, Log: logr.Discard()}).list(); err != nil ||
			len(list) != 0 {
			t.Errorf("directory %q: list %q, %v", dir, list, err)
		}
	}
}

func TestDirectoryRefused(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change func(dir string) error
		want   string
	}{
		"group-writable": {func(dir string) error {
			return os.Chmod(dir,
				0o775)
		}, "writable for root only"},
		"world-writable": {func(dir string) error {
			return os.Chmod(dir,
				0o777|fs.ModeSticky)
		}, "writable for root only"},
		"not root's": {func(dir string) error {
			return os.Chown(dir,
				12345, 0)
		}, "must belong to root"},
		"a file": {func(dir string) error {
			return errors.Join(os.Remove(dir),
				os.WriteFile(dir, nil, 0o755))
		}, "not a directory"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := hooksDir(t)
			must.Succeed(t, test.change(dir))
			_, err := New(Options{Dir: dir, Log: logr.Discard()}, nil)
			if err == nil || !strings.Contains(err.Error(), test.want) ||
				!strings.Contains(err.Error(), dir) {
				t.Errorf("error %v, want one with %q and the directory", err, test.want)
			}
		})
	}
}

// TestRefusalIsLogged: each reason is logged once.
func TestRefusalIsLogged(t *testing.T) {
	t.Parallel()
	dir := hooksDir(t)
	file := filepath.Join(dir, "50-shared")
	must.Succeed(t, os.WriteFile(file, nil, 0o777))
	must.Succeed(t, os.Chmod(file, 0o777))
	var messages []string
	log := funcr.New(func(_, args string) { messages = append(messages, args) }, funcr.Options{})
	d := newDirectory(Options{Dir: dir, Log: log})
	list := func() {
		t.Helper()
		if _, err := d.list(); err != nil {
			t.Fatal(err)
		}
	}

	list()
	list()
	if len(messages) != 1 || !strings.Contains(messages[0], file) ||
		!strings.Contains(messages[0], "writable for root only") {
		t.Errorf("logged %q, want once that the file is refused, and why", messages)
	}

	must.Succeed(t, os.Chown(file, 12345, 0))
	list()
	if len(messages) != 2 || !strings.Contains(messages[1], "must belong to root") {
		t.Errorf("logged %q, want another reason", messages)
	}
}

// A volume of Kubernetes is writable for all users and mounted read-only.
func TestDirectoryReadOnly(t *testing.T) {
	t.Parallel()
	dir := hooksDir(t)
	write(t, filepath.Join(dir, "10-a"), "#!/bin/sh\n", 0o755)
	must.Succeed(t, os.Chmod(dir, 0o777))
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("%v (these tests run as root)", err)
	}
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(dir, unix.MNT_DETACH)) })

	must.Succeed(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	d := newDirectory(Options{Dir: dir, Log: logr.Discard()})
	if list, err := d.list(); err != nil || len(list) != 1 {
		t.Errorf("list %q, %v; want the executable", list, err)
	}
}

// runScript runs a shell script as a hook.
func runScript(
	t *testing.T, script string, timeout time.Duration, a journal.Attachment,
) (*logged, error) {
	t.Helper()
	dir := hooksDir(t)
	write(t, filepath.Join(dir, "10-a"), "#!/bin/sh\n"+script, 0o755)
	log := &logged{}
	d := newDirectory(Options{Node: "node1", Dir: dir, Timeout: timeout, Log: log.logger()})
	return log, d.run(t.Context(), "10-a", a)
}

func TestRunGives(t *testing.T) {
	t.Parallel()
	out := filepath.Join(t.TempDir(), "out")
	a := released(88)
	a.Hooks = &journal.Hooks{Next: "10-a", Attempts: 2}
	log, err := runScript(t, `cat > `+out+`.json; env > `+out+
		`.env; pwd; ps -o pgid= -p $$ > /dev/null 2>&1
read -r _ _ _ _ group _ < /proc/$$/stat; echo "pid $$ group $group"; echo "to stderr" >&2; printf unterminated`, time.Minute, a)
	must.Succeed(t, err)
	data, err := os.ReadFile(out + ".json")
	must.Succeed(t, err)

	want := `{
		"version": 1, "node": "node1",
		"function": {"id": "0000:3b:00.0/sf88", "kind": "SF", "pciAddress": "0000:3b:00.0", "pf": "0000:3b:00.0", "pfName": "ens3f0", "index": 88},
		"resource": "xpu.opiproject.org/fast",
		"pod": {"namespace": "default", "name": "pod1", "uid": "pod1-uid"},
		"containerID": "c1",
		"port": {"network": "blue", "mac": "02:00:00:00:00:01"},
		"reservedAt": "2001-09-09T01:46:40Z", "attachedAt": "2001-09-09T01:46:41Z", "detachedAt": "2001-09-09T01:47:40Z",
		"restoredAt": "2001-09-09T01:47:40.001Z",
		"attempt": 3}`

	if diff := cmp.Diff(object(t, []byte(want)), object(t, data)); diff != "" {
		t.Errorf("input (-want +got):\n%s", diff)
	}

	env, err := os.ReadFile(out + ".env")
	must.Succeed(t, err)

	for line := range strings.Lines(string(env)) {
		name, _, _ := strings.Cut(line, "=")
		// shells set these
		if name != "PATH" && name != "PWD" && name != "SHLVL" && name != "_" && name != "OLDPWD" {
			t.Errorf("environment has %q", line)
		}
	}

	for _, text := range []string{`"output"="/"`, `"output"="to stderr"`, `"output"="unterminated"`,
		`"function"="0000:3b:00.0/sf88"`, `"hook"="10-a"`} {
		if !strings.Contains(log.text(), text) {
			t.Errorf("log lacks %s:\n%s", text, log.text())
		}
	}

	var pid, group int
	for _, line := range log.lines {
		if _, after, ok := strings.Cut(line, `"output"="pid `); ok {
			_, err := fmt.Sscanf(after, "%d group %d", &pid, &group)
			must.Succeed(t, err)
		}
	}

	if pid == 0 || pid != group {
		t.Errorf("process %d is in group %d, want its own", pid, group)
	}
}

func object(t *testing.T, data []byte) (o map[string]any) {
	t.Helper()
	if err := json.Unmarshal(data, &o); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	return o
}

// The input for a claim, and for a Function that was never attached.
func TestInput(t *testing.T) {
	t.Parallel()
	at := time.Unix(1e9, 0).UTC()
	claim := journal.Attachment{
		Function: vf(1), PF: "0000:3b:00.0", VFIndex: 1, State: journal.Attached, ReservedAt: at,
		Claim: journal.Claim{
			Namespace: "default", Name: "c", UID: "u", Request: "nic", Pool: "p", Device: "d",
		},
		Pod: journal.Pod{Namespace: "default", Name: "pod1", UID: "pod1-uid"}, Sandbox: "s1",
		AttachedAt: at, StoppedAt: at,
	}

	claim = claim.BackToReserved() // the sandbox stopped before the claim was released
	claim.State, claim.RestoredAt = journal.Releasing, at

	bare := journal.Attachment{
		Function: vf(1), PF: "0000:3b:00.0", VFIndex: 1, State: journal.Releasing, Resource: "r",
		ReservedAt: at, RestoredAt: at,
	}

	common := `"version": 1, "node": "n", "attempt": 1, "reservedAt": "2001-09-09T01:46:40Z", "restoredAt": "2001-09-09T01:46:40Z",
		"function": {"id": "0000:3b:00.0/sf1", "kind": "SF", "pciAddress": "0000:3b:00.0", "pf": "0000:3b:00.0", "index": 1}`
	for name, test := range map[string]struct {
		a    journal.Attachment
		want string
	}{
		"claim": {claim, `{` + common +
			`, "claim": {"namespace": "default", "name": "c", "uid": "u", "request": "nic", "pool": "p", "device": "d"},
			"pod": {"namespace": "default", "name": "pod1", "uid": "pod1-uid"}, "containerID": "s1",
			"attachedAt": "2001-09-09T01:46:40Z", "detachedAt": "2001-09-09T01:46:40Z"}`},
		"never attached": {bare, `{` + common + `, "resource": "r"}`},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := input("n", test.a, 1)
			must.Succeed(t, err)
			if diff := cmp.Diff(object(t, []byte(test.want)), object(t, got)); diff != "" {
				t.Errorf("input (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRunEnds(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		script string
		// want is part of the error, "" for success.
		want  string
		final bool
	}{
		"success":                 {"exit 0", "", false},
		"success, input not read": {"exec <&-; exit 0", "", false},
		"try again": {
			"echo come back later; exit 75", "exit status 75: come back later", false,
		},
		"failure": {"echo first; echo '  the switch says no  ' >&2; exit 1",
			"exit status 1:   the switch says no", true},
		"failure without a word": {"exit 3", "exit status 3", true},
		"killed":                 {"kill -9 $$", "signal: killed", false},
		"too long": {
			"echo working; sleep 60", "took longer than 300ms and was killed: working", false,
		},
		"too long, deaf to signals": {
			"trap '' TERM INT; while :; do sleep 1; done", "took longer than 300ms", false,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			_, err := runScript(t, test.script, 300*time.Millisecond, released(0))
			if (err == nil) != (test.want == "") ||
				err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if isFinal := errors.As(err, new(final)); isFinal != test.final {
				t.Errorf("final: %t, want %t", isFinal, test.final)
			}
			if took := time.Since(begin); took > 20*time.Second {
				t.Errorf("took %s", took)
			}
		})
	}
}

// An executable that cannot be started is tried again, because the file may just be being replaced.
func TestRunCannotStart(t *testing.T) {
	t.Parallel()
	dir := hooksDir(t)
	write(t, filepath.Join(dir, "10-a"), "#!/no/such/interpreter\n", 0o755)
	d := newDirectory(Options{Dir: dir, Timeout: time.Minute, Log: logr.Discard()})
	for _, name := range []string{"10-a", "20-gone"} {
		err := d.run(t.Context(), name, released(0))
		if err == nil || !strings.Contains(err.Error(), name) || errors.As(err, new(final)) {
			t.Errorf("error %v, want one with the name that is not final", err)
		}
	}
}

// TestNothingIsLeft: the executable's children end with it, however it ends.
func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]string{
		"exits": "exit 0", "takes too long": "wait", "fails": "exit 1",
	} {
		t.Run(name, func(t *testing.T) {
			pidFile := filepath.Join(t.TempDir(), "pid")
			// The child keeps standard output open too.
			begin := time.Now()
			_, _ = runScript(t, "sleep 600 & echo $! > "+pidFile+"\n"+script, 500*time.Millisecond,
				released(0))
			if took := time.Since(begin); took > 20*time.Second {
				t.Errorf("took %s", took)
			}

			text, err := os.ReadFile(pidFile)
			must.Succeed(t, err)
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			must.Succeed(t, err)
			// The child was sent SIGKILL, and ends when it is scheduled.
			deadline := time.Now().Add(20 * time.Second)
			for state := processState(pid); state != "" && state != "Z"; state = processState(pid) {
				if time.Now().After(deadline) {
					t.Fatalf("child %d lives on in state %s", pid, state)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
}

// processState returns the kernel's letter for the state of a process, or "" if it does not exist.
func processState(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return after[:1]
}

// A process that left the group and keeps standard output open does not delay the hook.
func TestRunawayHoldsOutput(t *testing.T) {
	t.Parallel()
	pidFile := filepath.Join(t.TempDir(), "pid")
	t.Cleanup(func() {
		text, err := os.ReadFile(pidFile)
		must.Succeed(t, err)
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		must.Succeed(t, err)
		must.Succeed(t, unix.Kill(pid, unix.SIGKILL))
	})

	begin := time.Now()
	_, err := runScript(t, "setsid sh -c 'echo $$ > "+pidFile+"; exec sleep 600' &\nwhile [ ! -s "+
		pidFile+" ]; do sleep 0.01; done",
		time.Minute, released(0))
	must.Succeed(t, err)
	if took := time.Since(begin); took < drain || took > 20*time.Second {
		t.Errorf("took %s, want little more than %s", took, drain)
	}
}

// The agent ends while an executable runs.
func TestRunCancelled(t *testing.T) {
	t.Parallel()
	dir := hooksDir(t)
	started := filepath.Join(t.TempDir(), "started")
	must.Succeed(t, unix.Mkfifo(started, 0o600))
	write(t, filepath.Join(dir, "10-a"), "#!/bin/sh\necho > "+started+"\nsleep 600\n", 0o755)
	d := newDirectory(Options{Dir: dir, Timeout: time.Hour, Log: logr.Discard()})
	d.running = semaphore.NewWeighted(1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- d.run(ctx, "10-a", released(0)) }()
	_, err := os.ReadFile(started) // until the executable has started
	must.Succeed(t, err)
	go func() { done <- d.run(ctx, "10-a", released(1)) }() // waits for the only slot
	cancel()

	for range 2 {
		if err := <-done; err == nil {
			t.Error("run ended well")
		}
	}
}

func TestOutputFlood(t *testing.T) {
	t.Parallel()
	log, err := runScript(t, "yes 0123456789abcdef | head -c 20000000; echo; echo end", time.Minute,
		released(0))
	must.Succeed(t, err)
	total := 0
	for _, line := range log.lines {
		total += len(line)
	}

	if lines := len(log.lines); lines > maxOutput/17+3 || lines < maxOutput/17 ||
		!strings.Contains(log.lines[lines-1], "wrote too much") {
		t.Errorf("%d lines, %d bytes logged; the last one is %s", lines, total, log.lines[lines-1])
	}
}

func TestLines(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", maxLine)
	for name, test := range map[string]struct {
		writes []string
		lines  []string
		last   string
	}{
		"nothing":      {nil, nil, ""},
		"in parts":     {[]string{"a", "b\nc", "d\n"}, []string{"ab", "cd"}, "cd"},
		"unterminated": {[]string{"a\nb"}, []string{"a", "b"}, "b"},
		"empty lines":  {[]string{"\n\na\r\n  \n"}, []string{"a"}, "a"},
		"long line":    {[]string{long + "yz\n"}, []string{long, "yz"}, "yz"},
		"last is cut":  {[]string{long}, []string{long}, long[:maxLast]},
		"not UTF-8":    {[]string{"a\xffb\n"}, []string{"a\uFFFDb"}, "a\uFFFDb"},
		"cut characters": {
			[]string{strings.Repeat("é", maxLast) + "\n"}, []string{strings.Repeat("é", maxLast)},
			strings.Repeat("é", maxLast/2),
		},
	} {
		t.Run(name, func(t *testing.T) {
			var log outputs
			l := &lines{log: logr.New(&log)}
			for _, w := range test.writes {
				if n, err := l.Write([]byte(w)); n != len(w) || err != nil {
					t.Errorf("Write = %d, %v", n, err)
				}
			}

			l.end()
			if diff := cmp.Diff(test.lines, log.said); diff != "" {
				t.Errorf("lines (-want +got):\n%s", diff)
			}
			if l.last != test.last {
				t.Errorf("last line %q, want %q", l.last, test.last)
			}
		})
	}
}

// However output is split, all of it is accepted, and neither a line nor the whole is longer than
// allowed.
func FuzzLines(f *testing.F) {
	f.Add([]byte("a\nb\xff\n"), 1)
	f.Add([]byte(strings.Repeat("long", maxLine)), 3000)

	f.Fuzz(func(t *testing.T, data []byte, chunk int) {
		if chunk <= 0 || chunk > 1<<20 {
			return
		}

		var log outputs
		l := &lines{log: logr.New(&log)}
		for rest := data; len(rest) > 0; {
			part := rest[:min(chunk, len(rest))]
			if n, err := l.Write(part); n != len(part) || err != nil {
				t.Fatalf("Write = %d, %v", n, err)
			}
			rest = rest[len(part):]
		}

		l.end()
		total := 0
		for _, line := range log.said {
			characters := len([]rune(line))
			if characters > maxLine {
				t.Errorf("a line of %d characters", characters)
			}
			total += characters
		}

		if total > maxOutput {
			t.Errorf("%d characters logged, want %d at most", total, maxOutput)
		}
		if len(l.last) > 3*maxLast {
			t.Errorf("last line has %d bytes", len(l.last))
		}
	})
}
