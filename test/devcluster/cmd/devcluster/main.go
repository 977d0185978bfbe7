// SPDX-License-Identifier: Apache-2.0

// Command devcluster runs a real Kubernetes cluster on one machine: etcd, the control plane, and
// nodes with kubelet, container runtime and runc, each node in separate namespaces. It does not
// change the machine's network, mounts or services.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/test/devcluster"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/artifact"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	err := rootCommand().ExecuteContext(ctx)
	var ended exitError
	if errors.As(err, &ended) {
		os.Exit(int(ended))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "devcluster:", err)
		os.Exit(1)
	}
}

// exitError is the exit code of a command run for the user, which has printed its own error.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// options are the flags common to all commands.
type options struct {
	cache string
	state string
	name  string

	kubernetes string // version
	runtime    string // "" for containerd 1.7
	multus     string // version
}

func rootCommand() *cobra.Command {
	o := &options{}
	root := &cobra.Command{
		Use:   "devcluster",
		Short: "A real Kubernetes cluster on this machine in one command",
		Example: `  devcluster up --nodes 2
  export KUBECONFIG=$(devcluster kubeconfig)
  kubectl get nodes
  devcluster load app.tar
  devcluster exec node1 -- ip address
  devcluster logs -f node1/kubelet
  devcluster down`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}

	root.PersistentFlags().StringVar(&o.cache, "cache", defaultCache(),
		"directory of built binaries and images")
	root.PersistentFlags().StringVar(&o.state, "state", state.DefaultRoot,
		"directory of the state of running clusters")

	root.AddCommand(
		buildCommand(o), imageCommand(),
		upCommand(o), downCommand(o),
		inspectCommand(o), kubeconfigCommand(o), kubectlCommand(o), logsCommand(o),
		loadCommand(o), execCommand(o), nodeCommand(o),
		runClusterCommand(), runNodeCommand(),
	)

	return root
}

func defaultCache() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		// Without HOME, as in services and containers, use /var/cache.
		dir = "/var/cache"
	}
	return filepath.Join(dir, "xpu-device-plugin", "devcluster")
}

// versionFlags adds the flags that choose the versions of a cluster's components.
func (o *options) versionFlags(cmd *cobra.Command) *cobra.Command {
	cache := artifact.Cache{Sources: devcluster.Sources}
	cmd.Flags().StringVar(&o.kubernetes, "kubernetes", "", "another Kubernetes: "+
		strings.Join(cache.KubernetesVersions(), ", ")+", or a patch release of these or of "+
		"go.mod's, such as 1.34.0")
	cmd.Flags().StringVar(&o.multus, "multus-version",
		"", "an older Multus: "+strings.Join(cache.MultusVersions(), ", "))
	cmd.Flags().StringVar(&o.runtime, "runtime", "",
		"containerd-2 or cri-o, in place of Debian's containerd 1.7")
	return cmd
}

// nameFlag adds the flag that chooses a cluster.
func (o *options) nameFlag(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVar(&o.name, "name", "main", "cluster")
	return cmd
}

func (o *options) artifacts() (artifact.Cache, error) {
	cache, err := filepath.Abs(o.cache)
	if err != nil {
		return artifact.Cache{}, err
	}
	return artifact.Cache{
		Dir: cache, Sources: devcluster.Sources, Log: os.Stderr, Kubernetes: o.kubernetes,
		Runtime: o.runtime, Multus: o.multus,
	}, nil
}

func (o *options) store() (state.Store, error) {
	root, err := filepath.Abs(o.state)
	if err != nil {
		return state.Store{}, err
	}
	return state.Store{Root: root}, nil
}

func (o *options) manager() (lifecycle.Manager, error) {
	store, err := o.store()
	if err != nil {
		return lifecycle.Manager{}, err
	}
	return lifecycle.Manager{Store: store, Log: os.Stderr}, nil
}

// running returns the directory and the record of the cluster, or an error if it is not running.
func (o *options) running() (state.Dir, state.Record, error) {
	store, err := o.store()
	if err != nil {
		return "", state.Record{}, err
	}

	dir, record, err := store.Load(o.name)
	if err != nil {
		return "", state.Record{}, err
	}
	if !record.Leader.Alive() {
		return "", state.Record{}, fmt.Errorf("cluster %s: has ended: see devcluster logs "+
			"supervisor, then run devcluster down", o.name)
	}

	return dir, record, nil
}
