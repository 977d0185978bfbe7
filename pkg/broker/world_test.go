// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	"sigs.k8s.io/multicluster-runtime/providers/kubeconfig"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// Namespaces of the manifests.
const (
	systemNamespace  = "xpu-system"
	tenantsNamespace = "xpu-tenants"
)

// apiServers has the API servers of the infra cluster and of two tenants' clusters, by name. It is
// nil without KUBEBUILDER_ASSETS.
var apiServers map[string]*apiServer

// apiServer is an API server with the product's manifests.
type apiServer struct {
	*envtest.Environment
	client client.Client // as an administrator, not cached
}

// manifests are the manifests installed in each cluster, relative to deploy.
var manifests = map[string][]string{
	"infra": {"namespace/namespace.yaml", "infra/rbac.yaml", "infra/broker-rbac.yaml",
		"controller/policy.yaml"},
	"a": {"namespace/namespace.yaml", "tenant/rbac.yaml", "member/rbac.yaml",
		"member/policy.yaml", "controller/policy.yaml"},
	"b": {"namespace/namespace.yaml", "tenant/rbac.yaml", "member/rbac.yaml",
		"member/policy.yaml", "controller/policy.yaml"},
}

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	if !needs.HasKubernetes() {
		return m.Run()
	}

	var mu sync.Mutex
	var started sync.WaitGroup
	var errs []error
	apiServers = map[string]*apiServer{}
	for name, files := range manifests {
		started.Go(func() {
			s, err := startAPIServer(files)
			mu.Lock()
			defer mu.Unlock()
			apiServers[name], errs = s, append(errs, err)
		})
	}

	started.Wait()
	defer func() {
		for name, s := range apiServers {
			if err := s.Stop(); err != nil {
				fmt.Fprintln(os.Stderr, "API server of", name, err)
			}
		}
	}()

	if err := errors.Join(errs...); err != nil {
		fmt.Fprintln(os.Stderr, "API servers for tests:", err)
		return 1
	}

	return m.Run()
}

func startAPIServer(files []string) (*apiServer, error) {
	s := &apiServer{Environment: &envtest.Environment{
		CRDDirectoryPaths:        []string{filepath.Join("..", "..", "deploy", "crds")},
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: 2 * time.Minute,
	}}

	started, err := s.Start()
	if err != nil {
		return s, err
	}

	started.QPS = -1
	scheme, err := controller.Scheme()
	if err != nil {
		return s, err
	}
	if s.client, err = client.New(started, client.Options{Scheme: scheme}); err != nil {
		return s, err
	}

	for _, file := range files {
		if err := s.install(filepath.Join("..", "..", "deploy", file)); err != nil {
			return s, err
		}
	}

	return s, nil
}

// install creates the objects of a manifest.
func (s *apiServer) install(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()

	for decoder := yaml.NewYAMLOrJSONDecoder(file, 4096); ; {
		var object unstructured.Unstructured
		if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}

		if object.Object == nil {
			continue
		}
		if err := s.client.Create(context.Background(), &object); err != nil &&
			!apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
}

// configFor returns a client configuration with a token of the ServiceAccount.
func (s *apiServer) configFor(ctx context.Context, namespace, name string) (*rest.Config, error) {
	account := &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
	}
	request := &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](3600)},
	}
	if err := s.client.SubResource("token").Create(ctx, account, request); err != nil {
		return nil, fmt.Errorf("token of ServiceAccount %s/%s: %w", namespace, name, err)
	}

	c := rest.AnonymousClientConfig(s.Config)
	c.BearerToken, c.QPS = request.Status.Token, -1
	return c, nil
}

// world is an infra cluster and two tenants' clusters, each with a controller, and a broker.
type world struct {
	*testing.T
	infra, a, b *testCluster
	stopBroker  func()
}

// testCluster is one of these clusters, used as its administrator.
type testCluster struct {
	*testing.T
	*apiServer
	client.Client
	name string
	stop func() // stops the controller
	link *link  // the broker's way to it, nil if direct
}

func newWorld(t *testing.T) *world {
	t.Helper()
	needs.Kubernetes(t)

	w := &world{T: t}
	t.Cleanup(func() { // last, when nothing is running any more
		w.infra.sweep()
		w.a.sweep()
		w.b.sweep()
	})

	for name, at := range map[string]**testCluster{"infra": &w.infra, "a": &w.a, "b": &w.b} {
		*at = &testCluster{
			T: t, apiServer: apiServers[name], Client: apiServers[name].client, name: name,
		}
	}

	w.infra.startController(controller.RoleInfra)
	w.a.startController(controller.RoleTenant)
	w.b.startController(controller.RoleTenant)
	w.startBroker()

	return w
}

