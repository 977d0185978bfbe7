// SPDX-License-Identifier: Apache-2.0

package provisioning_test

import (
	"context"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning/provisioningtest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const node = "node"

// cluster is the one API server of the package's tests, which run one after the other. It is nil
// without kube-apiserver.
var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../../deploy", func(c *kubeapitest.Cluster) { cluster = c }))
}

func TestCRD(t *testing.T) {
	cluster.Need(t)
	provisioningtest.Suite(t,
		func(
			t *testing.T, agent *opitest.Agent, records *journal.Journal,
		) provisioning.Provisioner {
			declare(t, agent)
			startController(t)
			crd := newCRD(t, startAPI(t), records)
			inBackground(t, "reconciler", crd.Run)
			return crd
		})
}

// newCRD returns a CRD that takes every Function without a record in the journal as free.
func newCRD(t *testing.T, api provisioning.API, records *journal.Journal) *provisioning.CRD {
	return &provisioning.CRD{
		API: api, Journal: records, Node: node, Namespace: kubeapitest.AgentNamespace,
		InUse: func(function.ID) bool { return false }, Log: testr.New(t),
	}
}

func admin(t *testing.T) client.Client {
	t.Helper()
	c, err := kubeapitest.Client(cluster.Admin())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// declare creates the objects of the suite, and removes them and the Ports when the test ends. All
// that the test starts after declare has ended by then.
func declare(t *testing.T, agent *opitest.Agent) {
	t.Helper()
	c := admin(t)
	t.Cleanup(func() { sweep(t, c) })

	for _, o := range []client.Object{
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}},
		&v1alpha1.XPU{
			ObjectMeta: metav1.ObjectMeta{Name: provisioningtest.XPU},
			Spec: v1alpha1.XPUSpec{
				NodeName: node, PFs: []string{string(provisioningtest.PF)},
				Endpoint: agent.Config().Endpoint, Insecure: true,
			},
		},
		&v1alpha1.XPUNetwork{
			ObjectMeta: metav1.ObjectMeta{Name: provisioningtest.Blue},
			Spec: v1alpha1.XPUNetworkSpec{
				VLAN:              provisioningtest.BlueVLAN,
				AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
				MTU:               new(int32(provisioningtest.BlueMTU)),
			},
		},
		&v1alpha1.XPUNetwork{
			ObjectMeta: metav1.ObjectMeta{Name: provisioningtest.Green},
			Spec: v1alpha1.XPUNetworkSpec{
				VLAN:              provisioningtest.GreenVLAN,
				AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
			},
		},
	} {
		if err := c.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		// xpu-controller writes this status, but not every test runs it
		if xpu, isXPU := o.(*v1alpha1.XPU); isXPU {
			xpu.Status.NodeName = node
			if err := c.Status().Update(t.Context(), xpu); err != nil &&
				!apierrors.IsConflict(err) {
				t.Fatal(err)
			}
		}
	}
}

func sweep(t *testing.T, c client.Client) {
	ctx := context.Background()
	for _, all := range []client.ObjectList{
		&v1alpha1.XPUPortList{}, &v1alpha1.XPUNetworkList{}, &v1alpha1.XPUList{},
		&corev1.NodeList{},
	} {
		if err := c.List(ctx, all); err != nil {
			t.Errorf("sweep: %v", err)
		}
		_ = meta.EachListItem(all, func(item runtime.Object) error {
			o := item.(client.Object)
			if err := c.Patch(ctx,
				o, client.RawPatch("application/merge-patch+json",
					[]byte(`{"metadata":{"finalizers":null}}`))); client.IgnoreNotFound(
				err,
			) != nil {
				t.Errorf("sweep: %v", err)
			}

			if err := c.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
				t.Errorf("sweep: %v", err)
			}

			return nil
		})
	}
}

// inBackground runs a function until the test ends.
func inBackground(t *testing.T, what string, run func(context.Context) error) {
	t.Helper()
	must.Run(t, run)
}

