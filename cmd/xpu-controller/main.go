// SPDX-License-Identifier: Apache-2.0

// Command xpu-controller has the xPUs ready for the Functions that Kubernetes allocates.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/cluster-inventory-api/pkg/access"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"

	"github.com/opiproject/xpu-device-plugin/pkg/broker"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/webhook"
	"github.com/opiproject/xpu-device-plugin/pkg/logging"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring/profiles"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring/secure"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

func main() {
	if err := command().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		os.Exit(1)
	}
}

// options are the command line's. Those of the manager are bound to flags as far as they can be
// chosen.
type options struct {
	role            string
	profiles        string
	kubeconfig      string
	tracingEndpoint string
	apiQPS          float32
	apiBurst        int
	logs            logging.Options
	manager         ctrl.Options
	controller      controller.Options
	webhook         webhook.Options
	limits          broker.Limits // of each tenant
}

// A leader that was killed is followed by another within leaseDuration and 2.2 times retryPeriod,
// which client-go stretches. A leader that cannot renew its Lease for renewDeadline ends before it
// runs out.
const (
	leaseDuration = 9 * time.Second
	renewDeadline = 6 * time.Second
	retryPeriod   = 1500 * time.Millisecond
)

func command() *cobra.Command {
	var o options
	c := &cobra.Command{
		Use:   "xpu-controller",
		Short: "Have xPUs ready for the Functions that Kubernetes allocates",
		Long: `xpu-controller watches ResourceClaims. For every Function of an xPU that is allocated to one it makes an
XPUPort and has the xPU's OPI agent serve it, and takes it back when the claim no longer has the Function.
It also has the xPUs serve the XPUNetworks that XPUPorts need, and is the only part of the system that has credentials for OPI agents.

Where hosts and xPUs are of different clusters, each does a part of this: in a tenant cluster, which has the hosts, role tenant makes
XPUPorts; in the infra cluster, which has the xPUs, role infra has OPI agents serve them; and role broker, in the infra cluster too,
carries them from one to the other.`,
		Example: `  # In a cluster, one of several replicas:
  xpu-controller --leader-elect

  # In an infra cluster, where the XPUTenants' kubeconfigs are in namespace xpu-tenants:
  xpu-controller --role broker --namespace xpu-tenants --leader-elect

  # On a developer's machine, against the cluster of a kubeconfig, with Secrets of namespace xpu-system:
  xpu-controller --kubeconfig ~/.kube/config --namespace xpu-system --metrics-bind-address 127.0.0.1:8080 --log-verbosity 1`,
		Args:         cobra.NoArgs,
		Version:      version.String(),
		SilenceUsage: true,
		RunE:         func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), o) },
	}

	f := c.Flags()
	o.addFlags(f)
	o.addWorkFlags(f)
	o.addTenantFlags(f)
	o.logs.AddFlags(f)
	taintRulesAfter := f.Duration("device-taint-rules-after", 0,
		"roles all and tenant: time that an OPI agent must have been unreachable before the devices of "+
			"its xPU are tainted by DeviceTaintRules, which also hold while the node's agent is away; 0s deletes the "+
			"rules. If it is left out, rules are left alone, and no rights for them are needed")
	c.PreRun = func(*cobra.Command, []string) {
		if f.Changed("device-taint-rules-after") {
			o.controller.TaintRulesAfter = taintRulesAfter
		}
	}

	return c
}

