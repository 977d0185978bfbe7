// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// stopTimeout is how long a program may take to end after SIGTERM.
const stopTimeout = 5 * time.Second

// process runs a program until ctx ends, and writes its output to a file. A program that ends
// earlier is an error. The program ends with this process, even if this process is killed.
func process(ctx context.Context, program, log string, args []string) error {
	file, err := os.Create(log)
	if err != nil {
		return err
	}
	defer file.Close()

	// The kernel ends the program with the thread that started it (prctl(2), PR_SET_PDEATHSIG).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	command := exec.CommandContext(ctx, program, args...)
	command.Stdout, command.Stderr = file, file
	command.SysProcAttr = diesWithParent()
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGTERM) }
	command.WaitDelay = stopTimeout
	err = command.Run()
	if ctx.Err() != nil {
		return nil
	}

	return fmt.Errorf("%s ended: %w; it printed last:\n%s", filepath.Base(program), err, tail(log))
}

// tail returns the last part of a file.
func tail(path string) string {
	const most = 2000
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(content[max(0, len(content)-most):])
}

func get(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}

	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()

	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, response.Status)
	}

	return nil
}
