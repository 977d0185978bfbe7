// SPDX-License-Identifier: Apache-2.0

package adversary

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
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
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const deploy = "../../deploy"

// sharedCluster is the cluster of all tests.
var sharedCluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, deploy, func(c *kubeapitest.Cluster) { sharedCluster = c }))
}

// world is a cluster with a controller that runs until the test ends.
type world struct {
	testing.TB
	cluster *kubeapitest.Cluster
	admin   client.Client
}

func newWorld(t *testing.T, cluster *kubeapitest.Cluster) *world {
	t.Helper()
	cluster.Need(t)
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)
	w := &world{TB: t, cluster: cluster, admin: admin}
	t.Cleanup(w.sweep)
	w.startController()
	return w
}

// startController starts the controller with the rights of deploy/ and frequent comparisons.
func (w *world) startController() {
	w.Helper()
	scheme, err := controller.Scheme()
	must.Succeed(w, err)

	mgr, err := ctrl.NewManager(w.cluster.Controller(), ctrl.Options{
		Scheme: scheme, Logger: logr.Discard(),
		Cache:      controller.CacheOptions(kubeapitest.AgentNamespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: new(true)},
	})

	must.Succeed(w, err)
	installation, err := controller.Installation(w.Context(), mgr.GetAPIReader())
	must.Succeed(w, err)

	must.Succeed(w, controller.Setup(w.Context(), mgr, controller.Options{
		Installation: installation, Namespace: kubeapitest.AgentNamespace,
		Registerer: prometheus.NewRegistry(),
		Debounce:   50 * time.Millisecond, FailedGrace: 50 * time.Millisecond,
		CheckInterval: 50 * time.Millisecond,
		OrphanGrace:   300 * time.Millisecond, BridgeGrace: 50 * time.Millisecond,
		ResyncPeriod: 200 * time.Millisecond,
		AgentTimeout: 2 * time.Second,
	}))

	must.Run(w, mgr.Start)
}

// sweep removes objects that would disturb the next test.
func (w *world) sweep() {
	for _, all := range []client.ObjectList{
		&resourceapi.ResourceClaimList{}, &v1alpha1.XPUPortList{}, &v1alpha1.XPUNetworkList{},
		&v1alpha1.XPUList{},
		&v1alpha1.DevicePoolList{}, &v1alpha1.XPUNodeList{}, &resourceapi.ResourceSliceList{},
	} {
		must.Succeed(w, w.admin.List(context.Background(), all))
		_ = meta.EachListItem(all, func(item runtime.Object) error {
			o := item.(client.Object)
			if len(o.GetFinalizers()) > 0 {
				free := client.RawPatch("application/merge-patch+json",
					[]byte(`{"metadata":{"finalizers":null}}`))
				must.Succeed(w, client.IgnoreNotFound(w.admin.Patch(context.Background(), o, free)))
			}
			must.Succeed(w, client.IgnoreNotFound(w.admin.Delete(context.Background(), o)))
			return nil
		})
	}
}

func (w *world) create(objects ...client.Object) {
	w.Helper()
	for _, o := range objects {
		must.Succeed(w, w.admin.Create(w.Context(), o))
	}
}

func xpu(name, node, endpoint string) *v1alpha1.XPU {
	return &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.XPUSpec{
			NodeName: node, Endpoint: endpoint, Insecure: true,
		},
	}
}

// network returns a network for pods of one namespace, or of all for "".
func network(name string, vlan int32, namespace string, subnets ...string) *v1alpha1.XPUNetwork {
	allowed := v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll}
	if namespace != "" {
		allowed = v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromSelector,
			Selector: &metav1.LabelSelector{
				MatchLabels: map[string]string{corev1.LabelMetadataName: namespace},
			}}
	}

	return &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: vlan, AllowedNamespaces: allowed, Subnets: subnets,
		},
	}
}

// pool returns a DevicePool that allows claims to set these fields.
func pool(name string, allow ...v1alpha1.PrivilegedField) *v1alpha1.DevicePool {
	return &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}, Allow: allow,
		}}
}

const testPF = pci.Address("0000:3b:00.0")

func vf(n int) function.ID {
	return function.ID{Address: pci.Address(fmt.Sprintf("0000:3b:02.%d", n))}
}

