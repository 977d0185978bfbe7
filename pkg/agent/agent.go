// Package agent puts the node's agent together. Data flows one way: the inventory discovers Functions, pools select
// them, the DRA driver publishes and prepares them, NRI says when a pod's network namespace is there and the attacher
// moves them, and the releaser brings them back.
package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/attach"
	"github.com/opiproject/xpu-device-plugin/pkg/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/health"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/nodeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/nri"
	"github.com/opiproject/xpu-device-plugin/pkg/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/release"
)

// Config is what an agent must be told.
type Config struct {
	// NodeName is the name of the node's Node object.
	NodeName string
	// SysRoot is where the host's sysfs is, "/sys".
	SysRoot string
	// ProcRoot is where procfs is, "/proc".
	ProcRoot string
	// StateDir keeps the journal; it must survive the agent.
	StateDir string
	// KubeletDir is the kubelet's, "/var/lib/kubelet". It must have the same path as on the host.
	KubeletDir string
	// CDIDir is where the runtime reads CDI files.
	CDIDir string
	// NRISocket is the runtime's.
	NRISocket string
	// ListenAddress serves health and metrics, "host:port".
	ListenAddress string
	// ProvisionTimeout is how long one Prepare waits for the xPU.
	ProvisionTimeout time.Duration
	// Kubernetes is how the API server is reached.
	Kubernetes *rest.Config
}

// agent has the parts that others look at.
type agent struct {
	config    Config
	log       logr.Logger
	inventory *inventory.Inventory
	api       *nodeapi.API
	journal   *journal.Journal
	releaser  *release.Releaser
	tracker   *pool.Tracker
	health    *health.Checker
	driver    *dra.Driver
	status    *dra.StatusReporter
	nri       *nri.Plugin
	metrics   *dra.Metrics
	clientset kubernetes.Interface
	releases  *releases

	// inputs wakes who decides which Function is in which pool; outputs wakes who tells the world about pools and
	// health.
	inputs, outputs notify.Signal
}

// Run works until ctx ends. It returns an error only if it cannot work at all.
func Run(ctx context.Context, config Config, registry *prometheus.Registry, log logr.Logger) error {
	records, err := journal.Open(filepath.Join(config.StateDir, "journal.db"))
	if err != nil {
		return err
	}
	defer records.Close()
	engine, err := link.New(link.Options{})
	if err != nil {
		return err
	}
	defer engine.Close()
	a := &agent{config: config, log: log, journal: records}
	if err := a.assemble(engine, registry); err != nil {
		return err
	}
	return a.run(ctx, registry)
}