// run runs a manager until stop is called or the test ends.
func (s *testCluster) run(start func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- start(ctx) }()

	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.Errorf("%s: %v", s.name, err)
		}
	})

	s.Cleanup(stop)
	return stop
}

func (s *testCluster) startController(role controller.Role) {
	s.Helper()
	rights, err := s.configFor(s.Context(), systemNamespace, "xpu-controller")
	if err != nil {
		s.Fatal(err)
	}

	mgr, err := ctrl.NewManager(rights, ctrl.Options{
		Scheme: s.Scheme(), Logger: testr.New(s.T).WithName(s.name),
		Cache:      controller.CacheOptions(systemNamespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})

	if err != nil {
		s.Fatal(err)
	}

	err = controller.Setup(context.Background(), mgr, controller.Options{
		Role: role, Installation: opitest.Installation, Namespace: systemNamespace,
		Registerer:   prometheus.NewRegistry(),
		CollectGrace: 100 * time.Millisecond, BusyGrace: 100 * time.Millisecond,
		Debounce:    50 * time.Millisecond,
		FailedGrace: 50 * time.Millisecond, BrokerGrace: brokerGrace,
		BridgeGrace: 100 * time.Millisecond, AwayStep: time.Second,
	})

	if err != nil {
		s.Fatal(err)
	}

	s.stop = s.run(mgr.Start)
}

// renewPeriod and brokerGrace are short to make tests fast.
const (
	renewPeriod = 200 * time.Millisecond
	brokerGrace = 2 * time.Second
)

func (w *world) startBroker() {
	w.Helper()
	w.stopBroker = w.infra.startBroker("infra-1", nil)
}

// brokerScheme returns the program's scheme.
func brokerScheme(t testing.TB) *runtime.Scheme {
	t.Helper()
	scheme, err := Scheme()
	if err != nil {
		t.Fatal(err)
	}
	return scheme
}

// startBroker runs a broker. If wrap is not nil, its requests pass through the transport that wrap
// returns.
func (s *testCluster) startBroker(identity string, wrap transport.WrapperFunc) (stop func()) {
	s.Helper()
	return s.startBrokerWith(Options{Identity: identity}, wrap)
}

func (s *testCluster) startBrokerWith(o Options, wrap transport.WrapperFunc) (stop func()) {
	s.Helper()
	rights, err := s.configFor(s.Context(), tenantsNamespace, "xpu-broker")
	if err != nil {
		s.Fatal(err)
	}

	if s.link != nil {
		rights.Host = "https://" + s.link.address()
	}

	members := NewMembers()
	if wrap != nil {
		rights.Wrap(wrap)
		members.wrap = func(c *rest.Config) { c.Wrap(wrap) }
	}

	mgr, err := mcmanager.New(rights, members, ctrl.Options{
		Scheme: brokerScheme(s.T), Logger: testr.New(s.T).WithName("broker"),
		Cache:      CacheOptions(tenantsNamespace, o.ProfileAccess != nil),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})

	if err != nil {
		s.Fatal(err)
	}

	o.Namespace, o.Registerer, o.RenewPeriod = tenantsNamespace, prometheus.NewRegistry(), renewPeriod
	o.JoinTimeout, o.RequestTimeout = 5*time.Second, 5*time.Second
	err = Setup(context.Background(), mgr, members, o)
	if err != nil {
		s.Fatal(err)
	}

	return s.run(mgr.Start)
}

// sweep removes objects that would disturb the next test.
func (s *testCluster) sweep() {
	ctx := context.Background()
	for _, all := range []client.ObjectList{
		&resourceapi.ResourceClaimList{}, &v1alpha1.XPUPortList{}, &v1alpha1.XPUNetworkList{},
		&v1alpha1.XPUList{}, &v1alpha1.DevicePoolList{},
		&v1alpha1.XPUNodeList{}, &v1alpha1.XPUTenantList{}, &coordinationv1.LeaseList{},
	} {
		if err := s.List(ctx, all); err != nil {
			s.Errorf("sweep: %v", err)
		}
		_ = meta.EachListItem(all, func(item runtime.Object) error {
			o := item.(client.Object)
			if _, isLease := o.(*coordinationv1.Lease); isLease &&
				o.GetNamespace() != systemNamespace {
				return nil
			}

			if len(o.GetFinalizers()) > 0 {
				before := o.DeepCopyObject().(client.Object)
				o.SetFinalizers(nil)
				if err := s.Patch(ctx, o,
					client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
					s.Errorf("sweep: %v", err)
				}
			}

			if err := s.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
				s.Errorf("sweep: %v", err)
			}

			return nil
		})
	}

	secrets := &corev1.Secret{}
	if err := s.DeleteAllOf(ctx, secrets, client.InNamespace(tenantsNamespace)); err != nil {
		s.Errorf("sweep: %v", err)
	}
}