// addFlags adds what the program is and serves.
func (o *options) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.role, "role", string(controller.RoleAll),
		"which part of the work it does: all, tenant, infra or broker")
	f.StringVar(&o.kubeconfig, "kubeconfig",
		"", "kubeconfig file; empty means the ServiceAccount of the pod")
	f.StringVar(&o.profiles, "clusterprofile-provider-file", "",
		"role broker: JSON `file` with the programs that give credentials for ClusterProfiles "+
			"(KEP-5339); empty uses no ClusterProfiles")

	f.StringVar(&o.controller.Namespace, "namespace", os.Getenv("POD_NAMESPACE"),
		"namespace of the leader election's Lease, and of Secrets: those with TLS keys that XPUs "+
			"name, or for role broker those with "+
			"kubeconfigs that XPUTenants name; the default is $POD_NAMESPACE")

	f.BoolVar(&o.manager.LeaderElection, "leader-elect", false,
		"work only while holding the Lease xpu-controller, or xpu-broker; needed for more than "+
			"one replica")
	f.StringVar(&o.manager.Metrics.BindAddress, "metrics-bind-address", ":8080",
		"host:port for Prometheus metrics at /metrics; 0 serves none")

	f.BoolVar(&o.manager.Metrics.SecureServing, "metrics-secure", false,
		"serve metrics by TLS, and only to those who may get /metrics, as the API server says: "+
			"with a bearer token of, for example, a "+
			"ServiceAccount that has a ClusterRole for the nonResourceURL /metrics")

	f.StringVar(&o.manager.Metrics.CertDir, "metrics-cert-dir", "",
		"directory with tls.crt and tls.key for --metrics-secure, followed when they change; "+
			"empty makes a self-signed certificate")
	f.StringVar(&o.manager.HealthProbeBindAddress, "health-probe-bind-address", ":8081",
		"host:port for /healthz and /readyz; 0 serves none")
	f.StringVar(&o.manager.PprofBindAddress, "pprof-bind-address", "0",
		"loopback host:port for Go profiles at /debug/pprof, such as 127.0.0.1:6060; "+
			"they show names of objects; 0 serves none")
	f.StringVar(&o.webhook.Address, "webhook-bind-address", "0",
		"roles all and tenant: host:port for the admission webhook at "+webhook.Path+", by which the "+
			"API server refuses wrong parameters of claims when they are written; 0 serves none")
	f.StringVar(&o.webhook.CertDir, "webhook-cert-dir", "",
		"directory with tls.crt and tls.key for --webhook-bind-address, followed when they change; "+
			"without them the API server gets no answers")
	f.StringVar(&o.tracingEndpoint, "tracing-endpoint", "", tracing.EndpointUsage)
}

// addWorkFlags adds how fast the program works, and how long it waits.
func (o *options) addWorkFlags(f *pflag.FlagSet) {
	f.Float32Var(&o.apiQPS, "kube-api-qps", 200, "requests per second to the API server, over time")
	f.IntVar(&o.apiBurst, "kube-api-burst", 400, "requests to the API server at once")
	f.DurationVar(&o.controller.ProvisionTimeout, "provision-timeout", 60*time.Second,
		"time from the creation of an XPUPort after which it is given up if its xPU never served it; "+
			"pods of BeforeBind pools then get another device")
	f.DurationVar(&o.controller.GangTimeout, "gang-timeout", 5*time.Minute,
		"time from the first allocation after which the claims of a PodGroup are given back if not all "+
			"of its Ports are up; it should be less than the scheduler's bindingTimeout, which is 10 min")
	f.DurationVar(&o.controller.AgentTimeout, "agent-timeout", 15*time.Second,
		"time that an OPI agent has for one port or network before it is asked again")
	f.DurationVar(&o.controller.ResyncPeriod, "resync-period", 3*time.Minute,
		"how often all that an OPI agent has is compared with what is wanted, up to a quarter longer")
}

// addTenantFlags adds what bounds each tenant of role broker.
func (o *options) addTenantFlags(f *pflag.FlagSet) {
	l, those := &o.limits, broker.DefaultLimits()
	f.IntVar(&l.Ports, "tenant-ports", those.Ports,
		"role broker: how many XPUPorts a tenant may have whose XPUTenant has no maxPorts")
	f.IntVar(&l.Nodes, "tenant-nodes", those.Nodes,
		"role broker: how many XPUNodes a tenant may have whose XPUTenant has no maxNodes")
	f.IntVar(&l.ObjectBytes, "tenant-object-bytes", those.ObjectBytes,
		"role broker: how many bytes of JSON an object of a tenant may have that is carried over")
	f.IntVar(&l.Objects, "tenant-objects", those.Objects,
		"role broker: how many objects of a kind are read of a tenant's cluster")
	f.IntVar(&l.CacheBytes, "tenant-cache-bytes", those.CacheBytes,
		"role broker: how many bytes of JSON all objects have together that are kept of a "+
			"tenant's cluster")
	f.IntVar(&l.AnswerBytes, "tenant-answer-bytes", those.AnswerBytes,
		"role broker: how many bytes an answer of a tenant's API server may have: an object, 50 "+
			"of a list, or a change")
	f.IntVar(&l.BytesPerSecond, "tenant-bytes-per-second", those.BytesPerSecond,
		"role broker: how many bytes are read of a tenant's API server in a second")
	f.IntVar(&l.RequestsPerSecond, "tenant-requests-per-second", those.RequestsPerSecond,
		"role broker: how often a tenant's API server is asked in a second, and how many changes "+
			"are taken from it")
}

