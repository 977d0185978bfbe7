// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
)

// Devcluster is a development cluster, controlled by its command-line program (test/devcluster).
type Devcluster struct {
	// Program is the path of the devcluster binary.
	Program string
	// Name is the name of the cluster.
	Name string
	// Kubernetes, Runtime and Multus override the project's versions, such as "1.34",
	// "containerd-2" or "cri-o", and "4.2"; see "devcluster up --help".
	Kubernetes, Runtime, Multus string
}

// Cluster is the output of "devcluster inspect".
type Cluster struct {
	Kubeconfig string `json:"kubeconfig"`
	NetNS      string `json:"netns"`
	Bridge     string `json:"bridge"`
	Logs       string `json:"logs"`
	Nodes      []Node `json:"nodes"`
}

// Node is a node of the cluster.
type Node struct {
	Name  string `json:"name"`
	IP    string `json:"ip"`
	NetNS string `json:"netns"`
	Root  string `json:"root"`
}

// Run runs devcluster and returns its output. The error includes its standard error.
func (d Devcluster) Run(ctx context.Context, command string, args ...string) (string, error) {
	words := append(strings.Fields(command), "--name", d.Name)
	cmd := exec.CommandContext(ctx, d.Program, append(words, args...)...)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("devcluster %s: %w: %s", command,
			err, strings.TrimSpace(problems.String()+out.String()))
	}
	return out.String(), nil
}

// Inspect returns the components of the cluster.
func (d Devcluster) Inspect(ctx context.Context) (Cluster, error) {
	out, err := d.Run(ctx, "inspect")
	if err != nil {
		return Cluster{}, err
	}

	var cluster Cluster
	if err := json.Unmarshal([]byte(out), &cluster); err != nil {
		return Cluster{}, fmt.Errorf("devcluster inspect: %w", err)
	}
	return cluster, nil
}

// Kubectl runs kubectl in the cluster.
func (d Devcluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return d.Run(ctx, "kubectl", append([]string{"--"}, args...)...)
}
