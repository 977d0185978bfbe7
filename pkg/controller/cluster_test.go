// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// apiServer is the one API server of the package's tests, nil if there is none. Kinds of the
// cluster are shared, so the tests run one after the other, each with its own controller.
var apiServer *rest.Config

// controllerUser is the controller's access to it, which has the rights of deploy/controller and no
// others.
var controllerUser *rest.Config

// namespaceRules are its rights in its own namespace.
var namespaceRules []rbacv1.PolicyRule

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	if os.Getenv(plan.GuestVariable) != "" {
		if err := useGuests(); err != nil {
			fmt.Fprintln(os.Stderr, "API server outside of the guest:", err)
			return 1
		}
		return m.Run()
	}
	if !needs.HasKubernetes() {
		return m.Run()
	}

	environment := &envtest.Environment{
		CRDDirectoryPaths:        []string{filepath.Join("..", "..", "deploy", "crds")},
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: time.Minute,
	}

	environment.ControlPlane.GetAPIServer().Configure().
		Append("feature-gates", "GenericWorkload=true", "DRAWorkloadResourceClaims=true").
		Append("runtime-config", "scheduling.k8s.io/v1beta1=true")
	started, err := environment.Start()
	if err != nil {
		fmt.Fprintln(os.Stderr, "API server for tests:", err)
		return 1
	}

	started.QPS, started.Burst = -1, 0
	apiServer = started
	if err := addController(environment); err != nil {
		fmt.Fprintln(os.Stderr, "user for the controller:", err)
		return 1
	}

	code := m.Run()
	if err := environment.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, "API server for tests:", err)
		return 1
	}

	return code
}

// useGuests uses the API server that the guests of test/qemu have. The controller may do everything
// there.
func useGuests() error {
	config, err := clientcmd.BuildConfigFromFlags("", plan.AdminKubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	apiServer, controllerUser = config, config
	return nil
}

const controllerUserName = "controller-under-test"

func addController(environment *envtest.Environment) error {
	user, err := environment.AddUser(envtest.User{Name: controllerUserName}, &rest.Config{QPS: -1})
	if err != nil {
		return err
	}

	controllerUser = user.Config()
	direct, err := client.New(apiServer, client.Options{})
	if err != nil {
		return err
	}

	role := &rbacv1.ClusterRole{}
	own := &rbacv1.Role{}
	if err := readRights(role, own); err != nil {
		return err
	}

	role.ObjectMeta = metav1.ObjectMeta{Name: controllerUserName}
	namespaceRules = own.Rules

	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: role.ObjectMeta,
		RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name,
		},
		Subjects: []rbacv1.Subject{
			{APIGroup: rbacv1.GroupName, Kind: "User", Name: controllerUserName},
		},
	}

	return errors.Join(direct.Create(context.Background(), role),
		direct.Create(context.Background(), binding))
}

// readRights reads the objects of their kinds that an installation gives the controller.
func readRights(objects ...any) error {
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "controller", "rbac.yaml"))
	if err != nil {
		return err
	}

	for _, document := range strings.Split(string(text), "\n---\n") {
		for _, o := range objects {
			kind := reflect.TypeOf(o).Elem().Name()
			if !strings.Contains(document, "\nkind: "+kind+"\n") {
				continue
			}
			if err := yaml.UnmarshalStrict([]byte(document), o); err != nil {
				return fmt.Errorf("%s of deploy/controller: %w", kind, err)
			}
		}
	}

	return nil
}

// cluster is a namespace of the API server, and a controller that runs until the test ends.
type cluster struct {
	testing.TB
	client.Client // not cached
	namespace     string
	node          string // no other test has one of this name
	writes        *writes
	registry      *prometheus.Registry
	stop          func()
}

// writes are the controller's.
type writes struct {
	mu   sync.Mutex
	made []string // "create XPUPort", "patch XPUPort", "patch status XPUPort"
}

func (w *writes) note(verb string, o any, scheme *runtime.Scheme) {
	w.mu.Lock()
	defer w.mu.Unlock()

	kind := "?"
	switch o := o.(type) {
	case runtime.Object:
		kinds, _, _ := scheme.ObjectKinds(o)
		kind = kinds[0].Kind
	case interface{ GetKind() *string }:
		kind = *o.GetKind()
	}

	w.made = append(w.made, verb+" "+kind)
}

