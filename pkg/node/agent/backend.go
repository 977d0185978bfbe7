// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// backend has the xPU serve Functions, and knows which DevicePools are declared. It is the API
// server, or in direct mode the OPI agents and a file.
type backend struct {
	provisioner  provisioning.Provisioner
	declarations pool.Declarations
	file         *source.File // nil without a configuration file
	// connect runs provisioner and declarations until ctx ends.
	connect func(context.Context) error
	// claimPorts and api are nil in direct mode.
	claimPorts claimPorts
	api        *apiServer
}

// claimPorts knows the Ports of claims. [kubeapi.API] implements it.
type claimPorts interface {
	// Serves returns nil once the xPU serves the claim's Port of a Function, or if the claim has no
	// Port. If ctx ends before, the error says what is missing.
	Serves(ctx context.Context, namespace string, claim types.UID, f function.ID) error
}

// apiServer has the parts that work with the API server only.
type apiServer struct {
	*kubeapi.API
	host      string // the address, for messages
	log       logr.Logger
	clientset kubernetes.Interface
	// recorder records events about Functions and failed post-delete hooks.
	recorder events.EventRecorder
	ports    *provisioning.CRD
	metrics  *dra.Metrics
	status   *dra.StatusReporter
}

// newBackend makes the parts for the mode of the agent. clientset is nil in direct mode.
func newBackend(
	ctx context.Context, env *environment, hardware *hardware, kubelet *kubelet,
	clientset kubernetes.Interface,
) (*backend, error) {
	if clientset == nil {
		return newDirectBackend(env, hardware)
	}

	api, err := kubeapi.New(env.config.Kubernetes, env.config.NodeName, kubeapi.Events{
		DeclarationsChanged: env.inputs.Notify, PortsChanged: env.outputs.Notify,
	})
	if err != nil {
		return nil, err
	}

	file, err := openFile(env, nil)
	if err != nil {
		return nil, err
	}

	recorder, err := kubeapi.NewRecorder(ctx, clientset)
	if err != nil {
		return nil, err
	}

	ports := &provisioning.CRD{
		API: api, Journal: env.journal, Node: env.config.NodeName, Namespace: env.config.Namespace,
		InUse: kubelet.mayBeInUse, OwnMAC: hardware.macs.Of, Log: env.log.WithName("provision"),
	}

	metrics := dra.NewMetrics(env.registry)
	status := dra.NewStatusReporter(clientset.ResourceV1(), env.journal, metrics,
		env.log.WithName("status"))

	return &backend{
		provisioner: ports,
		declarations: &source.Merged{
			Declarations: api, File: file, Log: env.log.WithName("declare"),
		},
		file: file, connect: api.Run, claimPorts: api,
		api: &apiServer{
			API: api, host: env.config.Kubernetes.Host, log: env.log, clientset: clientset,
			recorder: recorder, ports: ports, metrics: metrics, status: status,
		},
	}, nil
}

// newClientset returns a client for the API server.
func newClientset(config *rest.Config) (kubernetes.Interface, error) {
	// Protobuf keeps the opaque parameters in a claim's allocation byte by byte. JSON drops white
	// space, and the API server refuses a status in which they differ.
	verbatim := rest.CopyConfig(config)
	verbatim.ContentType = runtime.ContentTypeProtobuf
	verbatim.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	clientset, err := kubernetes.NewForConfig(verbatim)
	if err != nil {
		return nil, fmt.Errorf("client for the API server: %w", err)
	}
	return clientset, nil
}

