// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/cluster"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/namespace"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/node"
)

func inspectCommand(o *options) *cobra.Command {
	return o.nameFlag(&cobra.Command{
		Use:   "inspect",
		Short: "Print what a cluster is made of, as JSON",
		Example: `  devcluster inspect | jq -r '.nodes[].netns'
  nsenter --net=$(devcluster inspect | jq -r .netns) ip link`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := o.inspect(cmd.Context())
			if err != nil {
				return err
			}
			encoder := json.NewEncoder(os.Stdout)
			encoder.SetIndent("", "  ")
			return encoder.Encode(c)
		},
	})
}

// inspect asks the supervisor, and adds what is known only in the machine's PID namespace.
func (o *options) inspect(ctx context.Context) (control.Cluster, error) {
	dir, _, err := o.running()
	if err != nil {
		return control.Cluster{}, err
	}

	var c control.Cluster
	if err := control.NewClient(dir.Socket()).Get(ctx, cluster.PathCluster, &c); err != nil {
		return c, fmt.Errorf("cluster %s: %w", o.name, err)
	}

	for i := range c.Nodes {
		n := &c.Nodes[i]
		if n.State != control.NodeRunning {
			continue
		}
		if n.PID, err = control.ServerPID(ctx, dir.Node(n.Name).Socket()); err != nil {
			return c, fmt.Errorf("cluster %s: %s: %w", o.name, n.Name, err)
		}

		n.NetNS = fmt.Sprintf("/proc/%d/ns/net", n.PID)
		n.Root = fmt.Sprintf("/proc/%d/root", n.PID)
	}

	return c, nil
}

func kubeconfigCommand(o *options) *cobra.Command {
	return o.nameFlag(&cobra.Command{
		Use:     "kubeconfig",
		Short:   "Print the path of the administrator's kubeconfig",
		Example: `  export KUBECONFIG=$(devcluster kubeconfig)`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			dir, _, err := o.running()
			if err != nil {
				return err
			}
			fmt.Println(dir.Kubeconfig())
			return nil
		},
	})
}

func kubectlCommand(o *options) *cobra.Command {
	cmd := o.nameFlag(&cobra.Command{
		Use:     "kubectl -- ARGUMENT...",
		Short:   "Run the cluster's own kubectl as administrator",
		Example: `  devcluster kubectl -- get pods --all-namespaces`,
		RunE: func(_ *cobra.Command, args []string) error {
			dir, record, err := o.running()
			if err != nil {
				return err
			}
			environment := append(os.Environ(), "KUBECONFIG="+dir.Kubeconfig())
			err = syscall.Exec(filepath.Join(record.Kubernetes, "kubectl"),
				append([]string{"kubectl"}, args...), environment)
			return fmt.Errorf("kubectl: %w", err)
		},
	})

	// Flags after the first argument belong to kubectl.
	cmd.Flags().SetInterspersed(false)
	return cmd
}

func loadCommand(o *options) *cobra.Command {
	return o.nameFlag(&cobra.Command{
		Use:   "load IMAGE.tar...",
		Short: "Load image archives into every node",
		Long: `Load imports archives of the OCI or the docker save format. Pods use them with imagePullPolicy: Never.
Nodes with CRI-O take archives that devcluster image made, and no others.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, _, err := o.running()
			if err != nil {
				return err
			}

			client := control.NewClient(dir.Socket())
			for _, file := range args {
				if err := load(cmd.Context(), client, file); err != nil {
					return fmt.Errorf("load %s: %w", file, err)
				}
			}

			return nil
		},
	})
}

func load(ctx context.Context, client *control.Client, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	return client.Post(ctx, cluster.PathImages, f, nil)
}

func execCommand(o *options) *cobra.Command {
	return o.nameFlag(&cobra.Command{
		Use:   "exec NODE -- COMMAND [ARGUMENT...]",
		Short: "Run a command in the namespaces of a node",
		Example: `  devcluster exec node1 -- ip route
  devcluster exec node1 -- ctr --namespace k8s.io containers list # where containerd runs`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := o.inspect(cmd.Context())
			if err != nil {
				return err
			}

			for _, n := range c.Nodes {
				if n.Name != args[0] {
					continue
				}
				if n.State != control.NodeRunning {
					return fmt.Errorf("%s is %s: start it with devcluster node start %s", n.Name,
						n.State, n.Name)
				}
				return execute(n.PID, args[1:])
			}

			return fmt.Errorf("no node %q: cluster %s has node1 to node%d", args[0], o.name,
				len(c.Nodes))
		},
	})
}

// execute runs a command in the namespaces of process pid, in the same directory if it exists
// there.
func execute(pid int, args []string) error {
	// The terminal sends signals to the command itself. This program ends with the command.
	signal.Ignore(os.Interrupt, syscall.SIGQUIT)
	here, err := os.Getwd()
	if err != nil {
		here = "/"
	}

	environment := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "KUBECONFIG=")
	})
	cmd, err := namespace.Start(pid, args, environment, node.Path(), func(cmd *exec.Cmd) {
		cmd.Dir = here
		if info, err := os.Stat(here); err != nil || !info.IsDir() {
			cmd.Dir = "/"
		}
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	})

	if err != nil {
		return err
	}

	err = cmd.Wait()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		if status := ended.Sys().(syscall.WaitStatus); status.Signaled() {
			// like a shell
			return exitError(128 + int(status.Signal()))
		}
		return exitError(ended.ExitCode())
	}

	return err
}

func nodeCommand(o *options) *cobra.Command {
	parent := &cobra.Command{
		Use:   "node",
		Short: "Stop, start, cut off and join nodes, and restart their programs",
		Example: `  devcluster node stop node2
  devcluster node start node2`,
	}

	for action, short := range map[string]string{
		cluster.NodeStop:           "Cut a node's power: all its processes are killed, its disk stays",
		cluster.NodeStart:          "Start a stopped node and wait until it is Ready",
		cluster.NodeCut:            "Pull a node's network cable",
		cluster.NodeJoin:           "Plug a node's network cable in again",
		cluster.NodeRestartKubelet: "Restart a node's kubelet; containers keep running",
		cluster.NodeRestartRuntime: "Restart a node's container runtime; containers keep running",
	} {
		parent.AddCommand(o.nameFlag(&cobra.Command{
			Use:   action + " NODE",
			Short: short,
			Args:  cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				dir, _, err := o.running()
				if err != nil {
					return err
				}
				return control.NewClient(dir.Socket()).Post(cmd.Context(),
					cluster.PathNode(args[0], action), nil, nil)
			},
		}))
	}

	return parent
}