func (s *testCluster) eventually(what string, check func() error) {
	s.Helper()
	must.EventuallySucceed(s, s.name+": "+what, check)
}

func (s *testCluster) create(o client.Object) {
	s.Helper()
	if err := s.Create(context.Background(), o); err != nil {
		s.Fatalf("%s: create %T %s: %v", s.name, o, o.GetName(), err)
	}
}

func (s *testCluster) delete(o client.Object) {
	s.Helper()
	if err := s.Delete(context.Background(), o); client.IgnoreNotFound(err) != nil {
		s.Fatalf("%s: delete %T %s: %v", s.name, o, o.GetName(), err)
	}
}

func (s *testCluster) get(o client.Object) error {
	return s.Get(context.Background(), client.ObjectKeyFromObject(o), o)
}

// gone waits until the object does not exist, or another one with its name does.
func (s *testCluster) gone(o client.Object) {
	s.Helper()
	uid := o.GetUID()
	s.eventually(fmt.Sprintf("%T %s is gone", o, o.GetName()), func() error {
		if err := s.get(o); !apierrors.IsNotFound(err) && (err != nil || o.GetUID() == uid) {
			return cmp.Or(err, fmt.Errorf("it is still there: %+v", o))
		}
		return nil
	})
}

// waitForReason waits until a condition of the object has the reason.
func (s *testCluster) waitForReason(
	o client.Object, conditions func() []metav1.Condition, kind, reason string,
) {
	s.Helper()
	s.eventually(fmt.Sprintf("%T %s is %s", o, o.GetName(), reason), func() error {
		if err := s.get(o); err != nil {
			return err
		}
		if found := meta.FindStatusCondition(conditions(), kind); found == nil ||
			found.Reason != reason {
			return fmt.Errorf("condition %s: %+v of %+v", kind, found, o)
		}
		return nil
	})
}

func (s *testCluster) portIs(port *v1alpha1.XPUPort, reason string) {
	s.Helper()
	s.waitForReason(port, func() []metav1.Condition {
		return port.Status.Conditions
	}, v1alpha1.ConditionReady, reason)
}

func (s *testCluster) networkIs(network *v1alpha1.XPUNetwork, reason string) {
	s.Helper()
	s.waitForReason(network, func() []metav1.Condition {
		return network.Status.Conditions
	}, v1alpha1.ConditionReady, reason)
}

func (s *testCluster) tenantIs(tenant *v1alpha1.XPUTenant, kind, reason string) {
	s.Helper()
	s.waitForReason(tenant, func() []metav1.Condition { return tenant.Status.Conditions }, kind,
		reason)
}

// joins creates the XPUTenant of a cluster, and the Secret with a token of its ServiceAccount.
func (w *world) joins(s *testCluster, change func(*v1alpha1.XPUTenantSpec)) *v1alpha1.XPUTenant {
	w.Helper()
	rights, err := s.configFor(w.Context(), systemNamespace, "xpu-broker")
	if err != nil {
		w.Fatal(err)
	}

	if s.link != nil {
		rights.Host = "https://" + s.link.address()
	}

	w.infra.create(memberSecret(w.T, s.name, rights))
	first := map[string]int32{"a": 1000, "b": 2000}[s.name]
	tenant := &v1alpha1.XPUTenant{ObjectMeta: metav1.ObjectMeta{Name: s.name},
		Spec: v1alpha1.XPUTenantSpec{
			Member:         v1alpha1.TenantMember{SecretName: s.name},
			DeletionPolicy: v1alpha1.DeletionDelete,
			XPUs: v1alpha1.TenantXPUs{
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"rack": s.name}},
			},
			VLANs: v1alpha1.VLANRange{First: first, Last: first + 9}, VNIs: &v1alpha1.VNIRange{
				First: 10 * first, Last: 10*first + 9,
			},
		}}

	if change != nil {
		change(&tenant.Spec)
	}

	w.infra.create(tenant)
	return tenant
}

// memberSecret returns a Secret with a kubeconfig.
func memberSecret(t testing.TB, name string, rights *rest.Config) *corev1.Secret {
	t.Helper()
	c := clientcmdapi.NewConfig()
	c.Clusters["member"] = &clientcmdapi.Cluster{
		Server: rights.Host, CertificateAuthorityData: rights.CAData,
	}
	c.AuthInfos["broker"] = &clientcmdapi.AuthInfo{Token: rights.BearerToken}
	c.Contexts["member"] = &clientcmdapi.Context{
		Cluster: "member", AuthInfo: "broker", Namespace: systemNamespace,
	}
	c.CurrentContext = "member"
	data, err := clientcmd.Write(*c)
	if err != nil {
		t.Fatal(err)
	}

	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: tenantsNamespace, Name: name,
			Labels: map[string]string{kubeconfig.DefaultKubeconfigSecretLabel: "true"},
		},
		Data: map[string][]byte{kubeconfig.DefaultKubeconfigSecretKey: data},
	}
}

