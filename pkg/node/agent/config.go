// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/sriovdp"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// ProvisionerKind says which program provisions the xPU.
type ProvisionerKind string

const (
	// ProvisionerCRD: xpu-controller provisions the xPU. The agent writes XPUPorts to the API
	// server.
	ProvisionerCRD ProvisionerKind = "crd"
	// ProvisionerDirect: the agent provisions the xPU itself. There is no API server, and so no
	// DRA.
	ProvisionerDirect ProvisionerKind = "direct"
)

// Config is the configuration of an agent. [Config.AddFlags] documents the fields.
type Config struct {
	Identity
	Host
	Servers
	Attaching
	Provisioning

	// Kubernetes is how to reach the API server, for ProvisionerCRD. It has no flag.
	Kubernetes *rest.Config

	times times
}

// Identity names the node, and the pod in which the agent runs.
type Identity struct{ NodeName, Namespace, PodName, PodUID string }

// Host says where the agent finds the kernel, the kubelet, the runtime, and its own state.
type Host struct {
	SysRoot, ProcRoot, DevRoot              string
	StateDir, KubeletDir, CDIDir, NRISocket string
}

// Servers says where the agent can be observed.
type Servers struct {
	ListenAddress   string
	MetricsSecure   bool
	MetricsCertDir  string // "" for a self-signed certificate
	ProfilesAddress string // "" for none
	TracingEndpoint string // "" for none
	ReadySocket     string // "" for none
}

// Attaching says how pods get their Functions, and what runs after a release.
type Attaching struct {
	CNISocket, SpoolDir string
	CNIAllowKeys        []string
	DeviceInfoDir       string
	UseCDI              bool
	HooksDir            string
	HookTimeout         time.Duration
	HookAttempts        int
}

// Provisioning says where pools are declared, and who has the xPU serve Functions.
type Provisioning struct {
	ConfigFile       string // "" for none
	ResourcePrefix   string
	Provisioner      ProvisionerKind
	ProvisionTimeout time.Duration
	DirectConfig     string // "" for none
}

// times has shorter times for tests. A zero value means the usual time, which is a constant of this
// package or of the package that uses it.
type times struct {
	sweep, abandoned, conflict, allocate, add, register time.Duration
}

// AddFlags adds a flag for each exported field except Kubernetes.
func (c *Config) AddFlags(flags *pflag.FlagSet) {
	c.Identity.addFlags(flags)
	c.Host.addFlags(flags)
	c.Servers.addFlags(flags)
	c.Attaching.addFlags(flags)
	c.Provisioning.addFlags(flags)
}

func (c *Identity) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&c.NodeName, "node-name", os.Getenv("NODE_NAME"),
		"name of this node's Node object (environment: NODE_NAME); with --provisioner=direct the "+
			"host's name if empty")
	flags.StringVar(&c.Namespace, "namespace", cmp.Or(os.Getenv("POD_NAMESPACE"), "xpu-system"),
		"namespace of this pod, where it makes XPUPorts (environment: POD_NAMESPACE)")

	flags.StringVar(&c.PodName, "pod-name", os.Getenv("POD_NAME"),
		"name of this pod (environment: POD_NAME); a list of the kubelet's pods that lacks it is "+
			"not believed. "+
			"Empty where the agent does not run in a pod")

	flags.StringVar(&c.PodUID, "pod-uid", os.Getenv("POD_UID"),
		"UID of this pod (environment: POD_UID), so that the kubelet can tell two agents that "+
			"replace each other. "+
			"Empty where only one is started at a time")
}

func (c *Host) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&c.SysRoot, "sys-root", "/sys", "where the host's sysfs is")
	flags.StringVar(&c.ProcRoot, "proc-root", "/proc", "where procfs is")
	flags.StringVar(&c.DevRoot, "dev-root", "/dev",
		"where the host's device nodes can be looked for")
	flags.StringVar(&c.StateDir, "state-dir", "/var/lib/xpu-agent",
		"directory of the journal; must survive the agent")
	flags.StringVar(&c.KubeletDir, "kubelet-dir", "/var/lib/kubelet",
		"the kubelet's directory, under the same path as on the host")
	flags.StringVar(&c.CDIDir, "cdi-dir", "/var/run/cdi",
		"directory in which the container runtime looks for CDI files")
	flags.StringVar(&c.NRISocket, "nri-socket", "/var/run/nri/nri.sock",
		"the container runtime's NRI socket")
}

