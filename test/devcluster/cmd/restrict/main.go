// SPDX-License-Identifier: Apache-2.0

// Command restrict is an OCI runtime: it calls runc, which must be in PATH, after it has raised the
// OOM score adjustment of the container to its own. A machine may lack CAP_SYS_RESOURCE, and
// without it no process can lower its own (proc_pid_oom_score_adj(5)). containerd does the same by
// restrict_oom_score_adj; CRI-O cannot.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "restrict:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if i := slices.Index(args, "--bundle"); i >= 0 && i+1 < len(args) {
		own, err := os.ReadFile("/proc/self/oom_score_adj")
		if err != nil {
			return err
		}

		least, err := strconv.Atoi(strings.TrimSpace(string(own)))
		if err != nil {
			return err
		}
		if err := raise(filepath.Join(args[i+1], "config.json"), least); err != nil {
			return err
		}
	}

	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}

	return syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ())
}

// raise writes the container's configuration anew (OCI runtime specification, process.oomScoreAdj)
// if it has less.
func raise(file string, least int) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}

	var config map[string]any
	decoder := json.NewDecoder(strings.NewReader(string(content)))
	decoder.UseNumber() // and not floats, which lose digits
	if err := decoder.Decode(&config); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}

	process, ok := config["process"].(map[string]any)
	if !ok {
		return errors.New(file + ": no process")
	}

	adjust, ok := process["oomScoreAdj"].(json.Number)
	if !ok {
		return nil
	}
	if is, err := adjust.Int64(); err != nil || is >= int64(least) {
		return err
	}

	process["oomScoreAdj"] = least
	if content, err = json.Marshal(config); err != nil {
		return err
	}

	return os.WriteFile(file, content, 0o600)
}