const testPF = pci.Address("0000:3b:00.0")

// vf returns the n-th VF of the PF.
func vf(n int) function.ID {
	return function.ID{Address: pci.Address(fmt.Sprintf("0000:3b:%02x.%d", 2+n/8, n%8))}
}

// node creates an XPUNode with a card, like an agent.
func (s *testCluster) node(name, serial string) *v1alpha1.XPUNode {
	s.Helper()
	n := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: v1alpha1.XPUNodeStatus{PFs: []v1alpha1.XPUNodePF{
			{Address: string(testPF), Serial: serial, VFOffset: 16, VFStride: 1, TotalVFs: 64},
		}}}
	s.create(n)
	return n
}

// xpu creates an XPU in the infra cluster, in a tenant's rack. Its agent reports only the serial
// number of the card.
func (w *world) xpu(name, rack, serial string) (*v1alpha1.XPU, *opitest.Agent) {
	w.Helper()
	agent := opitest.Start(w.T)
	agent.Set(func(b *opitest.Behaviour) { b.HostPFs = []string{"host-pf c1pf0 serial " + serial} })

	x := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"rack": rack}},
		Spec:       v1alpha1.XPUSpec{Endpoint: agent.Config().Endpoint, Insecure: true},
	}

	w.infra.create(x)
	return x, agent
}

// network creates an XPUNetwork like a tenant's administrator.
func (s *testCluster) network(name string, vlan int32, subnets ...string) *v1alpha1.XPUNetwork {
	s.Helper()
	n := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: vlan, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			},
			Subnets: subnets,
		}}

	s.create(n)
	return n
}

// pool creates a DevicePool whose interfaces join the network.
func (s *testCluster) pool(name, network string) {
	s.Helper()
	s.create(&v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}, Network: network,
		}})
}

// claim creates a claim in namespace default and allocates it like the scheduler. It returns the
// claim's XPUPort, which may not exist yet.
func (s *testCluster) claim(
	name, node, pool string, f function.ID, config ...resourceapi.DeviceAllocationConfiguration,
) (*resourceapi.ResourceClaim, *v1alpha1.XPUPort) {
	s.Helper()
	o := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
			{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic"}},
		}}},
	}

	s.create(o)
	o.Status.Allocation = &resourceapi.AllocationResult{
		AllocationTimestamp: ptr.To(metav1.Now()),
		Devices: resourceapi.DeviceAllocationResult{Config: config, Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "nic", Driver: v1alpha1.GroupName, Device: f.DeviceName(),
			Pool: claim.PoolID{Node: node, PF: testPF, DevicePool: pool}.String(),
		}}},
	}

	o.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{Resource: "pods", Name: "pod-" + name, UID: "pod-" + o.UID},
	}
	if err := s.Status().Update(context.Background(), o); err != nil {
		s.Fatal(err)
	}

	return o, &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: claim.PortName(node, f)},
	}
}

// copied returns the copy of a tenant's XPUPort.
func (w *world) copied(tenant string, port *v1alpha1.XPUPort) *v1alpha1.XPUPort {
	return &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{
		Namespace: tenantsNamespace, Name: scopedPort(tenant, client.ObjectKeyFromObject(port)),
	}}
}

// scene joins a tenant with a node, a card, a network and a pool.
func (w *world) scene(
	s *testCluster, change func(*v1alpha1.XPUTenantSpec),
) (*v1alpha1.XPUTenant, *opitest.Agent) {
	w.Helper()
	s.node("node1", "MT-"+s.name)
	s.network("blue", 10, "10.1.0.0/24")
	s.pool("fast", "blue")
	_, agent := w.xpu("card-"+s.name, s.name, "MT-"+s.name)
	tenant := w.joins(s, change)
	s.xpuIs("card-"+s.name, v1alpha1.ReasonConnected)
	return tenant, agent
}

// xpuIs waits until the condition Ready of an XPU has the reason.
func (s *testCluster) xpuIs(name, reason string) {
	s.Helper()
	xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: name}}
	s.waitForReason(xpu, func() []metav1.Condition {
		return xpu.Status.Conditions
	}, v1alpha1.ConditionReady, reason)
}

// serves waits until an agent has exactly these ports.
func (w *world) serves(agent *opitest.Agent, want ...string) {
	w.Helper()
	w.infra.eventually(fmt.Sprintf("the agent has the ports %v", want), func() error {
		if got := agent.Ports(); !slices.Equal(got, want) {
			return fmt.Errorf("it has %v", got)
		}
		return nil
	})
}