// of are the writes to the kinds, in order.
func (w *writes) of(kinds ...string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()

	var found []string
	for _, one := range w.made {
		if slices.ContainsFunc(kinds, func(kind string) bool {
			return strings.HasSuffix(one, " "+kind)
		}) {
			found = append(found, one)
		}
	}

	return found
}

func (w *writes) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.made = nil
}

func (w *writes) wrap(c client.WithWatch) client.WithWatch {
	return interceptor.NewClient(c, interceptor.Funcs{
		Create: func(
			ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption,
		) error {
			w.note("create", o, c.Scheme())
			return c.Create(ctx, o, opts...)
		},
		Delete: func(
			ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption,
		) error {
			w.note("delete", o, c.Scheme())
			return c.Delete(ctx, o, opts...)
		},
		Patch: func(
			ctx context.Context, c client.WithWatch, o client.Object, p client.Patch,
			opts ...client.PatchOption,
		) error {
			w.note("patch", o, c.Scheme())
			return c.Patch(ctx, o, p, opts...)
		},
		Update: func(
			ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption,
		) error {
			w.note("update", o, c.Scheme())
			return c.Update(ctx, o, opts...)
		},
		SubResourcePatch: func(
			ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch,
			opts ...client.SubResourcePatchOption,
		) error {
			w.note("patch "+sub, o, c.Scheme())
			return c.SubResource(sub).Patch(ctx, o, p, opts...)
		},
		SubResourceUpdate: func(
			ctx context.Context, c client.Client, sub string, o client.Object,
			opts ...client.SubResourceUpdateOption,
		) error {
			w.note("update "+sub, o, c.Scheme())
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
		SubResourceApply: func(
			ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration,
			opts ...client.SubResourceApplyOption,
		) error {
			w.note("apply "+sub, o, c.Scheme())
			return c.SubResource(sub).Apply(ctx, o, opts...)
		},
	})
}

// unwatched makes a client.Client a client.WithWatch, which the interceptor asks for; nothing
// watches through it.
type unwatched struct{ client.Client }

func (unwatched) Watch(
	context.Context, client.ObjectList, ...client.ListOption,
) (watch.Interface, error) {
	return nil, apierrors.NewMethodNotSupported(
		v1alpha1.SchemeGroupVersion.WithResource("any").GroupResource(), "watch",
	)
}

// newCluster starts a controller with quick defaults, changed by set.
func newCluster(t testing.TB, set func(*Options)) *cluster {
	t.Helper()
	if apiServer == nil {
		needs.Kubernetes(t)
	}

	scheme, err := Scheme()
	if err != nil {
		t.Fatal(err)
	}

	direct, err := client.New(apiServer, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}

	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "t-"}}
	if err := direct.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}

	c := &cluster{TB: t, Client: direct, namespace: namespace.Name, node: "node-" + namespace.Name,
		writes: &writes{}}
	t.Cleanup(c.sweep)

	own := metav1.ObjectMeta{Namespace: c.namespace, Name: controllerUserName}
	c.create(&rbacv1.Role{ObjectMeta: own, Rules: namespaceRules})

	c.create(&rbacv1.RoleBinding{
		ObjectMeta: own,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: own.Name},
		Subjects: []rbacv1.Subject{
			{APIGroup: rbacv1.GroupName, Kind: "User", Name: controllerUserName},
		},
	})

	c.start(set)
	return c
}

// start runs a controller until stop or the end of the test.
func (c *cluster) start(set func(*Options)) {
	c.Helper()
	c.registry = prometheus.NewRegistry()
	o := Options{
		Installation: opitest.Installation, Namespace: c.namespace, Registerer: c.registry,
		CollectGrace: 100 * time.Millisecond, BusyGrace: 100 * time.Millisecond,
		TaintGrace: 20 * time.Second, AheadGrace: 300 * time.Millisecond, BridgeGrace: time.Second,
		Debounce: 50 * time.Millisecond, FailedGrace: 50 * time.Millisecond,
	}

	if set != nil {
		set(&o)
	}

	mgr, err := ctrl.NewManager(controllerUser, ctrl.Options{
		Scheme:     c.Scheme(),
		Logger:     c.logger(),
		Cache:      CacheOptions(c.namespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: ptr.To(true)},
		NewClient: func(config *rest.Config, options client.Options) (client.Client, error) {
			cached, err := client.New(config, options)
			return c.writes.wrap(unwatched{cached}), err
		},
	})

	if err != nil {
		c.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	if err := Setup(ctx, mgr, o); err != nil {
		c.Fatal(err)
	}

	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()

	c.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			c.Errorf("controller: %v", err)
		}
	})

	c.Cleanup(func() { c.stop() })
}

