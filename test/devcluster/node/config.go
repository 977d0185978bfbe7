// SPDX-License-Identifier: Apache-2.0

// Package node is a node of a development cluster: PID 1 of separate PID, mount, network, UTS and
// IPC namespaces, which creates the node's file systems and runs a container runtime and the
// kubelet.
package node

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/component"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

// Own is the path at which a node sees its own directory of the cluster's state.
const Own = state.NodeDir("/run/devcluster/node")

// Images is the directory of images to load at the first start, as seen by the cluster and its
// nodes.
const Images = "/run/devcluster/images"

// EventsFD is the file descriptor to which a node's PID 1 writes the events of its start.
const EventsFD = 3

// Path returns the PATH on a node. The node's own programs precede the machine's.
func Path() string { return component.Path + ":" + os.Getenv("PATH") }

// Config has the parameters of one run of a node.
type Config struct {
	component.Node
	MachineID string // 32 hexadecimal digits, the same in every run
	BootID    string // a UUID, new in every run
}

// WriteConfig writes the configuration to the node's directory.
func WriteConfig(dir state.NodeDir, c Config) error {
	content, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(dir.Config(), content, 0o600)
}

func readConfig(dir state.NodeDir) (Config, error) {
	var c Config
	content, err := os.ReadFile(dir.Config())
	if err != nil {
		return c, err
	}
	if err := json.Unmarshal(content, &c); err != nil {
		return c, fmt.Errorf("%s: %w", dir.Config(), err)
	}
	return c, nil
}
