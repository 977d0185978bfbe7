package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

// installCommand copies the CNI plugin to where the container runtime looks for it. The image has no shell to do that.
func installCommand() *cobra.Command {
	var from, to string
	cmd := &cobra.Command{
		Use:   "install-cni",
		Short: "Copy the CNI plugin xpu-cni to a directory of the host",
		Example: `  # in an init container that has the host's /opt/cni/bin mounted
  xpu-agent install-cni --to=/host/opt/cni/bin`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := install(from, to); err != nil {
				return fmt.Errorf("install %s in %s: %w", from, to, err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "from", "/xpu-cni", "the plugin's binary")
	cmd.Flags().StringVar(&to, "to", "/opt/cni/bin", "directory in which the container runtime looks for CNI plugins")
	return cmd
}

// install replaces a binary atomically.
func install(from, dir string) error {
	binary, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	// The runtime does not take a name with a dot for a plugin.
	target, err := os.CreateTemp(dir, ".xpu-cni-*")
	if err != nil {
		return err
	}
	defer os.Remove(target.Name()) // in vain once it is renamed
	_, err = target.Write(binary)
	if err = errors.Join(err, target.Chmod(0o755), target.Sync(), target.Close()); err != nil {
		return err
	}
	return os.Rename(target.Name(), filepath.Join(dir, filepath.Base(from)))
}
