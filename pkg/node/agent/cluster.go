package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// clustered is the mode of an agent that has an API server: DevicePools come from there, XPUPorts go there, and
// Functions are published by DRA too.
type clustered struct {
	*agent
	api       *kubeapi.API
	ports     *provisioning.CRD
	clientset kubernetes.Interface
	metrics   *dra.Metrics
	status    *dra.StatusReporter

	// Made by complete.
	checker *health.Checker
	driver  *dra.Driver
	nri     *nri.Plugin
}

func newClustered(a *agent) (*clustered, error) {
	clientset, err := newClientset(a.config.Kubernetes)
	if err != nil {
		return nil, err
	}
	api, err := kubeapi.New(a.config.Kubernetes, a.config.NodeName, kubeapi.Events{
		DeclarationsChanged: a.inputs.Notify, PortsChanged: a.outputs.Notify, XPUsChanged: a.outputs.Notify,
	})
	if err != nil {
		return nil, err
	}
	metrics := dra.NewMetrics(a.registry)
	return &clustered{
		agent: a, api: api, clientset: clientset, metrics: metrics,
		ports: provisioning.NewCRD(api, a.journal, provisioning.CRDOptions{
			Node: a.config.NodeName, Namespace: a.config.Namespace,
			InUse: func(id function.ID) bool { return a.uses.maybe(id) }, // conflicts is made later
			Log:   a.log.WithName("provision"),
		}),
		status: dra.NewStatusReporter(clientset.ResourceV1(), a.journal, metrics, a.log.WithName("status")),
	}, nil
}

// newClientset speaks protobuf, which leaves the opaque parameters in a claim's allocation as they are, to the byte. The
// API server refuses a status in which they differ, and JSON drops white space.
func newClientset(config *rest.Config) (kubernetes.Interface, error) {
	verbatim := rest.CopyConfig(config)
	verbatim.ContentType = runtime.ContentTypeProtobuf
	verbatim.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	clientset, err := kubernetes.NewForConfig(verbatim)
	if err != nil {
		return nil, fmt.Errorf("client for the API server: %w", err)
	}
	return clientset, nil
}

func (c *clustered) devices() lifecycle.Devices            { return containerDevices{c} }
func (c *clustered) claims() lifecycle.Claims              { return dra.API{Client: c.clientset} }
func (c *clustered) provisioner() provisioning.Provisioner { return c.ports }
func (c *clustered) claimServed(ctx context.Context, a journal.Attachment) error {
	return c.api.Serves(ctx, a.Claim.Namespace, a.Claim.UID, a.Function)
}

func (c *clustered) provisionFailed() health.Source    { return c.api.ProvisionFailed }
func (c *clustered) reporter() cniserver.Reporter      { return c.status }
func (c *clustered) connect(ctx context.Context) error { return c.api.Run(ctx) }

// apiPatience is how long the API server may take to answer before the log says what is waited for. The client library
// tries again without a word.
const apiPatience = 5 * time.Second

func (c *clustered) synced(ctx context.Context) bool {
	tell := time.AfterFunc(apiPatience, func() {
		c.log.Info("Waiting for the API server; nothing is offered before DevicePools are read", "server", c.config.Kubernetes.Host)
	})
	defer tell.Stop()
	return c.api.Synced(ctx)
}

func (c *clustered) declarations(file *source.File) pool.Declarations {
	if file == nil {
		return c.api
	}
	return source.Merge(file, c.api, c.log.WithName("declare"))
}

func (c *clustered) recorder(ctx context.Context) (hooks.Recorder, error) {
	return kubeapi.NewRecorder(ctx, c.clientset)
}

// complete makes what prepares claims and attaches their Functions.
func (c *clustered) complete() error {
	c.checker = c.health(c.lifecycle.Overdue)
	cdi, err := cdi.Open(c.config.CDIDir)
	if err != nil {
		return err
	}
	c.nri = &nri.Plugin{
		Socket: c.config.NRISocket, Journal: c.journal, Lifecycle: c.lifecycle, Kubelet: c.kubelet, Reporter: c.status,
		Log: c.log.WithName("nri"),
	}
	c.driver = &dra.Driver{
		Function:         c.tracker.Get,
		DevicePool:       c.tracker.DevicePool,
		WaitForPort:      c.api.Wait,
		Journal:          c.journal,
		Lifecycle:        c.lifecycle,
		DeviceNodes:      new(c.deviceNodes()),
		RuntimeConnected: c.nri.AwaitConnected,
		PodGoing:         dra.API{Client: c.clientset}.Going,
		CDI:              cdi,
		HealthReporter: &dra.HealthReporter{
			Node: c.config.NodeName, Pools: c.tracker, Health: c.checker, Changes: c.outputs.Subscribe,
		},
		Metrics:          c.metrics,
		Log:              c.log.WithName("dra"),
		ProvisionTimeout: c.config.ProvisionTimeout,
	}
	return nil
}

