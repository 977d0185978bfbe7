package component

import _ "embed"

// Sockets of the container runtimes, in the node's mount namespace.
const (
	ContainerdSocket = "/run/containerd/containerd.sock"
	CRIOSocket       = "/run/crio/crio.sock"
)

// Files of the container runtimes of a node.
const (
	ContainerdConfig = "/etc/containerd/config.toml"
	CRIOConfig       = "/etc/crio/crio.conf"
	// StorageConfig and SignaturePolicy are read by everything that shares CRI-O's storage (containers-storage.conf(5) and
	// containers-policy.json(5)).
	StorageConfig   = "/etc/containers/storage.conf"
	SignaturePolicy = "/etc/containers/policy.json"
)

// Programs of CRI-O's runtime; see [Node.CRIO].
const (
	CRIO   = Runtime + "/usr/bin/crio"
	skopeo = Runtime + "/usr/bin/skopeo"
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

// ContainerRuntime runs containers.
func (n Node) ContainerRuntime() Command {
	if n.CRIO {
		return Command{Name: "crio", Path: CRIO, Args: []string{"--config=" + CRIOConfig, "--config-dir="}}
	}
	return Command{Name: "containerd", Path: Runtime + "/usr/bin/containerd", Args: []string{"--config=" + ContainerdConfig}}
}

// RuntimeSocket is where the container runtime listens.
func (n Node) RuntimeSocket() string {
	if n.CRIO {
		return CRIOSocket
	}
	return ContainerdSocket
}

// LoadImage imports the archive of an image of this name, so that the kubelet finds it.
func (n Node) LoadImage(archive, name string) Command {
	if n.CRIO {
		return Command{Name: "skopeo copy", Path: skopeo, Args: []string{"--policy=" + SignaturePolicy, "copy", "oci-archive:" + archive, "containers-storage:" + name}}
	}
	// The namespace is the one that the kubelet's containers and images are in.
	return Command{Name: "ctr images import", Path: Runtime + "/usr/bin/ctr", Args: []string{"--namespace=k8s.io", "images", "import", archive}}
}

// runtimeTemplates are those of the container runtime's files.
func (n Node) runtimeTemplates() map[string]string {
	if n.CRIO {
		return map[string]string{CRIOConfig: crioTemplate, StorageConfig: storageTemplate, SignaturePolicy: policyTemplate}
	}
	return map[string]string{ContainerdConfig: containerdTemplate}
}