func (c *Servers) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&c.ListenAddress, "listen", ":9810",
		"address that serves /healthz, /readyz and /metrics")

	flags.BoolVar(&c.MetricsSecure, "metrics-secure", false,
		"serve --listen by TLS, and /metrics only to those who may get it, as the API server "+
			"says: with a bearer token of, for example, "+
			"a ServiceAccount that has a ClusterRole for the nonResourceURL /metrics")

	flags.StringVar(&c.MetricsCertDir, "metrics-cert-dir", "",
		"directory with tls.crt and tls.key for --metrics-secure, followed when they change; "+
			"empty makes a self-signed certificate")
	flags.StringVar(&c.ProfilesAddress, "pprof-listen", "",
		"loopback address that serves Go profiles at /debug/pprof, such as 127.0.0.1:6060; "+
			"empty: none")
	flags.StringVar(&c.TracingEndpoint, "tracing-endpoint", "", tracing.EndpointUsage)

	flags.StringVar(&c.ReadySocket, "ready-socket", "",
		"unix socket, in a directory that no other agent has, at which \"xpu-agent ready\" asks "+
			"whether this agent is ready; "+
			"empty serves none")
}

func (c *Attaching) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&c.CNISocket, "cni-socket", wire.DefaultSocket,
		"unix socket on which the CNI plugin xpu-cni finds the agent")
	flags.StringVar(&c.SpoolDir, "spool-dir", wire.DefaultSpoolDir,
		"directory in which xpu-cni leaves what the agent was not there for")
	flags.StringSliceVar(&c.CNIAllowKeys, "cni-allow-keys", nil,
		"keys that network configurations may have although they mean nothing to xpu-cni; every "+
			"other unknown key is an error")
	flags.StringVar(&c.DeviceInfoDir, "devinfo-dir", "/var/run/k8s.cni.cncf.io/devinfo",
		"directory in which Multus looks for device-info files")
	flags.BoolVar(&c.UseCDI, "use-cdi", false,
		"give containers of extended resources their device nodes by CDI")
	flags.StringVar(&c.HooksDir, "hooks-dir", "/etc/xpu-agent/hooks.d",
		"directory of the administrator's post-delete hooks; need not exist")
	flags.DurationVar(&c.HookTimeout, "hook-timeout", 30*time.Second,
		"how long one run of a post-delete hook may take")
	flags.IntVar(&c.HookAttempts, "hook-attempts", 10,
		"how often a post-delete hook is tried that asks to be tried again")
}

func (c *Provisioning) addFlags(flags *pflag.FlagSet) {
	// The default paths and names are those of sriov-network-device-plugin.
	flags.StringVar(&c.ConfigFile, "config-file", "/etc/pcidp/config.json",
		"DevicePools, or a configuration of sriov-network-device-plugin; followed when it "+
			"changes; need not exist where "+
			"it is not given")

	flags.StringVar(&c.ResourcePrefix, "resource-prefix", sriovdp.DefaultPrefix,
		"prefix of resources in a configuration of sriov-network-device-plugin that name none")

	flags.StringVar((*string)(&c.Provisioner), "provisioner", string(ProvisionerCRD),
		"who has the xPU serve Functions: crd (xpu-controller, by XPUPorts) or direct (the agent "+
			"itself; no API server, "+
			"no DRA)")

	flags.DurationVar(&c.ProvisionTimeout, "provision-timeout", 40*time.Second,
		"how long one Prepare waits for the xPU; a kubelet gives up after 45s and asks again "+
			"only with its next sync of "+
			"the pod, a minute later or more")

	flags.StringVar(&c.DirectConfig, "direct-config", "",
		"file with the OPI agents, networks and pools of --provisioner=direct; without, no "+
			"network can be named")
}