// serve publishes Functions by DRA, prepares claims, and says what came of them.
func (c *clustered) serve(ctx context.Context) error {
	forPublisher, forReporter := c.outputs.Subscribe(ctx), c.outputs.Subscribe(ctx)
	declaredForReporter := c.inputs.Subscribe(ctx)
	// Without the pools a claim whose pool names the network would be taken for one without a network, and its containers
	// would not get the device nodes that the pool asks for.
	if !c.knowsPools(ctx) {
		return nil
	}
	c.recoverClaims()
	helper, err := c.register(ctx)
	if err != nil {
		return err
	}
	defer helper.Stop()
	slices := &dra.SliceWriter{Client: c.clientset, Node: c.config.NodeName, HandleError: c.driver.HandleError}
	defer slices.Stop()
	publisher := &dra.Publisher{
		Node: c.config.NodeName, Pools: c.tracker, Health: c.checker, Slices: slices, Metrics: c.metrics,
		Log: c.log.WithName("publish"),
	}
	leftovers := &dra.Leftovers{
		DriverDir: c.driverDir(), CDIDir: c.config.CDIDir, Claims: c.journal.All, Log: c.log.WithName("dra"),
	}
	reporter := &pool.Reporter{
		Node: c.config.NodeName, Tracker: c.tracker, Declarations: c.api, Writer: c.api, VFs: c.vfs,
		Log: c.log.WithName("pool"),
	}

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.ports.Run(ctx) })
	group.Go(func() error { return publisher.Run(ctx, forPublisher) })
	group.Go(func() error { return reporter.Run(ctx, forReporter, declaredForReporter) })
	group.Go(func() error { return c.status.Run(ctx) })
	group.Go(func() error { return leftovers.Run(ctx) })
	group.Go(func() error { return c.nri.Run(ctx) })
	return group.Wait()
}

// knowsPools waits until the pools have been read; false means that ctx ended before.
func (c *clustered) knowsPools(ctx context.Context) bool {
	return loop.Until(ctx, c.outputs.Subscribe, func() bool { return c.poolsKnown() == nil }) == nil
}

// containerDevices are those of the driver, which is made later.
type containerDevices struct{ *clustered }

func (d containerDevices) Offer(a journal.Attachment) error    { return d.driver.Offer(a) }
func (d containerDevices) Withdraw(a journal.Attachment) error { return d.driver.Withdraw(a) }

// recoverClaims brings claims and the journal together.
func (c *clustered) recoverClaims() {
	c.driver.Recover(c.journal.All())
	for _, attachment := range c.journal.All() {
		if attachment.Claim.UID != "" {
			c.status.Report(attachment.Claim)
		}
	}
}

// driverDir is the driver's own among those of the kubelet's plugins.
func (c *clustered) driverDir() string {
	return filepath.Join(c.config.KubeletDir, "plugins", v1alpha1.GroupName)
}

// register makes the driver known to the kubelet.
func (c *clustered) register(ctx context.Context) (*kubeletplugin.Helper, error) {
	data := c.driverDir()
	if err := os.MkdirAll(data, 0o750); err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}
	helper, err := kubeletplugin.Start(logr.NewContext(ctx, c.log.WithName("dra")), c.driver,
		kubeletplugin.DriverName(v1alpha1.GroupName),
		kubeletplugin.NodeName(c.config.NodeName),
		kubeletplugin.KubeClient(c.clientset),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(c.config.KubeletDir, "plugins_registry")),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{
			metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion,
		}),
		kubeletplugin.CDIDirectory(c.config.CDIDir),
		// A Prepare waits for its own xPU; others must not wait for it. Functions have locks of their own.
		kubeletplugin.Serialize(false),
	)
	if err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}
	return helper, nil
}

// ready is about the runtime, which tells of the pods of claims. Extended resources do without it.
func (c *clustered) ready() error {
	pools, _ := c.tracker.Pools()
	byClaim := slices.ContainsFunc(pools, func(p pool.Pool) bool { return p.Spec.Publish != v1alpha1.PublishDevicePlugin })
	if byClaim && !c.nri.Connected() {
		return fmt.Errorf("not connected to the container runtime at %s", c.config.NRISocket)
	}
	return nil
}
