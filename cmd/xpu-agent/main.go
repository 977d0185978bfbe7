// Command xpu-agent offers a node's network functions to Kubernetes and attaches them to pods.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/opiproject/xpu-device-plugin/pkg/logging"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/node/agent"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "xpu-agent:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var o options
	var logs logging.Options

	cmd := &cobra.Command{
		Use:   "xpu-agent",
		Short: "Offer a node's network functions to Kubernetes and attach them to pods",
		Long: `xpu-agent discovers the VFs and SFs of a node, publishes those that DevicePools select, in
ResourceSlices (DRA) or as extended resources (device plugin), has the xPU serve the port of
each one that is handed out, moves it into the pod, and takes it back when the pod ends.

It needs CAP_NET_ADMIN and CAP_SYS_ADMIN in the host's network namespace, and is meant to run
as a DaemonSet; see deploy/.`,
		Example: `  # in a DaemonSet, with the host's /sys mounted at /host/sys
  xpu-agent --node-name=$(NODE_NAME) --sys-root=/host/sys

  # without an API server: pools of a configuration of sriov-network-device-plugin, which
  # xPUs there are from another file
  xpu-agent --provisioner=direct --config-file=/etc/pcidp/config.json \
    --direct-config=/etc/xpu-agent/direct.yaml

  # by hand, on a node
  xpu-agent --node-name=$(hostname) --kubeconfig=/etc/kubernetes/admin.conf -v=1`,
		Version:       version.String(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.Logger(os.Stderr)
			if err != nil {
				return err
			}
			// The Kubernetes libraries log through these.
			klog.SetLogger(log.WithName("kubernetes"))
			ctrllog.SetLogger(log.WithName("cache"))
			if err := o.complete(cmd.Flags().Changed("config-file")); err != nil {
				return err
			}
			log.Info("Starting", "version", version.String(), "node", o.NodeName, "provisioner", o.Provisioner)
			return agent.Run(cmd.Context(), o.Config, monitoring.NewRegistry("xpu-agent"), log)
		},
	}
	o.addFlags(cmd.Flags())
	logs.AddFlags(cmd.Flags())
	cmd.AddCommand(installCommand())
	return cmd
}