// allocatedClaim creates a claim with an InterfaceConfig as by, and allocates a node's n-th VF to
// it like the scheduler.
func (w *world) allocatedClaim(
	by client.Client, name, node string, n int, fields string,
) (*resourceapi.ResourceClaim, error) {
	id := claim.PoolID{Node: node, PF: testPF, DevicePool: "fast"}
	return w.createClaim(by,
		claimtest.Allocated(name, claimtest.Result("nic", id.String(), vf(n).DeviceName()),
			claimtest.FromClaim(fields)))
}

// createClaim creates a claim as by, and allocates it like the scheduler.
func (w *world) createClaim(
	by client.Client, c *resourceapi.ResourceClaim,
) (*resourceapi.ResourceClaim, error) {
	c.UID = ""
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "xpu"}},
	}
	for _, one := range c.Status.Allocation.Devices.Config {
		c.Spec.Devices.Config = append(c.Spec.Devices.Config,
			resourceapi.DeviceClaimConfiguration{DeviceConfiguration: one.DeviceConfiguration})
	}

	status := c.Status
	if err := by.Create(w.Context(), c); err != nil {
		return nil, err
	}

	c.Status = status
	return c, w.admin.Status().Update(w.Context(), c)
}

// claim is like [world.allocatedClaim], as the administrator.
func (w *world) claim(name, node string, n int, fields string) *resourceapi.ResourceClaim {
	w.Helper()
	c, err := w.allocatedClaim(w.admin, name, node, n, fields)
	must.Succeed(w, err)
	return c
}

// waitForReady waits until the condition Ready of an object has this reason and text, and reads the
// object.
func (w *world) waitForReady(o client.Object, conditions *[]metav1.Condition, reason, text string) {
	w.Helper()
	var last string
	defer func() {
		if w.Failed() {
			w.Logf("Ready of %s is %s", o.GetName(), last)
		}
	}()

	must.Eventually(w, fmt.Sprintf("%T %s is %s: %s", o, o.GetName(), reason, text), func() bool {
		if err := w.admin.Get(w.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			last = err.Error()
			return false
		}
		ready := v1alpha1.ReadyOf(*conditions)
		last = ready.Reason + ": " + ready.Message
		return ready.Reason == reason && strings.Contains(ready.Message, text)
	})
}

// waitForPort waits until the Port of a node's n-th VF has this reason.
func (w *world) waitForPort(namespace, node string, n int, reason, text string) *v1alpha1.XPUPort {
	w.Helper()
	p := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: claim.PortName(node, vf(n))},
	}
	w.waitForReady(p, &p.Status.Conditions, reason, text)
	return p
}

// waitForProvisioned waits until a claim has the condition Provisioned with this reason.
func (w *world) waitForProvisioned(c *resourceapi.ResourceClaim, reason, text string) {
	w.Helper()
	must.Eventually(w, fmt.Sprintf("claim %s is told %s: %s", c.Name, reason, text), func() bool {
		if err := w.admin.Get(w.Context(), client.ObjectKeyFromObject(c), c); err != nil ||
			len(c.Status.Devices) != 1 {
			return false
		}
		told := meta.FindStatusCondition(c.Status.Devices[0].Conditions,
			v1alpha1.ConditionProvisioned)
		return told != nil && told.Reason == reason && strings.Contains(told.Message, text)
	})
}

// deleteAndWait deletes an object and waits until it is gone.
func (w *world) deleteAndWait(o client.Object) {
	w.Helper()
	must.Succeed(w, client.IgnoreNotFound(w.admin.Delete(w.Context(), o)))
	must.Eventually(w, fmt.Sprintf("%T %s is gone", o, o.GetName()), func() bool {
		return apierrors.IsNotFound(w.admin.Get(w.Context(), client.ObjectKeyFromObject(o), o))
	})
}

// waitForComparisons waits until an agent has been compared often enough that an orphan is deleted.
func waitForComparisons(t testing.TB, agent *opitest.Agent) {
	t.Helper()
	before := agent.Calls("ListBridgePorts")
	must.Eventually(t, "the agent is compared", func() bool {
		return agent.Calls("ListBridgePorts")-before >= 8
	})
}
