// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIRECTORY",
		Short: "Write man pages of all commands into a directory",
		Example: `  # For this user:
  mkdir -p ~/.local/share/man/man1
  xpuctl man ~/.local/share/man/man1
  man xpuctl-schedule`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return doc.GenManTree(c.Root(), &doc.GenManHeader{
				Title: "XPUCTL", Section: "1", Source: "xpuctl " + version.String(),
			}, args[0])
		},
	}
}
