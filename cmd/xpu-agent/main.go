// SPDX-License-Identifier: Apache-2.0

// Command xpu-agent offers a node's network functions to Kubernetes and attaches them to pods.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/tools/clientcmd"
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

// options are the flags.
type options struct {
	agent.Config
	kubeconfig string
	qps        float32
	burst      int
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

			// The Kubernetes libraries use these loggers.
			klog.SetLogger(log.WithName("kubernetes"))
			ctrllog.SetLogger(log.WithName("cache"))
			if err := o.complete(cmd.Flags().Changed("config-file")); err != nil {
				return err
			}

			log.Info("Starting", "version", version.String(), "node", o.NodeName, "provisioner",
				o.Provisioner)
			return agent.Run(cmd.Context(), o.Config, monitoring.NewRegistry("xpu-agent"), log)
		},
	}

	o.addFlags(cmd.Flags())
	logs.AddFlags(cmd.Flags())
	cmd.AddCommand(installCommand(), stateCommand(), readyCommand(), releaseCommand(),
		probeCommand())

	return cmd
}

func (o *options) addFlags(flags *pflag.FlagSet) {
	o.Config.AddFlags(flags)
	flags.StringVar(&o.kubeconfig, "kubeconfig", "",
		"file that says how to reach the API server; empty: the pod's service account")
	flags.Float32Var(&o.qps, "kube-api-qps",
		100, "requests per second to the API server, on average")
	flags.IntVar(&o.burst, "kube-api-burst", 200, "requests to the API server at once")
	ignoreFlags(flags)
}

// ignoreFlags adds flags that DaemonSets of sriov-network-device-plugin have, and that this program
// ignores.
func ignoreFlags(flags *pflag.FlagSet) {
	for _, name := range []string{"log-dir", "log-level", "stderrthreshold", "vmodule"} {
		flags.String(name, "", "")
		_ = flags.MarkHidden(name)
	}
	for _, name := range []string{"logtostderr", "alsologtostderr"} {
		flags.Bool(name, false, "")
		_ = flags.MarkHidden(name)
	}
}

// complete checks the flags and sets values that depend on them. configFileGiven says that
// --config-file was set, so that the file must exist.
func (o *options) complete(configFileGiven bool) (err error) {
	if o.ProvisionTimeout <= 0 {
		return fmt.Errorf("--provision-timeout: %s must be more than 0", o.ProvisionTimeout)
	}
	if o.HookTimeout <= 0 {
		return fmt.Errorf("--hook-timeout: %s must be more than 0", o.HookTimeout)
	}
	if o.HookAttempts < 1 {
		return fmt.Errorf("--hook-attempts: %d must be 1 or more", o.HookAttempts)
	}

	if _, err := os.Stat(o.ConfigFile); errors.Is(err, fs.ErrNotExist) && !configFileGiven {
		o.ConfigFile = ""
	}

	switch o.Provisioner {
	case agent.ProvisionerCRD:
		return o.completeCRD()
	case agent.ProvisionerDirect:
		if o.MetricsSecure {
			return errors.New("--metrics-secure: the API server says who may read metrics, and " +
				"with --provisioner=direct there is none")
		}

		if o.NodeName == "" {
			if o.NodeName, err = os.Hostname(); err != nil {
				return fmt.Errorf("--node-name: %w", err)
			}
		}

		return nil
	}

	return fmt.Errorf("--provisioner: %q must be %s or %s", o.Provisioner, agent.ProvisionerCRD,
		agent.ProvisionerDirect)
}

func (o *options) completeCRD() error {
	if o.NodeName == "" {
		return errors.New("--node-name: must be the name of this node's Node object (or set " +
			"NODE_NAME)")
	}
	if o.DirectConfig != "" {
		return errors.New("--direct-config: is only for --provisioner=direct; XPUs and " +
			"XPUNetworks say the same at the API server")
	}

	config, err := clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}

	config.QPS, config.Burst = o.qps, o.burst
	config.UserAgent = "xpu-agent/" + version.String()
	o.Kubernetes = config

	return nil
}