// sweep removes what would disturb the next test.
func (c *cluster) sweep() {
	ctx := context.Background()
	for _, all := range []client.ObjectList{
		&resourceapi.ResourceClaimList{}, &v1alpha1.XPUPortList{}, &v1alpha1.XPUNetworkList{},
		&v1alpha1.XPUList{}, &v1alpha1.DevicePoolList{}, &v1alpha1.XPUNodeList{},
		&resourceapi.ResourceSliceList{},
	} {
		if err := c.List(ctx, all); err != nil {
			c.Errorf("sweep: %v", err)
		}
		_ = meta.EachListItem(all, func(item runtime.Object) error {
			o := item.(client.Object)
			if len(o.GetFinalizers()) > 0 {
				before := o.DeepCopyObject().(client.Object)
				o.SetFinalizers(nil)
				if err := c.Patch(ctx, o,
					client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
					c.Errorf("sweep: %v", err)
				}
			}

			if err := c.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
				c.Errorf("sweep: %v", err)
			}

			return nil
		})
	}
}

// eventually polls until the check finds nothing wrong.
func (c *cluster) eventually(what string, check func() error) {
	c.Helper()
	must.EventuallySucceed(c, what, check)
}

func (c *cluster) create(o client.Object) {
	c.Helper()
	if err := c.Create(context.Background(), o); err != nil {
		c.Fatal(err)
	}
}

func (c *cluster) delete(o client.Object) {
	c.Helper()
	if err := c.Delete(context.Background(), o); err != nil {
		c.Fatal(err)
	}
}

func (c *cluster) get(o client.Object) error {
	return c.Get(context.Background(), client.ObjectKeyFromObject(o), o)
}

// gone waits until there is no such object, or another one of its name.
func (c *cluster) gone(o client.Object) {
	c.Helper()
	uid := o.GetUID()
	c.eventually(fmt.Sprintf("%T %s is gone", o, o.GetName()), func() error {
		if err := c.get(o); !apierrors.IsNotFound(err) && (err != nil || o.GetUID() == uid) {
			return cmp.Or(err, fmt.Errorf("it is still there"))
		}
		return nil
	})
}

// xpu creates an XPU of the cluster's node for the agent.
func (c *cluster) xpu(name string, agent *opitest.Agent) *v1alpha1.XPU {
	c.Helper()
	return c.xpuOn(c.node, name, agent.Config().Endpoint)
}

// xpuOn creates an XPU of any node.
func (c *cluster) xpuOn(node, name, endpoint string) *v1alpha1.XPU {
	c.Helper()
	x := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.XPUSpec{
			NodeName: node, Endpoint: endpoint, Insecure: true,
		},
	}
	c.create(x)
	return x
}

func (c *cluster) network(name string, vlan int32, subnets ...string) *v1alpha1.XPUNetwork {
	c.Helper()
	n := &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.XPUNetworkSpec{
			VLAN: vlan, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			}, Subnets: subnets,
		},
	}

	c.create(n)
	return n
}

// pool creates a DevicePool whose interfaces join the network.
func (c *cluster) pool(name, network string) *v1alpha1.DevicePool {
	c.Helper()
	p := &v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}, Network: network,
			Allow: v1alpha1.PrivilegedFields(),
		},
	}

	c.create(p)
	return p
}

const testPF = pci.Address("0000:3b:00.0")

// vf is the n-th VF of the PF.
func vf(n int) function.ID {
	return function.ID{
		Address: pci.Address(fmt.Sprintf("0000:%02x:%02x.%d", 0x3b+n/240, 2+n%240/8, n%8)),
	}
}

