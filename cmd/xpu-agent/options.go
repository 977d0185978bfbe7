package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/tools/clientcmd"

	api "github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/node/agent"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// defaultConfigFile is the configuration file of sriov-network-device-plugin. It need not exist.
const defaultConfigFile = "/etc/pcidp/config.json"

// options are the flags.
type options struct {
	agent.Config
	kubeconfig string
	qps        float32
	burst      int
}

func (o *options) addFlags(flags *pflag.FlagSet) {
	o.addNodeFlags(flags)
	o.addPodFlags(flags)
	o.addPoolFlags(flags)
	ignoreFlags(flags)
}

// addNodeFlags adds the flags about the node.
func (o *options) addNodeFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.NodeName, "node-name", os.Getenv("NODE_NAME"),
		"name of this node's Node object (environment: NODE_NAME); with --provisioner=direct the host's name if empty")
	flags.StringVar(&o.Namespace, "namespace", cmp.Or(os.Getenv("POD_NAMESPACE"), "xpu-system"),
		"namespace of this pod, where it makes XPUPorts (environment: POD_NAMESPACE)")
	flags.StringVar(&o.PodName, "pod-name", os.Getenv("POD_NAME"),
		"name of this pod (environment: POD_NAME); a list of the kubelet's pods that lacks it is not believed. "+
			"Empty where the agent does not run in a pod")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "",
		"file that says how to reach the API server; empty: the pod's service account")
	flags.Float32Var(&o.qps, "kube-api-qps", 100, "requests per second to the API server, on average")
	flags.IntVar(&o.burst, "kube-api-burst", 200, "requests to the API server at once")
	flags.StringVar(&o.SysRoot, "sys-root", "/sys", "where the host's sysfs is")
	flags.StringVar(&o.ProcRoot, "proc-root", "/proc", "where procfs is")
	flags.StringVar(&o.DevRoot, "dev-root", "/dev", "where the host's device nodes can be looked for")
	flags.StringVar(&o.StateDir, "state-dir", "/var/lib/xpu-agent", "directory of the journal; must survive the agent")
	flags.StringVar(&o.KubeletDir, "kubelet-dir", "/var/lib/kubelet",
		"the kubelet's directory, under the same path as on the host")
	flags.StringVar(&o.CDIDir, "cdi-dir", "/var/run/cdi", "directory in which the container runtime looks for CDI files")
	flags.StringVar(&o.NRISocket, "nri-socket", "/var/run/nri/nri.sock", "the container runtime's NRI socket")
	flags.StringVar(&o.ListenAddress, "listen", ":9810", "address that serves /healthz, /readyz and /metrics")
}

// addPodFlags adds the flags about attaching and releasing Functions.
func (o *options) addPodFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.CNISocket, "cni-socket", api.DefaultSocket,
		"unix socket on which the CNI plugin xpu-cni finds the agent")
	flags.StringVar(&o.SpoolDir, "spool-dir", api.DefaultSpoolDir,
		"directory in which xpu-cni leaves what the agent was not there for")
	flags.StringSliceVar(&o.CNIAllowKeys, "cni-allow-keys", nil,
		"keys that network configurations may have although they mean nothing to xpu-cni; every other unknown key is an error")
	flags.StringVar(&o.DeviceInfoDir, "devinfo-dir", "/var/run/k8s.cni.cncf.io/devinfo",
		"directory in which Multus looks for device-info files")
	flags.BoolVar(&o.UseCDI, "use-cdi", false, "give containers of extended resources their device nodes by CDI")
	flags.StringVar(&o.HooksDir, "hooks-dir", "/etc/xpu-agent/hooks.d",
		"directory of the administrator's post-delete hooks; need not exist")
	flags.DurationVar(&o.HookTimeout, "hook-timeout", 30*time.Second, "how long one run of a post-delete hook may take")
	flags.IntVar(&o.HookAttempts, "hook-attempts", 10, "how often a post-delete hook is tried that asks to be tried again")
}

// addPoolFlags adds the flags about pools and provisioning.
func (o *options) addPoolFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.ConfigFile, "config-file", defaultConfigFile,
		"DevicePools, or a configuration of sriov-network-device-plugin; followed when it changes; need not exist where "+
			"it is not given")
	flags.StringVar(&o.ResourcePrefix, "resource-prefix", "intel.com",
		"prefix of resources in a configuration of sriov-network-device-plugin that name none")

	flags.StringVar((*string)(&o.Provisioner), "provisioner", string(agent.ProvisionerCRD),
		"who has the xPU serve Functions: crd (xpu-controller, by XPUPorts) or direct (the agent itself; no API server, "+
			"no DRA)")
	flags.DurationVar(&o.ProvisionTimeout, "provision-timeout", 40*time.Second,
		"how long one Prepare waits for the xPU; a kubelet gives up after 45s and asks again only with its next sync of "+
			"the pod, a minute later or more")
	flags.StringVar(&o.DirectConfig, "direct-config", "",
		"file with the OPI agents, networks and pools of --provisioner=direct; without, no network can be named")
}

// ignoreFlags adds flags that DaemonSets of sriov-network-device-plugin have, and that this program ignores.
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

// complete checks the flags and sets what depends on them. configFileGiven says whether --config-file was set, so that the
// file must exist.
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
		if o.NodeName == "" {
			if o.NodeName, err = os.Hostname(); err != nil {
				return fmt.Errorf("--node-name: %w", err)
			}
		}
		return nil
	}
	return fmt.Errorf("--provisioner: %q must be %s or %s", o.Provisioner, agent.ProvisionerCRD, agent.ProvisionerDirect)
}

func (o *options) completeCRD() error {
	if o.NodeName == "" {
		return errors.New("--node-name: must be the name of this node's Node object (or set NODE_NAME)")
	}
	if o.DirectConfig != "" {
		return errors.New("--direct-config: is only for --provisioner=direct; XPUs and XPUNetworks say the same at the API server")
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
