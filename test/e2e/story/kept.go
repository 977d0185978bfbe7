// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// KeptSteps bring up the cluster as "make demo KEEP=1" leaves it: with everything that two acts
// declare, and without pods.
func (w *World) KeptSteps() []Step {
	return append(w.claimSteps()[:4],
		Step{"Pools for the device plugin beside those for claims", w.declareResources},
		Step{"The commands of a user", w.makeCommands})
}

// Attach connects to the cluster that "make demo KEEP=1" left up. Only [World.Shell] can be used then.
func (w *World) Attach(ctx context.Context) (err error) {
	w.dir = filepath.Join(w.StateDir, w.Cluster.Name)
	if w.cluster, err = w.Cluster.Inspect(ctx); err != nil {
		return err
	}
	return w.makeCommands(ctx)
}

// makeCommands makes kubectl, xpuctl and "on", which runs a command on a node, for [World.Shell].
func (w *World) makeCommands(context.Context) error {
	dir := w.commands()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}

	for name, command := range map[string]string{
		"kubectl": fmt.Sprintf("%s kubectl --name %s --", w.Cluster.Program, w.Cluster.Name),
		"on":      fmt.Sprintf("%s exec --name %s", w.Cluster.Program, w.Cluster.Name),
		"xpuctl":  filepath.Join(w.Bin, "xpuctl"),
	} {
		script := "#!/bin/sh\nexec " + command + " \"$@\"\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			return err
		}
	}

	return nil
}

// commands returns the directory of the commands for [World.Shell].
func (w *World) commands() string { return filepath.Join(w.dir, "commands") }

// Shell runs a bash script in a directory, as somebody does who has "kubectl" and "xpuctl" and has
// pointed them at the cluster. It returns what the script writes to both outputs, and its exit code. When
// the context ends, so do the script and its commands, and the output until then is returned.
func (w *World) Shell(ctx context.Context, dir, script string) (output string, code int, err error) {
	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+w.cluster.Kubeconfig,
		"PATH="+w.commands()+":"+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second // a command may be in a group of its own
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out

	err = cmd.Run()
	var ended *exec.ExitError
	if errors.As(err, &ended) && ctx.Err() == nil {
		return out.String(), ended.ExitCode(), nil
	}
	return out.String(), 0, err
}
