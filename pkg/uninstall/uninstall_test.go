// SPDX-License-Identifier: Apache-2.0

package uninstall_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/uninstall"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../deploy", func(c *kubeapitest.Cluster) { cluster = c }))
}

const (
	namespace = "xpu-system"
	// used for every object, because the name does not matter here
	finalizer = v1alpha1.GroupName + "/port"
)

// world is a cluster in which the product is installed and objects are declared. It is emptied
// after the test.
type world struct {
	*testing.T
	api client.WithWatch
	// messages of Options.Report
	mutex   sync.Mutex
	reports []string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	cluster.Need(t)
	api := clientOf(t, cluster.Admin())
	w := &world{T: t, api: api}
	t.Cleanup(func() {
		must.Succeed(t, w.run(uninstall.Options{Force: true}))
		for _, o := range []client.Object{
			&appsv1.Deployment{}, &corev1.Pod{}, &resourceapi.ResourceClaim{},
		} {
			must.Succeed(t,
				api.DeleteAllOf(context.Background(), o, client.InNamespace(namespace),
					client.GracePeriodSeconds(0)))
		}
	})

	return w
}

func clientOf(t *testing.T, config *rest.Config) client.WithWatch {
	t.Helper()
	scheme := runtime.NewScheme()
	must.Succeed(t,
		errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme),
			apiextensionsv1.AddToScheme(scheme)))
	api, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	must.Succeed(t, err)
	return api
}

func (w *world) create(objects ...client.Object) {
	w.Helper()
	for _, o := range objects {
		status := o.DeepCopyObject().(client.Object)
		must.Succeed(w, w.api.Create(w.Context(), o))
		if _, isService := o.(*corev1.Service); isService {
			continue
		}
		status.SetResourceVersion(o.GetResourceVersion())
		must.Succeed(w, w.api.Status().Update(w.Context(), status))
	}
}

func (w *world) run(o uninstall.Options) error {
	o.Namespace, o.Report = namespace, w.report
	return uninstall.Run(context.Background(), w.api, o)
}

func (w *world) dryRun() error {
	return uninstall.DryRun(context.Background(), w.api,
		uninstall.Options{Namespace: namespace, Report: w.report})
}

func (w *world) report(sentence string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.reports = append(w.reports, sentence)
}

// deletions returns the kinds that were deleted, in order.
func (w *world) deletions() []string {
	var kinds []string
	for _, report := range w.reports {
		if kind, _, _ := strings.Cut(report, " "); strings.HasSuffix(report, " is deleted") &&
			!slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// declare creates the objects of [declared].
func (w *world) declare() {
	w.Helper()
	w.create(declared()...)
}

// declared returns an object of each kind, with a finalizer.
func declared() []client.Object {
	held := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name, Finalizers: []string{finalizer}}
	}

	because := []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: "Releasing",
		Message:            "the OPI agent does not answer",
		LastTransitionTime: metav1.Now(),
	}}

	return []client.Object{
		&v1alpha1.XPUTenant{ObjectMeta: held("", "a"), Spec: v1alpha1.XPUTenantSpec{
			Member: v1alpha1.TenantMember{SecretName: "a"}, VLANs: v1alpha1.VLANRange{
				First: 1, Last: 2,
			}, DeletionPolicy: "Delete",
			XPUs: v1alpha1.TenantXPUs{Names: []string{"dpu-1"}},
		}},
		&v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "plain"},
			Spec: v1alpha1.DevicePoolSpec{
				Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}},
				Publish:   v1alpha1.PublishDevicePlugin,
			}},
		&v1alpha1.XPUNetwork{ObjectMeta: held("", "blue"), Spec: v1alpha1.XPUNetworkSpec{
			AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
		}},
		&v1alpha1.XPU{ObjectMeta: held("", "dpu-1")},
		&v1alpha1.XPUPort{
			ObjectMeta: held("default", "node1-0000-3b-00-2"),
			Spec: v1alpha1.XPUPortSpec{
				NodeName: "node1", XPU: "dpu-1", Network: "blue", MAC: "02:00:00:00:00:01",
				Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:00.2"},
			},
			Status: v1alpha1.XPUPortStatus{Conditions: because},
		},
		&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: "opi-bridge",
				Labels: map[string]string{v1alpha1.LabelAgents: ""},
			},
			Spec: corev1.ServiceSpec{
				ClusterIP: "None", Ports: []corev1.ServicePort{{Port: 50151}},
			},
		},
	}
}

