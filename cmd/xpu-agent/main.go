// Command xpu-agent offers a node's network functions to Kubernetes and attaches them to pods.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/opiproject/xpu-device-plugin/pkg/agent"
	"github.com/opiproject/xpu-device-plugin/pkg/logging"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
	"github.com/opiproject/xpu-device-plugin/pkg/version/buildinfo"
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
	var config agent.Config
	var kubeconfig string
	var qps float32
	var burst int
	var logs logging.Options

	cmd := &cobra.Command{
		Use:   "xpu-agent",
		Short: "Offer a node's network functions to Kubernetes and attach them to pods",
		Long: `xpu-agent discovers the VFs and SFs of a node, publishes those that DevicePools select in
ResourceSlices, waits until the xPU serves the port of each one that is claimed, moves it into
the pod, and takes it back when the pod ends.

It needs CAP_NET_ADMIN and CAP_SYS_ADMIN in the host's network namespace, and is meant to run
as a DaemonSet; see deploy/.`,
		Example: `  # in a DaemonSet, with the host's /sys mounted at /host/sys
  xpu-agent --node-name=$(NODE_NAME) --sys-root=/host/sys

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
			if config.NodeName == "" {
				return errors.New("--node-name: must be the name of this node's Node object (or set NODE_NAME)")
			}
			if config.ProvisionTimeout <= 0 {
				return fmt.Errorf("--provision-timeout: %s must be more than 0", config.ProvisionTimeout)
			}
			if config.Kubernetes, err = kubernetesConfig(kubeconfig, qps, burst); err != nil {
				return err
			}
			registry := prometheus.NewRegistry()
			registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), buildinfo.NewCollector("xpu-agent"))
			log.Info("Starting", "version", version.String(), "node", config.NodeName)
			return agent.Run(cmd.Context(), config, registry, log)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&config.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of this node's Node object (environment: NODE_NAME)")
	flags.StringVar(&kubeconfig, "kubeconfig", "", "file that says how to reach the API server; empty: the pod's service account")
	flags.Float32Var(&qps, "kube-api-qps", 100, "requests per second to the API server, on average")
	flags.IntVar(&burst, "kube-api-burst", 200, "requests to the API server at once")
	flags.StringVar(&config.SysRoot, "sys-root", "/sys", "where the host's sysfs is")
	flags.StringVar(&config.ProcRoot, "proc-root", "/proc", "where procfs is")
	flags.StringVar(&config.StateDir, "state-dir", "/var/lib/xpu-agent", "directory of the journal; must survive the agent")
	flags.StringVar(&config.KubeletDir, "kubelet-dir", "/var/lib/kubelet", "the kubelet's directory, under the same path as on the host")
	flags.StringVar(&config.CDIDir, "cdi-dir", "/var/run/cdi", "directory in which the container runtime looks for CDI files")
	flags.StringVar(&config.NRISocket, "nri-socket", "/var/run/nri/nri.sock", "the container runtime's NRI socket")
	flags.StringVar(&config.ListenAddress, "listen", ":9810", "address that serves /healthz, /readyz and /metrics")
	flags.DurationVar(&config.ProvisionTimeout, "provision-timeout", 40*time.Second, "how long one Prepare waits for the xPU; a kubelet gives up after 45s and asks again only with its next sync of the pod, a minute later or more")
	logs.AddFlags(flags)
	return cmd
}

func kubernetesConfig(kubeconfig string, qps float32, burst int) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.QPS, config.Burst = qps, burst
	config.UserAgent = "xpu-agent/" + version.String()
	return config, nil
}
