// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

const (
	// tryAgain is the exit code of an executable that asks to be run again: EX_TEMPFAIL of
	// sysexits.h.
	tryAgain = 75
	parallel = 8 // executables that run in parallel, at most
	// drain is the wait for the end of a run's output, which a process that left the process group
	// may keep open.
	drain     = time.Second
	maxOutput = 64 << 10 // logged bytes of one run's output
	maxLine   = 4 << 10  // bytes of a line in the log
	maxLast   = 200      // bytes of the last line that become part of an error
	// environment is the whole environment of an executable.
	environment = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// names matches the names that executables may have. Backup files of editors have other names, and
// are not run.
var names = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*$`)

// directory is the directory of the administrator's executables. Its methods may be called from
// several goroutines at once.
type directory struct {
	Options
	running *semaphore.Weighted // limits the executables that run in parallel

	mutex sync.Mutex
	// refused has the reasons why files are not run, by name. Each reason is logged once.
	refused map[string]string
}

func newDirectory(options Options) *directory {
	return &directory{Options: options, running: semaphore.NewWeighted(parallel)}
}

// list returns the names of the executables, sorted; none if the directory is missing. It returns
// an error if a user other than root can change the directory. It leaves out files that another
// user can change, and logs why.
func (d *directory) list() ([]string, error) {
	root, err := os.OpenRoot(d.Dir) // refuses links that lead out of the directory
	if errors.Is(err, fs.ErrNotExist) || d.Dir == "" {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("directory of post-delete hooks: %w", err)
	}
	defer root.Close()

	entries, err := fs.ReadDir(root.FS(), ".")
	if err := errors.Join(d.check(root), err); err != nil {
		return nil, fmt.Errorf("directory of post-delete hooks %s: %w", d.Dir, err)
	}

	d.mutex.Lock()
	defer d.mutex.Unlock()

	var list []string
	refused := map[string]string{}
	for _, entry := range entries {
		name := entry.Name()
		usable, err := usable(root, name)
		switch {
		case err != nil:
			if refused[name] = err.Error(); d.refused[name] != err.Error() {
				d.Log.Error(err, "Post-delete hook is refused and will not be run", "file",
					filepath.Join(d.Dir, name))
			}
		case usable:
			list = append(list, name)
		}
	}

	d.refused = refused
	return list, nil
}

// check refuses a directory into which a user other than root could put executables.
func (d *directory) check(root *os.Root) error {
	info, err := root.Stat(".")
	if err != nil {
		return err
	}

	var fileSystem unix.Statfs_t
	if err := unix.Statfs(d.Dir, &fileSystem); err != nil {
		return err
	}
	if fileSystem.Flags&unix.ST_RDONLY != 0 && info.Mode().Perm()&0o022 != 0 {
		// Kubernetes makes the directories of its volumes writable, and mounts them read-only.
		return nil
	}

	return changeable(info)
}

// usable reports whether a file is an executable that is run. The error says why an executable is
// refused.
func usable(root *os.Root, name string) (bool, error) {
	if strings.HasPrefix(name, ".") {
		return false, nil
	}

	info, err := root.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0:
		return false, nil
	case !names.MatchString(name):
		return false, errors.New("the name may have letters, digits, _, - and . only")
	case name == portHook:
		return false, errors.New("the built-in hook has this name; choose another")
	}

	return true, changeable(info)
}

// changeable returns why a user other than root could change a file or directory; nil if no other
// user can.
func changeable(info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok || stat.Uid != 0:
		return errors.New("must belong to root; use chown root")
	case info.Mode().Perm()&0o022 != 0:
		return errors.New("may be writable for root only; use chmod go-w")
	}
	return nil
}

// run runs an executable for a Function that was taken back, and logs its output.
func (d *directory) run(ctx context.Context, name string, a journal.Attachment) error {
	stdin, err := input(d.Node, a, progress(a, name).Attempts+1)
	if err != nil {
		return final{err}
	}
	if err := d.running.Acquire(ctx, 1); err != nil {
		return err
	}
	defer d.running.Release(1)

	output := &lines{log: d.Log.WithValues("function", a.Function.String(), "hook", name)}
	err = d.exec(ctx, filepath.Join(d.Dir, name), stdin, output)
	output.end()
	if err != nil && output.last != "" {
		return fmt.Errorf("%w: %s", err, output.last)
	}

	return err
}

// exec runs the executable in a process group of its own. All processes of the group have been sent
// SIGKILL when it returns. The error is final if the executable exited by itself and does not ask
// to be run again.
func (d *directory) exec(ctx context.Context, path string, stdin []byte, output io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()

	// The kernel sends Pdeathsig when the thread ends that started the process, so the thread must
	// exist until the process has ended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd := exec.Command(path)
	cmd.Dir, cmd.Env, cmd.WaitDelay = "/", []string{environment}, drain
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), output, output
	// The executable ends with the agent, because the next agent runs it again.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}

	kill := func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	killed := make(chan struct{})
	inTime := context.AfterFunc(ctx, func() { kill(); close(killed) })

	// With WNOWAIT the process can still be waited for below. Until then, no other process or group
	// can get its ID.
	for errors.Is(unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil),
		unix.EINTR) {
	}

	late := !inTime()
	if late {
		<-killed
	}

	kill()
	// Wait's error is also in the state, except for missing output.
	_ = cmd.Wait()
	code := cmd.ProcessState.ExitCode() // -1 after a signal
	switch {
	case late:
		return fmt.Errorf("took longer than %s and was killed", d.Timeout)
	case code == 0:
		return nil
	case code == tryAgain || code < 0:
		return errors.New(cmd.ProcessState.String()) // "exit status 75", "signal: killed"
	}

	return final{errors.New(cmd.ProcessState.String())}
}

// lines logs its input line by line, up to a limit. It discards the rest, so that the executable
// does not block.
type lines struct {
	log     logr.Logger
	partial []byte
	written int    // bytes, including those that are not logged
	last    string // the beginning of the last line that is not empty
}

// Write logs complete lines. It never fails.
func (l *lines) Write(p []byte) (int, error) {
	rest := p[:min(len(p), max(0, maxOutput-l.written))]
	l.written += len(p)
	for len(rest) > 0 {
		line, after, complete := bytes.Cut(rest, []byte("\n"))
		if room := maxLine - len(l.partial); len(line) > room {
			line, after, complete = rest[:room], rest[room:], true
		}

		l.partial = append(l.partial, line...)
		if complete {
			l.flush()
		}
		rest = after
	}

	return len(p), nil
}

func (l *lines) flush() {
	line := strings.TrimRight(strings.ToValidUTF8(string(l.partial), "\uFFFD"), " \t\r")
	l.partial = l.partial[:0]
	if line == "" {
		return
	}
	l.log.Info("Post-delete hook says", "output", line)
	l.last = strings.ToValidUTF8(line[:min(len(line), maxLast)], "")
}

// end logs the last line, which may lack a line break.
func (l *lines) end() {
	l.flush()
	if l.written > maxOutput {
		l.log.Info("Post-delete hook wrote too much; the rest is not logged", "bytes", maxOutput)
	}
}