// install creates the Deployment of xpu-controller with a ready pod.
func (w *world) install() {
	w.Helper()
	w.create(deployment())
}

// deployment returns the Deployment of xpu-controller with a ready pod.
func deployment() *appsv1.Deployment {
	labels := map[string]string{"app.kubernetes.io/name": "xpu-controller"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "xpu-controller", Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					Containers: []corev1.Container{
						{Name: "xpu-controller", Image: "xpu-controller"},
					},
				},
			},
		},
		Status: appsv1.DeploymentStatus{Replicas: 1, ReadyReplicas: 1},
	}
}

// runController stands for xpu-controller and a broker: it removes the finalizer of each object
// that is being deleted.
func (w *world) runController() {
	w.Helper()
	for _, list := range []client.ObjectList{
		&v1alpha1.XPUTenantList{}, &v1alpha1.XPUPortList{}, &v1alpha1.XPUNetworkList{},
		&v1alpha1.XPUList{},
	} {
		watch, err := w.api.Watch(w.Context(), list)
		must.Succeed(w, err)
		w.Cleanup(watch.Stop)

		go func() {
			for event := range watch.ResultChan() {
				o, isObject := event.Object.(client.Object)
				if !isObject || o.GetDeletionTimestamp() == nil || len(o.GetFinalizers()) == 0 {
					continue
				}

				before := o.DeepCopyObject().(client.Object)
				o.SetFinalizers(nil)
				if err := w.api.Patch(context.Background(), o,
					client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
					w.Errorf("take the finalizer away: %v", err)
				}
			}
		}()
	}
}

func TestKindByKind(t *testing.T) {
	w := newWorld(t)
	w.declare()
	w.install()
	w.runController()
	must.Succeed(t, w.run(uninstall.Options{Timeout: time.Minute}))
	want := []string{"XPUTenant", "DevicePool", "XPUPort", "XPUNetwork", "Service", "XPU"}
	if diff := cmp.Diff(want, w.deletions()); diff != "" {
		t.Errorf("deleted (-want +got):\n%s", diff)
	}

	must.Succeed(t, w.run(uninstall.Options{})) // nothing is left to do
}

// TestDryRun checks that a dry run reports all that would be deleted, and who uses it, and changes
// nothing.
func TestDryRun(t *testing.T) {
	w := newWorld(t)
	w.declare()
	w.create(claim("ours", v1alpha1.GroupName, "claims"))
	var inUse *uninstall.InUseError
	if err := w.dryRun(); !errors.As(err, &inUse) || len(inUse.Pods) != 1 {
		t.Fatalf("error %v, want one that names the pod", err)
	}

	want := []string{"XPUTenant", "DevicePool", "XPUPort", "XPUNetwork", "Service", "XPU"}
	var kinds []string
	for _, report := range w.reports {
		kind, _, _ := strings.Cut(report, " ")
		if kinds = append(kinds, kind); !strings.HasSuffix(report, " would be deleted") {
			t.Errorf("it says %q", report)
		}
	}
	if diff := cmp.Diff(want, kinds); diff != "" {
		t.Errorf("would be deleted (-want +got):\n%s", diff)
	}
	for _, o := range declared() {
		must.Succeed(t, w.api.Get(t.Context(), client.ObjectKeyFromObject(o), o))
		if o.GetDeletionTimestamp() != nil {
			t.Errorf("%T %s was deleted", o, o.GetName())
		}
	}

	must.Succeed(t, w.api.DeleteAllOf(t.Context(), &resourceapi.ResourceClaim{},
		client.InNamespace(namespace)))
	if err := w.dryRun(); !errors.Is(err, uninstall.ErrNoController) {
		t.Errorf("error %v, want %v", err, uninstall.ErrNoController)
	}
	w.install()
	w.runController()
	must.Succeed(t, w.dryRun())
}

