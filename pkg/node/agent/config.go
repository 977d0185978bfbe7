package agent

import (
	"time"

	"k8s.io/client-go/rest"
)

// ProvisionerKind says who has the xPU serve Functions.
type ProvisionerKind string

const (
	// ProvisionerCRD: xpu-controller, which is told by XPUPorts at the API server.
	ProvisionerCRD ProvisionerKind = "crd"
	// ProvisionerDirect: the agent itself. There is no API server, and so no DRA.
	ProvisionerDirect ProvisionerKind = "direct"
)

// Config is what an agent must be told.
type Config struct {
	// NodeName is the name of the node's Node object. PodName is the name of the agent's own pod in Namespace, "" where it
	// runs in none.
	NodeName, PodName string
	// SysRoot is where the host's sysfs is, "/sys"; ProcRoot where procfs is, "/proc"; and DevRoot where the host's device
	// nodes can be looked for, "/dev".
	SysRoot, ProcRoot, DevRoot string
	// StateDir keeps the journal; it must survive the agent.
	StateDir string
	// KubeletDir is the directory of the kubelet, "/var/lib/kubelet". It must have the same path as on the host.
	KubeletDir string
	// CDIDir is where the container runtime reads CDI files, "/var/run/cdi", and NRISocket where it serves NRI.
	CDIDir, NRISocket string
	// ListenAddress is where health and metrics are served, "host:port".
	ListenAddress string

	// CNISocket is where the CNI plugin finds the agent, and SpoolDir where it leaves what the agent was not there for.
	CNISocket, SpoolDir string
	// CNIAllowKeys are keys that network configurations may have although they mean nothing to the agent.
	CNIAllowKeys []string
	// DeviceInfoDir is where Multus looks for device-info files, "/var/run/k8s.cni.cncf.io/devinfo".
	DeviceInfoDir string
	// UseCDI gives containers of extended resources their device nodes by CDI.
	UseCDI bool

	// HooksDir has the administrator's post-delete hooks; it need not exist. Each run of one may take HookTimeout, and is
	// tried HookAttempts times.
	HooksDir     string
	HookTimeout  time.Duration
	HookAttempts int

	// ConfigFile declares DevicePools, beside those at the API server; "" for none. It may be a configuration of
	// sriov-network-device-plugin, whose resources have ResourcePrefix where they name none.
	ConfigFile, ResourcePrefix string

	// Provisioner says who has the xPU serve Functions.
	Provisioner ProvisionerKind
	// ProvisionTimeout is how long one Prepare waits for the xPU.
	ProvisionTimeout time.Duration
	// DirectConfig is the file that says which OPI agents there are, for ProvisionerDirect; "" for none.
	DirectConfig string
	// Namespace is the agent's own, where it makes XPUPorts, and Kubernetes how the API server is reached, for
	// ProvisionerCRD.
	Namespace  string
	Kubernetes *rest.Config

	times times
}

// times shortens what tests would wait for. Zero is the usual time: a constant of this package or of the package that is
// told.
type times struct {
	sweep, abandoned, conflict, allocate, add time.Duration
}