func startController(t *testing.T) {
	t.Helper()
	scheme, err := controller.Scheme()
	if err != nil {
		t.Fatal(err)
	}

	mgr, err := ctrl.NewManager(cluster.Admin(), ctrl.Options{
		Scheme: scheme, Logger: logr.Discard(),
		Cache:      controller.CacheOptions(kubeapitest.AgentNamespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: new(true)},
	})

	if err != nil {
		t.Fatal(err)
	}

	err = controller.Setup(t.Context(), mgr, controller.Options{
		Installation: opitest.Installation, FailedGrace: 50 * time.Millisecond,
		Namespace: kubeapitest.AgentNamespace, Registerer: prometheus.NewRegistry(),
		Debounce: 50 * time.Millisecond,
	})

	if err != nil {
		t.Fatal(err)
	}

	inBackground(t, "controller", mgr.Start)
}

// startAPI returns an API with the rights of the node's agent and no others.
func startAPI(t *testing.T) *kubeapi.API {
	t.Helper()
	api, err := kubeapi.New(cluster.Agent(node), node,
		kubeapi.Events{DeclarationsChanged: func() {}, PortsChanged: func() {}})
	if err != nil {
		t.Fatal(err)
	}
	inBackground(t, "API", api.Run)
	return api
}

func vf(index int) function.Function {
	return function.Function{
		ID:   function.ID{Address: "0000:3b:02.0"},
		Kind: function.VF, PF: provisioningtest.PF, Index: index, LinkUp: true,
	}
}

func blue(f function.Function) journal.Attachment {
	return journal.Attachment{Function: f.ID, PF: f.PF, Port: &journal.Port{
		DevicePool: provisioningtest.Pool, Network: provisioningtest.Blue,
		MAC: provisioning.MAC(node, f.ID),
	}}
}

func within(t *testing.T, limit time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// TestCRDPort checks the fields of the Port that others read, and that the Port is deleted with the
// Node.
func TestCRDPort(t *testing.T) {
	cluster.Need(t)
	declare(t, opitest.Start(t))
	startController(t)
	crd := newCRD(t, startAPI(t), provisioningtest.NewJournal(t))
	r := blue(vf(0))
	r.Pod = journal.Pod{Namespace: "default", Name: "web", UID: "web-1"}
	r.Interface.VF = &function.VFConfig{MaxTxRate: new(500)}
	if _, err := crd.Provision(within(t, 20*time.Second), r); err != nil {
		t.Fatal(err)
	}

	var port v1alpha1.XPUPort
	var owner corev1.Node
	c := admin(t)
	if err := c.Get(t.Context(),
		client.ObjectKey{Namespace: kubeapitest.AgentNamespace, Name: "node-0000-3b-02-0"},
		&port); err != nil {
		t.Fatal(err)
	}

	if err := c.Get(t.Context(), client.ObjectKey{Name: node}, &owner); err != nil {
		t.Fatal(err)
	}
	if port.Spec.Rate == nil || *port.Spec.Rate != (v1alpha1.PortRate{Maximum: 500}) {
		t.Errorf("rate %+v", port.Spec.Rate)
	}
	if len(port.OwnerReferences) != 1 || port.OwnerReferences[0].UID != owner.UID ||
		port.OwnerReferences[0].Kind != "Node" {
		t.Errorf("owners %+v, want the Node", port.OwnerReferences)
	}
	if port.Labels[v1alpha1.LabelPool] != provisioningtest.Pool ||
		port.Labels[v1alpha1.LabelNetwork] != provisioningtest.Blue {
		t.Errorf("labels %v", port.Labels)
	}

	if port.Spec.Pod == nil ||
		*port.Spec.Pod != (v1alpha1.PodRef{Namespace: "default", Name: "web", UID: "web-1"}) ||
		port.Spec.Claim.Name != "" {
		t.Errorf("pod %+v, claim %+v", port.Spec.Pod, port.Spec.Claim)
	}

	if port.Spec.XPU != provisioningtest.XPU || port.Status.BridgePort != "vf-0000-3b-02-0" {
		t.Errorf("XPU %s, bridge port %s", port.Spec.XPU, port.Status.BridgePort)
	}

	r.Pod.UID = "web-2"
	if _, err := crd.Provision(within(t, 20*time.Second), r); err != nil {
		t.Fatal(err)
	}

	before := port.UID
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(&port), &port); err != nil ||
		port.UID == before || port.Spec.Pod.UID != "web-2" {
		t.Errorf("for another pod it is %s for %+v, %v; want another Port than %s", port.UID,
			port.Spec.Pod, err, before)
	}
}