// TestForeignXPU checks that an XPU of a broker is waited for, and is deleted by the broker only.
func TestForeignXPU(t *testing.T) {
	w := newWorld(t)
	kept := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{
		Name: "dpu-2", Labels: map[string]string{v1alpha1.LabelTenant: "a"},
	}}
	w.create(kept)
	var remains *uninstall.RemainsError
	if err := w.run(uninstall.Options{Timeout: time.Second}); !errors.As(err, &remains) ||
		remains.Kind != "XPU" ||
		remains.Objects[0].String() != "dpu-2: a broker keeps it until the XPUTenant is deleted "+
			"in the infra cluster" {
		t.Fatalf("error %v, want one that names the XPU", err)
	}

	must.Succeed(t, w.api.Get(t.Context(), client.ObjectKeyFromObject(kept), kept))
	if kept.DeletionTimestamp != nil {
		t.Error("the broker's XPU was deleted")
	}
}

func TestInUse(t *testing.T) {
	w := newWorld(t)
	w.declare()
	w.install()
	w.runController()

	w.create(
		pod("claims", corev1.PodRunning, nil),
		claim("ours", v1alpha1.GroupName, "claims"),
		claim("unused", v1alpha1.GroupName),
		ofGroup(claim("shared", v1alpha1.GroupName), "workers"),
		claim("gpu", "gpu.example.com", "computes"),
		pod("asks", corev1.PodPending,
			corev1.ResourceList{"xpu.opiproject.org/plain": resource.MustParse("1")}),
		pod("ended", corev1.PodSucceeded,
			corev1.ResourceList{"xpu.opiproject.org/plain": resource.MustParse("1")}),
		pod("other", corev1.PodRunning,
			corev1.ResourceList{"example.com/plain": resource.MustParse("1")}),
	)

	// The DevicePool of its resource is gone already, and its XPUPort is not.
	attached := pod("attached", corev1.PodRunning,
		corev1.ResourceList{"xpu.opiproject.org/gone": resource.MustParse("1")})
	w.create(attached)
	w.create(portOf("0000:3b:00.3", "attached", attached.UID), portOf("0000:3b:00.4", "gone", "2"),
		portOf("0000:3b:00.5", "other", "2"))

	for _, force := range []bool{false, true} {
		var inUse *uninstall.InUseError
		if err := w.run(uninstall.Options{Force: force}); !errors.As(err, &inUse) {
			t.Fatalf("force %v: error %v, want one that names the pods", force, err)
		}
		if want := []string{
			"podgroups xpu-system/workers", "xpu-system/asks", "xpu-system/attached",
			"xpu-system/claims",
		}; !slices.Equal(inUse.Pods, want) {
			t.Errorf("force %v: in use by %q, want %q", force, inUse.Pods, want)
		}
	}

	if deleted := w.deletions(); len(deleted) > 0 {
		t.Errorf("%q were deleted under pods", deleted)
	}

	w.api.DeleteAllOf(t.Context(), &resourceapi.ResourceClaim{}, client.InNamespace(namespace))
	must.Succeed(t,
		w.api.DeleteAllOf(t.Context(), &v1alpha1.XPUPort{}, client.InNamespace(namespace)))
	must.Succeed(t,
		w.api.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace(namespace),
			client.GracePeriodSeconds(0)))
}

func TestWithoutController(t *testing.T) {
	w := newWorld(t)
	w.declare()
	if err := w.run(uninstall.Options{Timeout: time.Minute}); !errors.Is(err,
		uninstall.ErrNoController) {
		t.Fatalf("error %v, want %v", err, uninstall.ErrNoController)
	}
	if deleted := w.deletions(); len(deleted) > 0 {
		t.Errorf("%q were deleted", deleted)
	}

	w.actAsAdministrator()
	// it waits for nothing
	must.Succeed(t, w.run(uninstall.Options{Timeout: time.Hour, Force: true}))
	// without finalizers no controller is needed
	must.Succeed(t, w.run(uninstall.Options{}))
}

