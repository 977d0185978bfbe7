// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"time"
)

// process is a started program, which must be ended.
type process struct {
	name  string
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
	err   error // valid after ended is closed
}

// start starts a program of the project. Its output goes to a file in dir.
func (b *bench) start(dir, program string, args ...string) (*process, error) {
	return b.startWith(nil, dir, program, args...)
}

// startWith is like start, with additional environment variables of the form NAME=value.
func (b *bench) startWith(
	variables []string, dir, program string, args ...string,
) (*process, error) {
	p := &process{
		name: program, log: filepath.Join(dir, program+".log"), ended: make(chan struct{}),
	}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()

	p.cmd = exec.Command(filepath.Join(b.bin, program), args...)
	p.cmd.Env = append(os.Environ(), variables...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	// In a separate process group, it gets no interrupt from the terminal.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w; make images builds it", err)
	}

	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()

	return p, nil
}

// end asks the process to end and waits for it.
func (p *process) end() error {
	select {
	case <-p.ended:
		return p.died()
	default:
	}

	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}

	select {
	case <-p.ended:
		if p.err != nil {
			return p.died()
		}
		return nil
	case <-time.After(15 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.ended
		return fmt.Errorf("%s did not end within 15s:\n%s", p.name, p.lastWords())
	}
}

func (p *process) died() error {
	return fmt.Errorf("%s ended: %w:\n%s", p.name, errors.Join(p.err), p.lastWords())
}

func (p *process) lastWords() string {
	content, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(content), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-15):], []byte("\n")))
}

var residentSize = regexp.MustCompile(`VmRSS:\s+([0-9]+) kB`)

// resident returns the process's resident memory in bytes (VmRSS, proc_pid_status(5)).
func (p *process) resident() (float64, error) {
	return kilobytes(p.cmd.Process.Pid, "status", residentSize)
}

// kilobytes returns a value in kB from a file of a process in /proc, in bytes.
func kilobytes(pid int, file string, pattern *regexp.Regexp) (float64, error) {
	path := filepath.Join("/proc", strconv.Itoa(pid), file)
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}

	found := pattern.FindStringSubmatch(string(text))
	if found == nil {
		return 0, fmt.Errorf("%s: has no %s", path, pattern)
	}

	kB, err := strconv.ParseFloat(found[1], 64)
	return kB * 1024, err
}

// await calls check until it succeeds or the process ends. The pause is long, because checks cost
// the process memory. Timed operations do not use await.
func (p *process) await(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()

	for {
		err := check(ctx)
		if err == nil {
			return nil
		}

		select {
		case <-time.After(100 * time.Millisecond):
		case <-p.ended:
			return p.died()
		case <-ctx.Done():
			return fmt.Errorf("%s: %s: %w: %w:\n%s", p.name, what, ctx.Err(), err, p.lastWords())
		}
	}
}

// sleep is for pauses that are part of a measurement.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// measureSizes measures the size of the product's programs, which are the directories of cmd/.
func measureSizes(_ context.Context, b *bench) ([]Measurement, error) {
	programs, err := os.ReadDir(filepath.Join(b.source, "cmd"))
	if err != nil {
		return nil, err
	}

	var out []Measurement
	for _, program := range programs {
		info, err := os.Stat(filepath.Join(b.bin, program.Name()))
		if err != nil {
			return nil, fmt.Errorf("%w; make images builds it", err)
		}

		m := Measurement{What: program.Name() + ", size of the program", Unit: Bytes,
			Samples: []float64{float64(info.Size())}}
		switch program.Name() {
		case shim:
			m.Goal = lessThan(5e6)
		case "xpu-agent", "xpu-controller", "xpuctl":
			m.Goal = lessThan(40e6)
		}
		out = append(out, m)
	}

	return out, nil
}