// want is what a claim asks for.
type want struct {
	name       string
	namespace  string // empty is the cluster's
	node       string // empty is the cluster's
	pool       string // DevicePool
	function   function.ID
	pf         pci.Address // empty is testPF
	config     string      // JSON of the InterfaceConfig without its kind, empty for none
	ofClass    bool        // config is the DeviceClass's
	beforeBind bool
	pod        string // empty for none
	podUID     types.UID
	on         string // the node that the scheduler chose; empty is not said
	admin      bool   // with adminAccess
	share      types.UID
	second     secondFunction // another Function of the request
}

// secondFunction is the second Function of a claim. The zero value is none.
type secondFunction struct {
	pool     string
	pf       pci.Address // empty is testPF
	function function.ID
}

// claim creates a claim and allocates it as the scheduler would.
func (c *cluster) claim(w want) *resourceapi.ResourceClaim {
	c.Helper()
	o := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: cmp.Or(w.namespace, c.namespace), Name: w.name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
			{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic"}},
		}}},
	}

	c.create(o)
	return c.allocate(o, w)
}

func (c *cluster) allocate(o *resourceapi.ResourceClaim, w want) *resourceapi.ResourceClaim {
	c.Helper()
	result := resourceapi.DeviceRequestAllocationResult{
		Request: "nic", Driver: v1alpha1.GroupName,
		Pool: claim.PoolID{
			Node: cmp.Or(w.node, c.node), PF: cmp.Or(w.pf, testPF), DevicePool: w.pool,
		}.String(),
		Device: w.function.DeviceName(),
	}

	if w.admin {
		result.AdminAccess = &w.admin
	}

	if w.share != "" {
		result.ShareID = &w.share
	}

	if w.beforeBind {
		result.BindingConditions = []string{v1alpha1.ConditionProvisioned}
		result.BindingFailureConditions = []string{v1alpha1.ConditionProvisionFailed}
	}

	results := []resourceapi.DeviceRequestAllocationResult{result}
	if second := w.second; second.pool != "" {
		result.Pool = claim.PoolID{
			Node: cmp.Or(w.node, c.node), PF: cmp.Or(second.pf, testPF), DevicePool: second.pool,
		}.String()
		result.Device = second.function.DeviceName()
		results = append(results, result)
	}

	o.Status.Allocation = &resourceapi.AllocationResult{
		Devices:             resourceapi.DeviceAllocationResult{Results: results},
		AllocationTimestamp: ptr.To(metav1.Now()),
	}

	if w.on != "" {
		o.Status.Allocation.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{
				{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{w.on}},
			},
		}}}
	}

	if w.config != "" {
		raw := `{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig",` +
			strings.TrimPrefix(w.config, "{")
		source := resourceapi.AllocationConfigSourceClaim
		if w.ofClass {
			source = resourceapi.AllocationConfigSourceClass
		}

		o.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: source,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: v1alpha1.GroupName, Parameters: runtime.RawExtension{Raw: []byte(raw)},
			}},
		}}
	}

	if w.pod != "" {
		o.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: w.pod, UID: cmp.Or(w.podUID, "pod-"+o.UID)},
		}
	}

	if err := c.Status().Update(context.Background(), o); err != nil {
		c.Fatal(err)
	}

	return o
}

// stampOf is the time stamp of the claim's allocation, as its Ports have it in an annotation.
func stampOf(o *resourceapi.ResourceClaim) string {
	return o.Status.Allocation.AllocationTimestamp.UTC().Format(time.RFC3339)
}

// deallocate does what the scheduler does when a device failed, or the claim controller when the
// pod is done.
func (c *cluster) deallocate(o *resourceapi.ResourceClaim) {
	c.Helper()
	c.eventually("deallocate", func() error {
		if err := c.get(o); err != nil {
			return err
		}
		o.Status = resourceapi.ResourceClaimStatus{}
		return c.Status().Update(context.Background(), o)
	})
}

func (c *cluster) port(o *resourceapi.ResourceClaim, f function.ID) *v1alpha1.XPUPort {
	return &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: claim.PortName(c.node, f)},
	}
}

