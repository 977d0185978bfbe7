// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// process is a program that runs beside the test.
type process struct {
	command *exec.Cmd
	done    chan struct{} // closed when the program has ended
	err     error         // the program's result; read it after done
}

// launch starts a program. Its output is appended to a file, which is shown if the test fails. The
// program is killed when the test ends.
func launch(t *testing.T, log, program string, args ...string) *process {
	t.Helper()
	first := !exists(log)
	output, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must.Succeed(t, err)
	defer output.Close()

	p := &process{command: exec.Command(program, args...), done: make(chan struct{})}
	p.command.Stdout, p.command.Stderr = output, output
	must.Succeed(t, p.command.Start())

	go func() {
		p.err = p.command.Wait()
		close(p.done)
	}()

	t.Cleanup(func() {
		p.kill()
		if first && t.Failed() {
			text, _ := os.ReadFile(log)
			t.Logf("%s wrote:\n%s", program, lastOf(string(text)))
		}
	})

	return p
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// lastOf returns the end of a program's output, as much as a person reads.
func lastOf(text string) string {
	const most = 150
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}

// end asks the program to end, and returns its result.
func (p *process) end() error {
	_ = p.command.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		return p.err
	case <-time.After(Patience):
		p.kill()
		return errors.New("did not end after SIGTERM")
	}
}

// kill kills the program, unless it has ended.
func (p *process) kill() {
	_ = p.command.Process.Kill()
	<-p.done
}
