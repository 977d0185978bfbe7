// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// The variables that commands of hooks get, beside the environment of the run.
const (
	EnvRun      = "OPI_CONFORMANCE_RUN"      // the prefix of the run's ids
	EnvEndpoint = "OPI_CONFORMANCE_ENDPOINT" // as --endpoint has it
	EnvPortID   = "OPI_CONFORMANCE_PORT_ID"
	EnvPortMAC  = "OPI_CONFORMANCE_PORT_MAC" // such as 02:11:22:33:00:01
	EnvSignal   = "OPI_CONFORMANCE_SIGNAL"   // TERM or KILL
)

// Commands are the commands of hooks, each as words that blanks separate. They are not given to a
// shell. An empty one is missing.
type Commands struct {
	MakePort, RemovePort, Restart string
	// Wire goes on as long as the frames of a port are needed: see [Ready].
	Wire string
	// Timeout is how long a command may take, and one of Wire to begin and to end. It is then
	// killed.
	Timeout time.Duration
}

// Hooks returns the hooks that run the commands, in a run with this prefix at this endpoint.
func (c Commands) Hooks(prefix string, endpoint Endpoint) Hooks {
	all := []string{EnvRun + "=" + prefix, EnvEndpoint + "=" + endpoint.String()}
	run := func(ctx context.Context, command string, env ...string) error {
		return c.run(ctx, strings.Fields(command), append(env, all...))
	}
	envOf := func(p Port) []string {
		return []string{EnvPortID + "=" + p.ID, EnvPortMAC + "=" + p.MAC.String()}
	}
	port := func(command string) func(context.Context, Port) error {
		if strings.TrimSpace(command) == "" {
			return nil
		}
		return func(ctx context.Context, p Port) error {
			return run(ctx, command, envOf(p)...)
		}
	}

	hooks := Hooks{MakePort: port(c.MakePort), RemovePort: port(c.RemovePort)}
	if strings.TrimSpace(c.Restart) != "" {
		hooks.Restart = func(ctx context.Context, how Ending) error {
			return run(ctx, c.Restart, EnvSignal+"="+string(how))
		}
	}

	if argv := strings.Fields(c.Wire); len(argv) > 0 {
		hooks.OpenWire = func(ctx context.Context, p Port) (Wire, error) {
			return c.openWire(ctx, argv, append(envOf(p), all...))
		}
	}

	return hooks
}

// run runs a command and waits for it. What the command started may go on.
func (c Commands) run(ctx context.Context, argv, env []string) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	command := exec.CommandContext(ctx, argv[0], argv[1:]...)
	command.Env = append(os.Environ(), env...)
	// A program that the command left running may hold the output open.
	command.WaitDelay = 100 * time.Millisecond
	output := &tail{}
	command.Stdout, command.Stderr = output, output

	err := command.Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // the command itself succeeded
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: took longer than %s: %s", argv[0], c.Timeout, output)
	case err != nil:
		return fmt.Errorf("%s: %w: %s", argv[0], err, output)
	}

	return nil
}

// tail keeps the last bytes of a command's output.
type tail struct{ kept []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	t.kept = t.kept[max(0, len(t.kept)-maxText):]
	return len(p), nil
}

func (t *tail) String() string { return string(bytes.TrimSpace(t.kept)) }