// newDirectBackend makes the parts of direct mode: the agent calls the OPI agents itself, and
// DevicePools come from a file.
func newDirectBackend(env *environment, hardware *hardware) (*backend, error) {
	config := &provisioning.Config{}
	var err error
	if env.config.DirectConfig != "" {
		if config, err = provisioning.LoadConfig(env.config.DirectConfig); err != nil {
			return nil, err
		}
	}

	if config.Installation == "" {
		if config.Installation, err = machineID(env.config); err != nil {
			return nil, err
		}
	}

	direct, err := provisioning.NewDirect(config, env.journal, provisioning.DirectOptions{
		Installation: opi.NewInstallation(config.Installation),
		Card:         hardware.cards.Of, OwnMAC: hardware.macs.Of,
		Changed: env.outputs.Notify, Registry: env.registry, Tracer: env.tracer,
		Log: env.log.WithName("provision"),
	})
	if err != nil {
		return nil, err
	}

	file, err := openFile(env, func(p *v1alpha1.DevicePool) error {
		if p.Spec.Publish != v1alpha1.PublishDevicePlugin { // no part would publish the pool
			return fmt.Errorf("spec.publish: is %s, which needs an API server; with "+
				"--provisioner=direct it must be %s",
				p.Spec.Publish, v1alpha1.PublishDevicePlugin)
		}
		p.Spec.Network = cmp.Or(config.Pools[p.Name], p.Spec.Network)
		return nil
	})
	if err != nil {
		return nil, err
	}

	return &backend{provisioner: direct, declarations: file, file: file, connect: direct.Run}, nil
}

// machineID returns a name that no other node has, in any cluster.
func machineID(config Config) (string, error) {
	uuid, err := sysfs.Root(config.SysRoot).Dir("class/dmi/id").Attribute("product_uuid")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("what the firmware calls this machine: %w; set installation in the "+
			"file of --direct-config", err)
	}
	return config.NodeName + "/" + uuid, nil
}

// openFile reads the configuration file, if there is one. adapt may be nil; see
// [source.FileOptions].
func openFile(
	env *environment, adapt func(*v1alpha1.DevicePool) error,
) (*source.File, error) {
	if env.config.ConfigFile == "" {
		return nil, nil
	}
	return source.OpenFile(source.FileOptions{
		Path: env.config.ConfigFile, ResourcePrefix: env.config.ResourcePrefix, Adapt: adapt,
		Changed:  env.inputs.Notify,
		Registry: env.registry, Log: env.log.WithName("declare"),
	})
}

// apiPatience is how long the API server may take to answer before this is logged. The client
// library retries silently.
const apiPatience = 5 * time.Second

// macs chooses the MAC addresses of Ports.
func (b *backend) macs(env *environment, hardware *hardware) provisioning.MACs {
	return provisioning.MACs{
		Node: env.config.NodeName, PF: hardware.pfOf,
		NeedsOwn: b.provisioner.NeedsOwnMAC, Own: hardware.macs.Of,
	}
}

// portID returns the id for the Port of a Function: the recorded one, because the xPU may have the
// Port under it, or a new one.
func (b *backend) portID(env *environment, hardware *hardware) func(function.ID) string {
	return func(id function.ID) string {
		if a, held := env.journal.Get(id); held && a.Port != nil {
			return a.Port.ID
		}
		f, _ := hardware.inventory.Get(id)
		return b.provisioner.PortID(f)
	}
}

// synced waits until declarations can be read. It returns false if ctx ended first.
func (b *backend) synced(ctx context.Context) bool {
	if b.api == nil {
		return true
	}

	waiting := time.AfterFunc(apiPatience, func() {
		b.api.log.Info("Waiting for the API server; nothing is offered before DevicePools are read",
			"server", b.api.host)
	})
	defer waiting.Stop()
	return b.api.Synced(ctx)
}

// serve implements Serve of [lifecycle.Options].
func (b *backend) serve(ctx context.Context, attachment journal.Attachment) error {
	switch {
	case attachment.Port != nil:
		_, err := b.provisioner.Provision(ctx, attachment)
		return err
	case attachment.Claim.UID != "" && b.claimPorts != nil:
		return b.claimPorts.Serves(ctx, attachment.Claim.Namespace, attachment.Claim.UID,
			attachment.Function)
	}
	return nil
}

// report queues a write of the status of a claim.
func (b *backend) report(claim journal.Claim) {
	if b.api != nil {
		b.api.status.Report(claim)
	}
}

// provisionFailed is a [health.Source] of Functions whose Port the xPU refused.
func (b *backend) provisionFailed(id function.ID) (message string) {
	if b.api == nil {
		return ""
	}
	return b.api.ProvisionFailed(id)
}
