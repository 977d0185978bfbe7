// Command xpuctl is for people who run xpu-device-plugin.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

func main() {
	if err := command().Execute(); err != nil {
		os.Exit(1)
	}
}

func command() *cobra.Command {
	c := &cobra.Command{
		Use:          "xpuctl",
		Short:        "Help people who run xpu-device-plugin",
		Version:      version.String(),
		SilenceUsage: true,
	}
	c.AddCommand(convertCommand(), &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		Run:   func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), version.String()) },
	})
	return c
}