// TestCRDOfMigratedMachine checks that the second pod of a virtual machine starts while the first
// pod has the MAC address, and is served later.
func TestCRDOfMigratedMachine(t *testing.T) {
	cluster.Need(t)
	agent := opitest.Start(t)
	declare(t, agent)
	startController(t)
	crd := newCRD(t, startAPI(t), provisioningtest.NewJournal(t))

	owner := []metav1.OwnerReference{
		{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstance", Name: "vm", UID: "vm-1",
			Controller: new(true)},
	}

	second := vf(1)
	second.ID.Address = "0000:3b:02.1"
	source, target := blue(vf(0)), blue(second)
	target.Port.MAC = source.Port.MAC
	for a, name := range map[*journal.Attachment]string{
		&source: "launcher-1", &target: "launcher-2",
	} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, OwnerReferences: owner},
			Spec: corev1.PodSpec{
				NodeName: node, Containers: []corev1.Container{{Name: "compute", Image: "none"}},
			},
		}

		if err := admin(t).Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}

		a.Pod = journal.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	}

	for _, a := range []journal.Attachment{source, target} {
		done, err := crd.Provision(within(t, 20*time.Second), a)
		if err != nil {
			t.Fatalf("pod %s: %v", a.Pod.Name, err)
		}
		if done.MTU != provisioningtest.BlueMTU {
			t.Errorf("pod %s has MTU %d, want %d", a.Pod.Name, done.MTU, provisioningtest.BlueMTU)
		}
	}

	if got := agent.Ports(); !slices.Equal(got, []string{"vf-0000-3b-02-0"}) {
		t.Errorf("the agent has %q, want the first pod's port", got)
	}
	if err := crd.Deprovision(within(t, 20*time.Second), source); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "the agent has the second pod's port", func() bool {
		return slices.Equal(agent.Ports(), []string{"vf-0000-3b-02-1"})
	})
}

// TestCRDWaitsForClaim checks that a Function that a claim still has is not touched.
func TestCRDWaitsForClaim(t *testing.T) {
	cluster.Need(t)
	declare(t, opitest.Start(t))
	startController(t)
	crd := newCRD(t, startAPI(t), provisioningtest.NewJournal(t))
	f, c := vf(0), admin(t)
	ofClaim := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: claim.PortName(node, f.ID)},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: node, Function: claim.FunctionRef(f.ID), XPU: provisioningtest.XPU,
			Network: provisioningtest.Green, MAC: "02:00:00:00:00:01",
			Claim: v1alpha1.ClaimRef{Name: "last", UID: "last-uid", Request: "nic"},
		},
	}

	if err := c.Create(t.Context(), ofClaim); err != nil {
		t.Fatal(err)
	}

	_, err := crd.Provision(within(t, time.Second), blue(f))
	if err == nil || !strings.Contains(err.Error(), "XPUPort default/node-0000-3b-02-0") {
		t.Fatalf("error %v, want one that names the claim's Port", err)
	}
	if err := c.Delete(t.Context(), ofClaim); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	if _, err := crd.Provision(within(t, 20*time.Second), blue(f)); err != nil {
		t.Fatal(err)
	}
}

// TestCRDWithoutController checks that the errors say that xpu-controller is awaited.
func TestCRDWithoutController(t *testing.T) {
	cluster.Need(t)
	declare(t, opitest.Start(t))
	crd := newCRD(t, startAPI(t), provisioningtest.NewJournal(t))
	_, err := crd.Provision(within(t, time.Second), blue(vf(0)))
	if err == nil ||
		!strings.Contains(err.Error(),
			"XPUPort xpu-system/node-0000-3b-02-0 is waiting for XPU card") {
		t.Errorf("error %v, want one that says who is awaited", err)
	}

	err = crd.Deprovision(within(t, time.Second), blue(vf(0)))
	if err == nil ||
		!strings.Contains(err.Error(),
			"xpu-controller has not taken XPUPort xpu-system/node-0000-3b-02-0") {
		t.Errorf("error %v, want one that says who is awaited", err)
	}
}

