// SPDX-License-Identifier: Apache-2.0

package component

import _ "embed"

// Sockets of the container runtimes, in the node's mount namespace.
const (
	containerdSocket = "/run/containerd/containerd.sock"
	crioSocket       = "/run/crio/crio.sock"
)

// Files of the container runtimes of a node.
const (
	containerdConfig = "/etc/containerd/config.toml"
	crioConfig       = "/etc/crio/crio.conf"
	// All programs that share CRI-O's storage read storageConfig and signaturePolicy
	// (containers-storage.conf(5) and containers-policy.json(5)).
	storageConfig   = "/etc/containers/storage.conf"
	signaturePolicy = "/etc/containers/policy.json"
)

// Programs of CRI-O's runtime; see [Node.CRIO].
const (
	crioProgram = Runtime + "/usr/bin/crio"
	skopeo      = Runtime + "/usr/bin/skopeo"
)

var (
	//go:embed templates/containerd.toml
	containerdTemplate string
	//go:embed templates/crio.conf
	crioTemplate string
	//go:embed templates/storage.conf
	storageTemplate string
	//go:embed templates/policy.json
	policyTemplate string
)

// ContainerRuntime returns the command of the container runtime.
func (n Node) ContainerRuntime() Command {
	if n.CRIO {
		return Command{
			Name: "crio", Path: crioProgram,
			Args: []string{"--config=" + crioConfig, "--config-dir="},
		}
	}
	return Command{Name: "containerd", Path: Runtime + "/usr/bin/containerd",
		Args: []string{"--config=" + containerdConfig}}
}

// RuntimeSocket returns the socket of the container runtime.
func (n Node) RuntimeSocket() string {
	if n.CRIO {
		return crioSocket
	}
	return containerdSocket
}

// LoadImage returns a command that imports the archive of an image with this name, so that the
// kubelet finds it.
func (n Node) LoadImage(archive, name string) Command {
	if n.CRIO {
		return Command{
			Name: "skopeo copy", Path: skopeo,
			Args: []string{"--policy=" + signaturePolicy, "copy", "oci-archive:" + archive,
				"containers-storage:" + name},
		}
	}
	// This is the namespace of the kubelet's containers and images.
	return Command{Name: "ctr images import", Path: Runtime + "/usr/bin/ctr",
		Args: []string{"--namespace=k8s.io", "images", "import", archive}}
}

// runtimeTemplates returns the templates of the container runtime's files.
func (n Node) runtimeTemplates() map[string]string {
	if n.CRIO {
		return map[string]string{
			crioConfig: crioTemplate, storageConfig: storageTemplate,
			signaturePolicy: policyTemplate,
		}
	}
	return map[string]string{containerdConfig: containerdTemplate}
}
