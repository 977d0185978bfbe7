package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/pflag"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/opiproject/xpu-device-plugin/pkg/node/agent"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// options are the flags.
type options struct {
	agent.Config
	kubeconfig string
	qps        float32
	burst      int
}

func (o *options) addFlags(flags *pflag.FlagSet) {
	o.Config.AddFlags(flags)
	flags.StringVar(&o.kubeconfig, "kubeconfig", "",
		"file that says how to reach the API server; empty: the pod's service account")
	flags.Float32Var(&o.qps, "kube-api-qps", 100, "requests per second to the API server, on average")
	flags.IntVar(&o.burst, "kube-api-burst", 200, "requests to the API server at once")
	ignoreFlags(flags)
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
