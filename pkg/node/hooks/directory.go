package hooks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

const (
	// tryAgain is the exit code of an executable that wants to be run again: EX_TEMPFAIL of sysexits.h.
	tryAgain = 75
	// drain is how long output is waited for that a process which left the group still holds back.
	drain = time.Second
	// searchPath is the one variable in the environment of executables, PATH.
	searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// names that executables may have; others, such as an editor's copies, are not run.
var names = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*$`)

// directory is where the administrator's executables are. Its methods may be called by several goroutines at once.
type directory struct {
	options Options
	slots   chan struct{} // has a token for each executable that runs
	log     logr.Logger

	mutex   sync.Mutex
	refused map[string]string // what was logged, by name
}

func newDirectory(options Options, log logr.Logger) *directory {
	parallel := options.Parallel
	if parallel == 0 {
		parallel = 8
	}
	return &directory{options: options, slots: make(chan struct{}, parallel), log: log, refused: map[string]string{}}
}

// list are the names of the executables, in their order. A directory that is missing has none. One that somebody other
// than root can change is an error; a file that somebody else can change is left out, with an error in the log.
func (d *directory) list() ([]string, error) {
	// Nothing outside of the root is looked at: a link to the outside is refused.
	root, err := os.OpenRoot(d.options.Dir)
	if errors.Is(err, fs.ErrNotExist) || d.options.Dir == "" {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("directory of post-delete hooks: %w", err)
	}
	defer root.Close()
	if err := d.check(root); err != nil {
		return nil, fmt.Errorf("directory of post-delete hooks %s: %w", d.options.Dir, err)
	}
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("directory of post-delete hooks %s: %w", d.options.Dir, err)
	}
	var list []string
	refused := map[string]string{}
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") {
			continue
		}
		usable, reason := usable(root, name)
		if reason != "" {
			refused[name] = reason
		} else if usable {
			list = append(list, name)
		}
	}
	d.report(refused)
	slices.Sort(list)
	return list, nil
}

// check refuses a directory into which somebody other than root could put executables.
func (d *directory) check(root *os.Root) error {
	info, err := root.Stat(".")
	if err != nil {
		return err
	}
	var fileSystem unix.Statfs_t
	if err := unix.Statfs(d.options.Dir, &fileSystem); err != nil {
		return err
	}
	reason := changeable(info)
	if fileSystem.Flags&unix.ST_RDONLY != 0 && info.Mode().Perm()&0o022 != 0 {
		reason = "" // Kubernetes makes the directories of its volumes writable, and mounts them read-only
	}
	if reason != "" {
		return errors.New(reason)
	}
	return nil
}

// usable says whether a file is to be run, and why one is not that should be.
func usable(root *os.Root, name string) (ok bool, refused string) {
	info, err := root.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, ""
	case err != nil:
		return false, err.Error()
	case !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0:
		return false, ""
	case !names.MatchString(name):
		return false, "the name may have letters, digits, _, - and . only"
	case name == portHook:
		return false, "the name is that of the built-in hook; choose another"
	}
	refused = changeable(info)
	return refused == "", refused
}

// changeable says why somebody other than root could change a file or directory, "" if nobody can.
func changeable(info fs.FileInfo) string {
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok || stat.Uid != 0:
		return "must belong to root; use chown root"
	case info.Mode().Perm()&0o022 != 0:
		return "may be writable for root only; use chmod go-w"
	}
	return ""
}

// report logs what is refused, once for each reason.
func (d *directory) report(refused map[string]string) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	for name, reason := range refused {
		if d.refused[name] != reason {
			d.log.Error(errors.New(reason), "Post-delete hook is refused and will not be run",
				"file", filepath.Join(d.options.Dir, name))
		}
	}
	d.refused = refused
}

// run runs an executable for a Function that was taken back. What it writes goes to the log.
func (d *directory) run(ctx context.Context, name string, a journal.Attachment) error {
	attempt := 1
	if a.Hooks != nil && a.Hooks.Next == name {
		attempt += a.Hooks.Attempts
	}
	stdin, err := input(d.options.Node, a, attempt)
	if err != nil {
		return final{err}
	}
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	output := &lines{log: d.log.WithValues("function", a.Function.String(), "hook", name)}
	state, err := d.exec(ctx, filepath.Join(d.options.Dir, name), stdin, output)
	output.end()
	return resultOf(state, err, output.last)
}

// exec runs the executable in a process group of its own, all of which was sent SIGKILL when it returns. state is nil
// if the executable could not be started; err is also why it was killed.
func (d *directory) exec(
	ctx context.Context, path string, stdin []byte, output *lines,
) (state *os.ProcessState, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.options.Timeout)
	defer cancel()
	// The kernel sends the signal below when the thread ends that started the process: it must live on meanwhile.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.Command(path)
	cmd.Dir, cmd.Env, cmd.WaitDelay = "/", []string{"PATH=" + searchPath}, drain
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), output, output
	// With the agent the executable ends too, as the next agent runs it again.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		awaitExit(cmd.Process.Pid)
	}()
	select {
	case <-exited:
	case <-ctx.Done():
		err = fmt.Errorf("took longer than %s and was killed", d.options.Timeout)
	}
	// Before the process is waited for, its ID, which is the group's, cannot be another's.
	_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	<-exited
	_ = cmd.Wait() // what it says is in the state; output may be missing, which is the executable's loss
	return cmd.ProcessState, err
}

// awaitExit returns when the process has ended, and leaves it to be waited for.
func awaitExit(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// result is what came of a run.
func resultOf(state *os.ProcessState, err error, lastLine string) error {
	switch {
	case err == nil && state.Success():
		return nil
	case err == nil:
		err = errors.New(state.String()) // "exit status 3", "signal: killed"
		if code := state.ExitCode(); code >= 0 && code != tryAgain {
			err = final{err}
		}
	}
	if lastLine != "" {
		err = fmt.Errorf("%w: %s", err, lastLine)
	}
	return err
}