// roleBroker is the role of package broker. Package controller has the others.
const roleBroker = "broker"

func (o *options) validate() error {
	roles := []string{
		string(controller.RoleAll), string(controller.RoleTenant), string(controller.RoleInfra),
		roleBroker,
	}
	if !slices.Contains(roles, o.role) {
		return fmt.Errorf("--role: %q must be one of %s", o.role, strings.Join(roles, ", "))
	}
	if o.controller.Namespace == "" {
		return errors.New("--namespace: set it, or $POD_NAMESPACE")
	}

	if o.controller.ProvisionTimeout <= 0 || o.controller.AgentTimeout <= 0 ||
		o.controller.ResyncPeriod <= 0 || o.controller.GangTimeout <= 0 {
		return errors.New("--provision-timeout, --agent-timeout, --gang-timeout and " +
			"--resync-period must be more than 0")
	}

	if after := o.controller.TaintRulesAfter; after != nil && (*after < 0 ||
		o.role != string(controller.RoleAll) && o.role != string(controller.RoleTenant)) {
		return errors.New("--device-taint-rules-after: must not be negative, and is for roles all and " +
			"tenant, whose clusters have the devices")
	}

	if err := o.validateWebhook(); err != nil {
		return err
	}

	if err := o.limits.Validate(); err != nil {
		return err
	}

	if address := o.manager.PprofBindAddress; address != "" && address != "0" {
		if err := profiles.CheckAddress(address); err != nil {
			return fmt.Errorf("--pprof-bind-address: %w", err)
		}
	}

	return nil
}

// hasWebhook reports whether the webhook is served.
func (o *options) hasWebhook() bool { return o.webhook.Address != "" && o.webhook.Address != "0" }

func (o *options) validateWebhook() error {
	if !o.hasWebhook() {
		return nil
	}
	if o.webhook.CertDir == "" {
		return errors.New("--webhook-bind-address: needs --webhook-cert-dir, because an API server " +
			"asks webhooks by TLS only")
	}
	if o.role != string(controller.RoleAll) && o.role != string(controller.RoleTenant) {
		return fmt.Errorf("--webhook-bind-address: role %s sees no claims; give it to %s or %s", o.role,
			controller.RoleAll, controller.RoleTenant)
	}
	return nil
}

func run(ctx context.Context, o options) error {
	if err := o.validate(); err != nil {
		return err
	}

	log, err := o.logs.Logger(os.Stderr)
	if err != nil {
		return err
	}
	ctrl.SetLogger(log)
	klog.SetLogger(log)

	mgr, err := o.newManager(log)
	if err != nil {
		return err
	}

	metrics.Registry.MustRegister(monitoring.NewBuildInfo("xpu-controller"))
	o.controller.Tracer, err = tracing.Dial(ctx, o.tracingEndpoint, o.name(), log)
	if err != nil {
		return fmt.Errorf("--tracing-endpoint: %w", err)
	}
	defer o.controller.Tracer.Stop(ctx)

	log.Info("starting", "version", version.String(), "role", o.role, "namespace",
		o.controller.Namespace)
	installation, err := controller.Installation(ctx, mgr.GetAPIReader())
	if err != nil {
		return err
	}

	o.controller.Installation = installation
	if o.role == roleBroker {
		return o.runBroker(ctx, mgr)
	}
	return o.runController(ctx, mgr)
}

// name is the name of the program in its role: of its Lease, and for the API server and traces.
func (o *options) name() string {
	if o.role == roleBroker {
		return "xpu-broker"
	}
	return "xpu-controller"
}

