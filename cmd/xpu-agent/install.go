// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/cni"
)

// installCommand returns the command that copies the CNI plugin to the directory in which the
// container runtime looks for it. The image has no shell to do this.
func installCommand() *cobra.Command {
	var from, to string
	paths := cni.DefaultPaths()
	cmd := &cobra.Command{
		Use:   "install-cni",
		Short: "Copy the CNI plugin xpu-cni to a directory of the host",
		Example: `  # in an init container that has the host's /opt/cni/bin mounted
  xpu-agent install-cni --to=/host/opt/cni/bin`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			err := installPaths(paths, cni.PathsFile(filepath.Join(to, filepath.Base(from))))
			if err == nil {
				err = install(from, to)
			}
			if err != nil {
				return fmt.Errorf("install %s in %s: %w", from, to, err)
			}
			return nil
		},
	}

	cmd.Flags().StringVar(&from, "from", "/xpu-cni", "the plugin's binary")
	cmd.Flags().StringVar(&to, "to", "/opt/cni/bin",
		"directory in which the container runtime looks for CNI plugins")
	cmd.Flags().StringVar(&paths.Socket, "cni-socket", paths.Socket,
		"--cni-socket of the agent; another one than the default is written to xpu-cni.json "+
			"beside the plugin")
	cmd.Flags().StringVar(&paths.SpoolDir, "spool-dir", paths.SpoolDir,
		"--spool-dir of the agent; another one than the default is written to xpu-cni.json "+
			"beside the plugin")

	return cmd
}

// installPaths writes the file in which the plugin finds the agent's paths, or removes it for an
// agent with the default paths.
func installPaths(paths cni.Paths, file string) error {
	for flag, path := range map[string]string{
		"--cni-socket": paths.Socket, "--spool-dir": paths.SpoolDir,
	} {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("%s: %q must be an absolute path", flag, path)
		}
	}

	if paths == cni.DefaultPaths() {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}

	text, err := json.Marshal(paths)
	if err != nil {
		return err
	}

	return replace(file, text, 0o644)
}

// install replaces a binary atomically.
func install(from, dir string) error {
	binary, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return replace(filepath.Join(dir, filepath.Base(from)), binary, 0o755)
}

// replace writes a file atomically.
func replace(path string, content []byte, mode fs.FileMode) error {
	// The runtime does not use files with a leading dot as plugins.
	target, err := os.CreateTemp(filepath.Dir(path), ".xpu-cni-*")
	if err != nil {
		return err
	}
	defer os.Remove(target.Name()) // fails once the file is renamed

	_, err = target.Write(content)
	if err = errors.Join(err, target.Chmod(mode), target.Sync(), target.Close()); err != nil {
		return err
	}

	return os.Rename(target.Name(), path)
}