// assemble makes the parts and tells them of each other, in the order in which data flows.
func (a *agent) assemble(engine *link.Engine, registry *prometheus.Registry) (err error) {
	bootID, err := readBootID(a.config.ProcRoot)
	if err != nil {
		return err
	}
	if a.clientset, err = newClientset(a.config.Kubernetes); err != nil {
		return err
	}
	cdi, err := dra.NewCDI(a.config.CDIDir)
	if err != nil {
		return err
	}
	a.api, err = nodeapi.New(a.config.Kubernetes, a.config.NodeName, nodeapi.Events{DeclarationsChanged: a.inputs.Notify, PortsChanged: a.outputs.Notify, XPUsChanged: a.outputs.Notify})
	if err != nil {
		return err
	}
	a.inventory = inventory.New(inventory.Options{
		SysRoot: a.config.SysRoot, Changed: a.inputs.Notify, Registry: registry, Log: a.log.WithName("inventory"),
	})
	a.tracker = pool.NewTracker(a.inventory, a.api, a.log.WithName("pool"))
	a.releaser = release.New(a.journal, engine, a.inventory, release.Options{BootID: bootID}, a.log.WithName("release"))
	a.releases = &releases{releaser: a.releaser, journal: a.journal, changed: a.outputs.Notify, log: a.log.WithName("release")}
	attacher := attach.New(a.journal, engine, a.inventory, a.releaser, bootID, a.log.WithName("attach"))
	a.health = &health.Checker{ReleasePending: a.releases.pending, ProvisionFailed: a.api.ProvisionFailed}
	a.metrics = dra.NewMetrics(registry)
	a.status = dra.NewStatusReporter(a.clientset.ResourceV1(), a.journal, a.metrics, a.log.WithName("status"))
	a.driver = &dra.Driver{
		Functions:        a.inventory,
		DevicePools:      a.tracker,
		Ports:            a.api,
		Journal:          a.journal,
		Attacher:         attacher,
		Releaser:         a.releases,
		CDI:              cdi,
		Health:           &dra.HealthReporter{Node: a.config.NodeName, Pools: a.tracker, Health: a.health, Changes: a.outputs.Subscribe},
		Metrics:          a.metrics,
		Log:              a.log.WithName("dra"),
		ProvisionTimeout: a.config.ProvisionTimeout,
	}
	a.nri = &nri.Plugin{
		Socket: a.config.NRISocket, Journal: a.journal, Attacher: attacher, Detacher: a.releaser, Reporter: a.status,
		Log: a.log.WithName("nri"),
	}
	return nil
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

func readBootID(procRoot string) (string, error) {
	id, err := os.ReadFile(filepath.Join(procRoot, "sys/kernel/random/boot_id"))
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

func (a *agent) run(ctx context.Context, registry *prometheus.Registry) error {
	group, ctx := errgroup.WithContext(ctx)
	// Subscriptions come before what they listen to is started, so that nothing is missed.
	forTracker, forPublisher, forReporter := a.inputs.Subscribe(ctx), a.outputs.Subscribe(ctx), a.outputs.Subscribe(ctx)

	group.Go(func() error { return a.inventory.Run(ctx) })
	group.Go(func() error { return a.api.Run(ctx) })
	group.Go(func() error { return serve(ctx, a.config.ListenAddress, registry, a.ready, a.log) })
	group.Go(func() error {
		// Functions are brought back whether the API server is there or not.
		if !a.inventory.Synced(ctx) {
			return nil
		}
		if err := a.recover(ctx); err != nil {
			return err
		}
		if !a.api.Synced(ctx) {
			return nil
		}
		helper, err := a.register(ctx)
		if err != nil {
			return err
		}
		defer helper.Stop()
		slices := &dra.SliceWriter{Client: a.clientset, Node: a.config.NodeName, HandleError: a.driver.HandleError}
		defer slices.Stop()
		publisher := &dra.Publisher{Node: a.config.NodeName, Pools: a.tracker, Health: a.health, Slices: slices, Metrics: a.metrics, Log: a.log.WithName("publish")}
		reporter := &pool.Reporter{Node: a.config.NodeName, Tracker: a.tracker, Declarations: a.api, Writer: a.api, Log: a.log.WithName("pool")}

		running, ctx := errgroup.WithContext(ctx)
		running.Go(func() error { return a.tracker.Run(ctx, forTracker, a.outputs.Notify) })
		running.Go(func() error { return publisher.Run(ctx, forPublisher) })
		running.Go(func() error { return reporter.Run(ctx, forReporter) })
		running.Go(func() error { return a.status.Run(ctx) })
		running.Go(func() error { return a.nri.Run(ctx) })
		running.Go(func() error { return a.releases.run(ctx) })
		running.Go(func() error { return trim(ctx) })
		return running.Wait()
	})
	err := group.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// startTime is how long a start needs memory: until the slices of many Functions are read, made and compared.
const startTime = 3 * time.Second

// trim gives back, once, what only the start needed. It is as much again as the agent keeps, and the Go runtime would
// hold on to it for minutes.
func trim(ctx context.Context) error {
	select {
	case <-ctx.Done():
	case <-time.After(startTime):
		debug.FreeOSMemory()
	}
	return nil
}

// recover brings the journal and the world together before anybody asks for anything. What cannot be done now is tried
// again later; it must not keep the other Functions from work.
func (a *agent) recover(ctx context.Context) error {
	begin := time.Now()
	if err := a.releaser.Recover(ctx); err != nil {
		a.log.Error(err, "Some Functions of the last run are not back yet")
	}
	if err := a.driver.Recover(a.journal.All()); err != nil {
		return err
	}
	for _, attachment := range a.journal.All() {
		a.status.Report(attachment.Claim)
	}
	a.log.Info("Recovered", "attachments", len(a.journal.All()), "took", time.Since(begin).String())
	return nil
}

// register makes the driver known to the kubelet.
func (a *agent) register(ctx context.Context) (*kubeletplugin.Helper, error) {
	data := filepath.Join(a.config.KubeletDir, "plugins", v1alpha1.GroupName)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}
	helper, err := kubeletplugin.Start(logr.NewContext(ctx, a.log.WithName("dra")), a.driver,
		kubeletplugin.DriverName(v1alpha1.GroupName),
		kubeletplugin.NodeName(a.config.NodeName),
		kubeletplugin.KubeClient(a.clientset),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(a.config.KubeletDir, "plugins_registry")),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(a.config.CDIDir),
		// A Prepare waits for its own xPU; others must not wait for it. Functions have locks of their own.
		kubeletplugin.Serialize(false),
	)
	if err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}
	return helper, nil
}

// ready says why pods could not be served now.
func (a *agent) ready() error {
	if _, known := a.tracker.Pools(); !known {
		return errors.New("DevicePools and Functions have not been read yet")
	}
	if !a.nri.Connected() {
		return fmt.Errorf("not connected to the container runtime at %s", a.config.NRISocket)
	}
	return nil
}