// TestRemains checks a port that the controller cannot release because its OPI agent does not
// answer.
func TestRemains(t *testing.T) {
	w := newWorld(t)
	w.declare()
	w.install()
	must.Succeed(t, w.takeFinalizers(&v1alpha1.XPUTenant{ObjectMeta: metav1.ObjectMeta{Name: "a"}}))
	err := w.run(uninstall.Options{Timeout: time.Second})
	want := "XPUPorts that have not gone: default/node1-0000-3b-00-2: Releasing: the OPI agent " +
		"does not answer"
	if err == nil || err.Error() != want {
		t.Fatalf("error %v, want %s", err, want)
	}
	if want := []string{"XPUTenant", "DevicePool", "XPUPort"}; !slices.Equal(w.deletions(), want) {
		t.Errorf("%q were deleted, want %q", w.deletions(), want)
	}

	must.Succeed(t, w.run(uninstall.Options{Timeout: time.Second, Force: true}))
	if last := w.reports[len(w.reports)-1]; last != "XPU dpu-1 is deleted by force, and no OPI "+
		"agent was asked" {
		t.Errorf("the last report is %q", last)
	}
}

// TestMissingKind checks a cluster that lacks CRDs, for example after an interrupted uninstall.
func TestMissingKind(t *testing.T) {
	w := newWorld(t)
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "xputenants." + v1alpha1.GroupName},
	}
	must.Succeed(t, w.api.Delete(t.Context(), crd))
	must.Eventually(t, "the CRD is gone", func() bool {
		return apierrors.IsNotFound(w.api.Get(t.Context(), client.ObjectKeyFromObject(crd), crd))
	})

	t.Cleanup(func() {
		_, err := envtest.InstallCRDs(cluster.Admin(),
			envtest.CRDInstallOptions{Paths: []string{"../../deploy/crds"}})
		must.Succeed(t, err)
	})

	w = newWorld(t) // with a client that has not seen the kind
	must.Succeed(t, w.run(uninstall.Options{}))
}

func TestEnded(t *testing.T) {
	w := newWorld(t)
	w.declare()
	w.install()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	err := uninstall.Run(ctx, w.api, uninstall.Options{
		Namespace: namespace, Timeout: time.Hour, Force: true, Report: func(string) {},
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}

// actAsAdministrator makes the client an administrator's who is not in system:masters, so that
// policies apply.
func (w *world) actAsAdministrator() {
	w.Helper()
	const operator = "operator"
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: operator},
		RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin",
		},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: operator}},
	}

	admin := w.api
	must.Succeed(w, admin.Create(w.Context(), binding))

	w.Cleanup(func() {
		w.api = admin
		must.Succeed(w, admin.Delete(context.Background(), binding))
	})

	config := cluster.Admin()
	config.Impersonate = rest.ImpersonationConfig{
		UserName: operator, Groups: []string{"system:authenticated"},
	}
	w.api = clientOf(w.T, config)
	must.Eventually(w, "the API server knows the operator's rights", func() bool {
		return w.api.List(w.Context(), &v1alpha1.XPUList{}) == nil
	})
}

func (w *world) takeFinalizers(o client.Object) error {
	return w.api.Patch(w.Context(),
		o, client.RawPatch("application/merge-patch+json",
			[]byte(`{"metadata": {"finalizers": null}}`)))
}

func pod(name string, phase corev1.PodPhase, requests corev1.ResourceList) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "c", Image: "c", Resources: corev1.ResourceRequirements{
				Requests: requests, Limits: requests,
			},
		}}},
		Status: corev1.PodStatus{Phase: phase},
	}
}

// portOf returns the XPUPort of a Function that the device plugin gave a pod.
func portOf(address, pod string, uid types.UID) *v1alpha1.XPUPort {
	return &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "of-" + pod},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: "node1", XPU: "dpu-1", Network: "blue", MAC: "02:00:00:00:00:02",
			Function: v1alpha1.FunctionRef{PCIAddress: address},
			Pod:      &v1alpha1.PodRef{Namespace: namespace, Name: pod, UID: uid},
		},
	}
}

// ofGroup reserves a claim for a group of pods.
func ofGroup(c *resourceapi.ResourceClaim, group string) *resourceapi.ResourceClaim {
	c.Status.ReservedFor = append(c.Status.ReservedFor,
		resourceapi.ResourceClaimConsumerReference{
			APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: group, UID: "1",
		})
	return c
}

// claim returns a ResourceClaim with a device of the driver, reserved for pods.
func claim(name, driver string, pods ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "c"},
		}}}},
	}

	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "nic", Driver: driver, Pool: "p", Device: "d"},
		},
	}}

	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{
				Resource: "pods", Name: pod, UID: "1",
			})
	}

	return c
}
