// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/probe"
)

// probeCommand returns the command that runs in the pods of "xpuctl test". It is in this program
// because the nodes under test have the image already. It is hidden because people have no use for
// it.
func probeCommand() *cobra.Command {
	var o probe.Options
	cmd := &cobra.Command{
		Use:    "probe",
		Short:  "Send packets to other pods of xpuctl test, and answer theirs",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Reports = cmd.OutOrStdout()
			return probe.Run(cmd.Context(), o)
		},
	}

	f := cmd.Flags()
	f.StringVar(&o.Run, "run", "", "identity of the test")
	f.StringVar(&o.Self.Pod, "pod", "", "name of this pod")
	f.StringVar(&o.Self.Network, "network", "", "XPUNetwork of this pod")
	f.StringVar(&o.Interface, "interface", "", "name of the interface under test")
	f.StringVar(&o.Orders, "orders", "", "directory of the file with orders")

	return cmd
}