// newManager returns the manager of the role, which reads and writes the cluster.
func (o *options) newManager(log logr.Logger) (ctrl.Manager, error) {
	config, err := clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config = rest.AddUserAgent(config, o.name())
	config.QPS, config.Burst = o.apiQPS, o.apiBurst

	if o.role == roleBroker {
		o.manager.Cache = broker.CacheOptions(o.controller.Namespace, o.profiles != "")
		o.manager.Scheme, err = broker.Scheme()
	} else {
		o.manager.Cache = controller.CacheOptions(o.controller.Namespace)
		o.manager.Scheme, err = controller.Scheme()
	}
	if err != nil {
		return nil, err
	}

	o.manager.Logger = log
	o.manager.LeaderElectionID = o.name()
	o.manager.LeaderElectionNamespace = o.controller.Namespace
	o.manager.LeaderElectionReleaseOnCancel = true // the process ends right after
	o.manager.LeaseDuration, o.manager.RenewDeadline = new(leaseDuration), new(renewDeadline)
	o.manager.RetryPeriod = new(retryPeriod)
	if o.manager.Metrics.SecureServing {
		o.manager.Metrics.FilterProvider = reviewed
	}

	mgr, err := ctrl.NewManager(config, o.manager)
	if err != nil {
		return nil, fmt.Errorf("manager: %w", err)
	}
	return mgr, addChecks(mgr)
}

// runController runs the reconcilers of a role other than the broker's until ctx ends.
func (o *options) runController(ctx context.Context, mgr ctrl.Manager) error {
	o.controller.Role, o.controller.Registerer = controller.Role(o.role), metrics.Registry
	if o.manager.LeaderElection {
		host, err := os.Hostname() // as the leader election of controller-runtime does
		if err != nil {
			return fmt.Errorf("leader election: %w", err)
		}
		o.controller.Fence = controller.NewFence(mgr.GetAPIReader(),
			client.ObjectKey{Namespace: o.controller.Namespace, Name: o.name()}, host)
	}

	if err := controller.Setup(ctx, mgr, o.controller); err != nil {
		return err
	}

	if o.hasWebhook() {
		o.webhook.Registerer, o.webhook.Log = metrics.Registry, mgr.GetLogger().WithName("webhook")
		if err := mgr.Add(webhook.New(o.webhook)); err != nil {
			return fmt.Errorf("webhook: %w", err)
		}
	}

	return mgr.Start(ctx)
}

// runBroker runs the broker until ctx ends.
func (o *options) runBroker(ctx context.Context, mgr ctrl.Manager) error {
	settings := broker.Options{
		Namespace: o.controller.Namespace, Identity: string(o.controller.Installation),
		Registerer: metrics.Registry, Limits: o.limits,
	}
	if o.profiles != "" {
		var err error
		if settings.ProfileAccess, err = access.NewFromFile(o.profiles); err != nil {
			return fmt.Errorf("--clusterprofile-provider-file: %w", err)
		}
	}

	members := broker.NewMembers()
	all, err := mcmanager.WithMultiCluster(mgr, members)
	if err != nil {
		return fmt.Errorf("manager: %w", err)
	}
	if err := broker.Setup(ctx, all, members, settings); err != nil {
		return err
	}
	return all.Start(ctx)
}

// reviewed returns the filter of the manager's metrics, which lets those read them that the API
// server lets get /metrics.
func reviewed(config *rest.Config, _ *http.Client) (metricsserver.Filter, error) {
	return func(log logr.Logger, metrics http.Handler) (http.Handler, error) {
		return secure.Handler(config, metrics, log)
	}, nil
}

func addChecks(mgr ctrl.Manager) error {
	ready := func(r *http.Request) error {
		ctx, cancel := context.WithTimeout(r.Context(), time.Second)
		defer cancel()
		if !mgr.GetCache().WaitForCacheSync(ctx) {
			return errors.New("the caches are not filled yet")
		}
		return nil
	}
	return errors.Join(mgr.AddHealthzCheck("ping", healthz.Ping),
		mgr.AddReadyzCheck("caches", ready))
}
