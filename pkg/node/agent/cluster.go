package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
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
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// clustered are the additional parts of an agent with an API server: it reads DevicePools and writes XPUPorts there, and
// also publishes Functions by DRA.
type clustered struct {
	*agent
	api       *kubeapi.API
	ports     *provisioning.CRD
	clientset kubernetes.Interface
	metrics   *dra.Metrics
	status    *dra.StatusReporter
	driver    *dra.Driver // not ready for use before attach

	// Made by attach.
	checker *health.Checker
	nri     *nri.Plugin
}

// provisionByCluster makes the parts that read and write DevicePools and XPUPorts at the API server.
func (a *agent) provisionByCluster(ctx context.Context) error {
	// Protobuf keeps the opaque parameters in a claim's allocation byte by byte. JSON drops white space, and the API server
	// refuses a status in which they differ.
	verbatim := rest.CopyConfig(a.config.Kubernetes)
	verbatim.ContentType = runtime.ContentTypeProtobuf
	verbatim.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	clientset, err := kubernetes.NewForConfig(verbatim)
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}
	api, err := kubeapi.New(a.config.Kubernetes, a.config.NodeName, kubeapi.Events{
		DeclarationsChanged: a.inputs.Notify, PortsChanged: a.outputs.Notify,
	})
	if err != nil {
		return err
	}
	if err := a.openFile(nil); err != nil {
		return err
	}
	if a.recorder, err = kubeapi.NewRecorder(ctx, clientset); err != nil {
		return err
	}
	metrics := dra.NewMetrics(a.registry)
	c := &clustered{
		agent: a, api: api, clientset: clientset, metrics: metrics, driver: &dra.Driver{},
		ports: &provisioning.CRD{
			API: api, Journal: a.journal, Node: a.config.NodeName, Namespace: a.config.Namespace,
			InUse: func(id function.ID) bool { return a.conflicts.maybe(id) }, // conflicts is made later
			Log:   a.log.WithName("provision"),
		},
		status: dra.NewStatusReporter(clientset.ResourceV1(), a.journal, metrics, a.log.WithName("status")),
	}
	a.clustered = c
	a.provisioner, a.connect, a.provisionFailed = c.ports, api.Run, api.ProvisionFailed
	a.declarations = &source.Merged{Declarations: api, File: a.file, Log: a.log.WithName("declare")}
	a.claims, a.expose, a.report = dra.API{Client: clientset}, c.driver.Expose, c.status.Report
	a.claimServed = func(ctx context.Context, attachment journal.Attachment) error {
		return api.Serves(ctx, attachment.Claim.Namespace, attachment.Claim.UID, attachment.Function)
	}
	return nil
}

// apiPatience is how long the API server may take to answer before it is logged. The client library retries silently.
const apiPatience = 5 * time.Second

// synced waits until declarations can be read. It returns false if ctx ended before.
func (c *clustered) synced(ctx context.Context) bool {
	tell := time.AfterFunc(apiPatience, func() {
		c.log.Info("Waiting for the API server; nothing is offered before DevicePools are read", "server", c.config.Kubernetes.Host)
	})
	defer tell.Stop()
	return c.api.Synced(ctx)
}

// attach makes the parts that prepare claims and attach their Functions.
func (c *clustered) attach() error {
	c.checker = c.health(c.lifecycle.Overdue)
	cdi, err := cdi.Open(c.config.CDIDir)
	if err != nil {
		return err
	}
	c.nri = &nri.Plugin{
		Socket: c.config.NRISocket, Journal: c.journal, Lifecycle: c.lifecycle, Claimed: c.kubelet.Claimed,
		Report: c.status.Report, Log: c.log.WithName("nri"),
	}
	*c.driver = dra.Driver{
		Function:         c.tracker.Get,
		DevicePool:       c.tracker.DevicePool,
		WaitForPort:      c.api.Wait,
		Journal:          c.journal,
		Lifecycle:        c.lifecycle,
		DeviceNodes:      c.nodes,
		Report:           c.status.Report,
		RuntimeConnected: c.nri.AwaitConnected,
		PodGoing:         dra.API{Client: c.clientset}.Going,
		CDI:              cdi,
		Node:             c.config.NodeName,
		Pools:            c.tracker.Pools,
		Health:           c.checker,
		Changes:          c.outputs.Subscribe,
		Metrics:          c.metrics,
		Log:              c.log.WithName("dra"),
		ProvisionTimeout: c.config.ProvisionTimeout,
	}
	return nil
}

// serve publishes Functions by DRA, prepares claims, and reports their status until ctx ends. It is called after the
// recovery, when the Functions are known.
func (c *clustered) serve(ctx context.Context) error {
	forPublisher, forReporter, forAhead := c.outputs.Subscribe(ctx), c.outputs.Subscribe(ctx), c.outputs.Subscribe(ctx)
	declaredForReporter := c.inputs.Subscribe(ctx)
	// A claim may get its network and device nodes from its pool, so the pools must be known.
	if loop.Until(ctx, c.outputs.Subscribe, func() bool { return c.poolsKnown() == nil }) != nil {
		return nil
	}
	c.driver.Recover(c.journal.All())
	for _, attachment := range c.journal.All() {
		c.status.Report(attachment.Claim)
	}
	data := filepath.Join(c.config.KubeletDir, "plugins", v1alpha1.GroupName)
	helper, err := c.register(ctx, data)
	if err != nil {
		return err
	}
	defer helper.Stop()
	slices := &dra.SliceWriter{Client: c.clientset, Node: c.config.NodeName, HandleError: c.driver.HandleError}
	defer slices.Stop()
	publisher := &dra.Publisher{
		Node: c.config.NodeName, Pools: c.tracker.Pools, Health: c.checker, Ahead: c.api.ProvisionedAhead,
		Publish: slices.PublishResources, Metrics: c.metrics, Log: c.log.WithName("publish"),
	}
	ahead := &provisioning.Ahead{
		API: c.api, Pools: c.tracker.Pools, Node: c.config.NodeName, Namespace: c.config.Namespace, Log: c.log.WithName("ahead"),
		Free: func(f function.Function) bool {
			_, used := c.journal.Get(f.ID)
			return !used && len(c.checker.Problems(f)) == 0
		},
	}
	// Who has a Function is no problem of it.
	problems := &health.Checker{Fault: c.faults.Fault, XPUAway: c.provisioner.Away, Lost: c.lifecycle.Lost}
	reporter := &pool.Reporter{
		Tracker: c.tracker, API: c.api, Problems: problems.Problems, Card: c.cards.Of,
		Supply: c.vfs.Supply, Log: c.log.WithName("pool"),
	}

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.ports.Run(ctx) })
	group.Go(func() error { return ahead.Run(ctx, forAhead) })
	group.Go(func() error { return publisher.Run(ctx, forPublisher) })
	group.Go(func() error { return reporter.Run(ctx, forReporter, declaredForReporter) })
	group.Go(func() error { return c.status.Run(ctx) })
	group.Go(func() error { return c.driver.RemoveLeftovers(ctx, data, c.config.CDIDir) })
	group.Go(func() error { return c.nri.Run(ctx) })
	return group.Wait()
}

// register makes the driver known to the kubelet. data is the driver's own directory among those of the kubelet's plugins.
func (c *clustered) register(ctx context.Context, data string) (*kubeletplugin.Helper, error) {
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
		// A Prepare waits for its xPU and must not hold up others. Each Function has a lock.
		kubeletplugin.Serialize(false),
	)
	if err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}
	return helper, nil
}