// up waits until the claim's Port is.
func (c *cluster) up(o *resourceapi.ResourceClaim, f function.ID) *v1alpha1.XPUPort {
	c.Helper()
	port := c.port(o, f)
	c.eventually("XPUPort "+port.Name+" is up for claim "+o.Name, func() error {
		if err := c.get(port); err != nil {
			return err
		}
		if port.Spec.Claim.UID != o.UID {
			return fmt.Errorf("it is for claim %s", port.Spec.Claim.Name)
		}
		return hasReason(port.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonUp, "")
	})

	return port
}

// portReason waits for the Port's Ready condition to have the reason, and a message with the text
// in it.
func (c *cluster) portReason(port *v1alpha1.XPUPort, reason, text string) {
	c.Helper()
	c.eventually("XPUPort "+port.Name+" is "+reason, func() error {
		if err := c.get(port); err != nil {
			return err
		}
		return hasReason(port.Status.Conditions, v1alpha1.ConditionReady, reason, text)
	})
}

func hasReason(conditions []metav1.Condition, conditionType, reason, text string) error {
	condition := meta.FindStatusCondition(conditions, conditionType)
	if condition == nil {
		return fmt.Errorf("no condition %s", conditionType)
	}
	if condition.Reason != reason || !strings.Contains(condition.Message, text) {
		return fmt.Errorf("condition %s is %s, %s: %s; want %s: ...%s...", conditionType,
			condition.Status, condition.Reason, condition.Message, reason, text)
	}

	if good := reason == v1alpha1.ReasonUp || reason == v1alpha1.ReasonAllMade ||
		reason == v1alpha1.ReasonPublished || reason == v1alpha1.ReasonConnected ||
		reason == v1alpha1.ReasonNoPortNeeded ||
		reason == v1alpha1.ReasonSupported; conditionType != v1alpha1.ConditionProvisionFailed &&
		good != (condition.Status == metav1.ConditionTrue) {
		return fmt.Errorf("condition %s has reason %s with status %s", conditionType, reason,
			condition.Status)
	}

	return nil
}

// claimReason waits for a condition of the claim's only device.
func (c *cluster) claimReason(o *resourceapi.ResourceClaim, conditionType, reason, text string) {
	c.Helper()
	c.eventually("ResourceClaim "+o.Name+" is "+reason, func() error {
		if err := c.get(o); err != nil {
			return err
		}
		if len(o.Status.Devices) != 1 {
			return fmt.Errorf("%d entries in status.devices", len(o.Status.Devices))
		}
		return hasReason(o.Status.Devices[0].Conditions, conditionType, reason, text)
	})
}

// claimQuiet waits until the controller has nothing to say about the claim's device.
func (c *cluster) claimQuiet(o *resourceapi.ResourceClaim) {
	c.Helper()
	c.eventually("ResourceClaim "+o.Name+" has no conditions", func() error {
		if err := c.get(o); err != nil {
			return err
		}

		for _, d := range o.Status.Devices {
			for _, conditionType := range []string{
				v1alpha1.ConditionProvisioned, v1alpha1.ConditionProvisionFailed,
			} {
				if condition := meta.FindStatusCondition(d.Conditions,
					conditionType); condition != nil {
					return fmt.Errorf("%+v", *condition)
				}
			}
		}

		return nil
	})
}

// told waits for an event about the object.
func (c *cluster) told(kind, name, reason string) {
	c.Helper()
	c.eventually(fmt.Sprintf("event %s about %s %s", reason, kind, name), func() error {
		var found eventsv1.EventList
		if err := c.List(context.Background(), &found); err != nil {
			return err
		}

		var seen []string
		for _, e := range found.Items {
			if e.Regarding.Kind == kind && e.Regarding.Name == name {
				if e.Reason == reason {
					return nil
				}
				seen = append(seen, e.Reason)
			}
		}

		return fmt.Errorf("there are only %q", seen)
	})
}

// has waits until the agent has exactly these ports.
func (c *cluster) has(agent *opitest.Agent, ids ...string) {
	c.Helper()
	c.eventually("ports at the agent", func() error {
		if got := agent.Ports(); !slices.Equal(got, ids) {
			return fmt.Errorf("it has %q, want %q", got, ids)
		}
		return nil
	})
}

// logger logs with -v only: controllers say a lot when they start.
func (c *cluster) logger() logr.Logger {
	if testing.Verbose() {
		return testr.NewWithInterface(c, testr.Options{})
	}
	return logr.Discard()
}