// TestCRDWithoutAPIServer checks that no call blocks for longer than allowed, and that no work
// counts as done.
func TestCRDWithoutAPIServer(t *testing.T) {
	cluster.Need(t)
	away := cluster.Agent(node)
	away.Host = "https://127.0.0.1:1"
	api, err := kubeapi.New(away,
		node, kubeapi.Events{DeclarationsChanged: func() {}, PortsChanged: func() {}})
	if err != nil {
		t.Fatal(err)
	}

	inBackground(t, "API", api.Run)
	crd := newCRD(t, api, provisioningtest.NewJournal(t))
	const want = "the API server has not been read yet"
	if _, err := crd.Provision(within(t, 100*time.Millisecond), blue(vf(0))); err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("Provision: error %v, want %q", err, want)
	}
	if err := crd.Deprovision(within(t, 100*time.Millisecond), blue(vf(0))); err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("Deprovision: error %v, want %q", err, want)
	}
	if message := crd.Away(vf(0)); message != "" {
		t.Errorf("Away = %q while nothing is known", message)
	}
}

// flaky is an API server that refuses the next writes.
type flaky struct {
	provisioning.API
	refusals int
}

func (f *flaky) refuse() error {
	if f.refusals == 0 {
		return nil
	}
	f.refusals--
	return apierrors.NewServiceUnavailable("try later")
}

func (f *flaky) CreatePort(ctx context.Context, port *v1alpha1.XPUPort) error {
	if err := f.refuse(); err != nil {
		return err
	}
	return f.API.CreatePort(ctx, port)
}

// TestCRDRetries checks that a write that the API server refuses is tried again.
func TestCRDRetries(t *testing.T) {
	cluster.Need(t)
	declare(t, opitest.Start(t))
	startController(t)
	api := &flaky{API: startAPI(t), refusals: 2}
	crd := newCRD(t, api, provisioningtest.NewJournal(t))
	if _, err := crd.Provision(within(t, 20*time.Second), blue(vf(0))); err != nil {
		t.Fatal(err)
	}

	api.refusals = 1000
	other := blue(function.Function{
		ID: function.ID{Address: "0000:3b:02.1"}, PF: provisioningtest.PF,
	})
	_, err := crd.Provision(within(t, time.Second), other)
	if err == nil ||
		!strings.Contains(err.Error(), "create XPUPort xpu-system/node-0000-3b-02-1: try later") {
		t.Errorf("error %v, want what the API server said", err)
	}
}

// TestCRDAssignsAddresses checks that the Port gets addresses of its network, that Provision
// returns them, and that the Port keeps them when it is made again.
func TestCRDAssignsAddresses(t *testing.T) {
	cluster.Need(t)
	declare(t, opitest.Start(t))
	startController(t)

	white := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "white"},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 300, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			},
			Subnets: []string{"10.3.0.0/24"},
		}}

	c := admin(t)
	must.Succeed(t, c.Create(t.Context(), white))
	crd := newCRD(t, startAPI(t), provisioningtest.NewJournal(t))
	r := blue(vf(0))
	r.Port = &journal.Port{DevicePool: provisioningtest.Pool, Network: white.Name, MAC: r.Port.MAC,
		AssignAddresses: true}
	done, err := crd.Provision(within(t, 20*time.Second), r)
	want := []netip.Prefix{netip.MustParsePrefix("10.3.0.2/24")}
	if err != nil || !slices.Equal(done.Addresses, want) {
		t.Fatalf("Provision = %+v, %v, want address %s", done, err, want)
	}

	var port, same v1alpha1.XPUPort
	key := client.ObjectKey{Namespace: kubeapitest.AgentNamespace, Name: "node-0000-3b-02-0"}
	must.Succeed(t, c.Get(t.Context(), key, &port))
	r.Port.Addresses = done.Addresses // as the agent records them in the journal
	_, err = crd.Provision(within(t, 20*time.Second), r)
	must.Succeed(t, err)
	if must.Succeed(t, c.Get(t.Context(), key, &same)); same.UID != port.UID {
		t.Error("the Port was made anew, for the addresses that it has")
	}

	r.Port.Addresses = []netip.Prefix{netip.MustParsePrefix("10.3.0.9/24")}
	if done, err := crd.Provision(within(t, 20*time.Second), r); err != nil ||
		!slices.Equal(done.Addresses, r.Port.Addresses) {
		t.Errorf("Provision = %+v, %v, want the address that was asked for", done, err)
	}

	r.Port.Addresses = []netip.Prefix{netip.MustParsePrefix("10.3.0.1/24")}
	if _, err := crd.Provision(within(t, 2*time.Second), r); err == nil ||
		!strings.Contains(err.Error(), "is a gateway's or reserved") {
		t.Errorf("error %v, want one about the gateway", err)
	}
}
