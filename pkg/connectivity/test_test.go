// SPDX-License-Identifier: Apache-2.0

package connectivity_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/connectivity"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func options() connectivity.Options {
	return connectivity.Options{Agents: "xpu-system", Timeout: 30 * time.Second}
}

// run plans and runs a test and releases what it made. It returns the checks without the time of
// the first pod.
func (w *world) run(o connectivity.Options) (checks []connectivity.Check, failed []string) {
	w.t.Helper()
	test, err := connectivity.Plan(w.t.Context(), w.cluster(), o)
	must.Succeed(w.t, err)
	report := func(c connectivity.Check) {
		c.Name, _, _ = strings.Cut(c.Name, ", the first after")
		checks = append(checks, c)
	}

	_, err = test.Run(w.t.Context(), report)
	must.Succeed(w.t, err)
	_, err = test.Release(w.t.Context(), report)
	must.Succeed(w.t, err)
	return checks, test.Failed()
}

// lines returns the checks as text without times.
func lines(checks []connectivity.Check) (all []string) {
	for _, c := range checks {
		verdict := "ok "
		if c.Untested {
			verdict = "---- "
		} else if !c.OK {
			verdict = "FAIL "
		}
		all = append(all, verdict+c.Name)
		for _, n := range c.Notes {
			all = append(all, "  "+n)
		}
	}
	return all
}

func TestGood(t *testing.T) {
	w := newWorld(t, faults{})
	checks, failed := w.run(options())

	want := []string{
		"ok blue: 2 of 2 pods are Ready",
		"ok red: 2 of 2 pods are Ready",
		"ok blue: 2 of 2 interfaces are as asked (an address of 10.10.0.0/24 and fd00:10::/64, MTU 1400)",
		"ok red: 2 of 2 interfaces are as asked (an address of 10.10.0.0/24 and fd00:10::/64, MTU 1400)",
		"ok blue: 2 of 2 packets, IPv4",
		"ok blue: 2 of 2 packets of the full MTU, IPv4",
		"ok blue: 2 of 2 packets, IPv6",
		"ok blue: 2 of 2 packets of the full MTU, IPv6",
		"ok red: 2 of 2 packets, IPv4",
		"ok red: 2 of 2 packets of the full MTU, IPv4",
		"ok red: 2 of 2 packets, IPv6",
		"ok red: 2 of 2 packets of the full MTU, IPv6",
		"ok blue and red: no packets between them",
		"ok 4 pods are gone",
		"ok claims and XPUPorts are gone, and their Functions are free again",
	}
	if diff := cmp.Diff(want, lines(checks)); diff != "" || len(failed) > 0 {
		t.Errorf("failed %v, (-want +got):\n%s", failed, diff)
	}

	w.wantNoNamespace()
}

// TestFaults: each fault fails the check that is about it, with a sentence that names it.
func TestFaults(t *testing.T) {
	short := options()
	short.Timeout = 2 * time.Second
	for name, test := range map[string]struct {
		faults
		options connectivity.Options
		want    []string
		failed  []string
	}{
		"a pod is not Ready": {
			faults{unready: "xpu-test-blue-2"}, short,
			[]string{"FAIL blue: 1 of 2 pods are Ready",
				"  xpu-test-blue-2 on node2: it has no node: 0/2 nodes are available"},
			[]string{"xpu-test-blue-2"},
		},
		"no free Function": {
			faults{full: "xpu-test-blue-2"}, short,
			[]string{"---- blue: 1 of 2 pods are Ready",
				"  xpu-test-blue-2 on node2: not tested: no free Function there",
				"ok red: 2 of 2 pods are Ready", "---- blue and red: no packets between them",
				"  1 pod of blue could call, so that silence shows nothing"},
			nil,
		},
		"a kubelet that is away": {
			faults{hidden: "xpu-test-red-1"}, options(),
			[]string{"  xpu-test-red-1 on node1: its log cannot be read: kubelet is away",
				"ok blue: 2 of 2 packets, IPv4"},
			[]string{"xpu-test-red-1"},
		},
		"a kubelet that stalls": {
			faults{stalled: "xpu-test-blue-1"}, short,
			[]string{"  xpu-test-blue-1 on node1: its log cannot be read: its kubelet does not send " +
				"it in time",
				"ok red: 2 of 2 packets, IPv4"},
			[]string{"xpu-test-blue-1"},
		},
		"a pod's program ends": {
			faults{dead: "xpu-test-red-1"}, options(),
			[]string{"FAIL red: 1 of 2 interfaces are as asked (an address of 10.10.0.0/24 and " +
				"fd00:10::/64, MTU 1400)",
				"  xpu-test-red-1 on node1: its program has ended: exec format error"},
			[]string{"xpu-test-red-1"},
		},
		"another MTU": {
			faults{mtu: 1500}, options(),
			[]string{"  xpu-test-blue-1 on node1: MTU 1500, want 1400"},
			[]string{"xpu-test-blue-1", "xpu-test-blue-2", "xpu-test-red-1", "xpu-test-red-2"},
		},
		"another MAC address at the xPU": {
			faults{wrongMAC: true}, options(),
			[]string{"  xpu-test-blue-1 on node1: MAC address 02:00:00:00:62:01, but the xPU expects " +
				"02:00:00:00:00:ff"},
			[]string{"xpu-test-blue-1", "xpu-test-blue-2", "xpu-test-red-1", "xpu-test-red-2"},
		},
		"no answer": {
			faults{mute: "xpu-test-blue-2"}, options(),
			[]string{"FAIL blue: 1 of 2 packets, IPv4",
				"  xpu-test-blue-1 on node1: no answer from xpu-test-blue-2 on node2 at 10.10.0.2"},
			[]string{"xpu-test-blue-1"},
		},
		"no large packets": {
			faults{small: true}, options(),
			[]string{"ok blue: 2 of 2 packets, IPv6",
				"FAIL blue: 0 of 2 packets of the full MTU, IPv6",
				"  xpu-test-blue-1 on node1: no answer from xpu-test-blue-2 on node2 at fd00:10::2 " +
					"with 1400 bytes"},
			[]string{"xpu-test-blue-1", "xpu-test-blue-2", "xpu-test-red-1", "xpu-test-red-2"},
		},
		"one segment": {
			faults{leak: true}, options(),
			[]string{"FAIL blue and red: no packets between them",
				"  xpu-test-blue-1 on node1: xpu-test-red-1 of network red answered at 10.10.0.11",
				"  xpu-test-blue-1 on node1: heard xpu-test-red-1 of network red"},
			[]string{"xpu-test-blue-1", "xpu-test-blue-2", "xpu-test-red-1", "xpu-test-red-2"},
		},
		"silence that shows nothing": {
			faults{deaf: true}, options(),
			[]string{"FAIL blue and red: no packets between them",
				"  no pod of blue has heard another one of blue call by IPv4, so that silence shows " +
					"nothing"},
			nil,
		},
		"silence that shows nothing in one IP version": {
			faults{deafToIPv6: true}, options(),
			[]string{"FAIL blue and red: no packets between them",
				"  no pod of red has heard another one of red call by IPv6, so that silence shows " +
					"nothing"},
			nil,
		},
		"questions that are not sent": {
			faults{unrouted: true}, options(),
			[]string{"ok blue and red: no packets between them",
				"  8 questions of pods of blue to addresses of red not sent, because no route leads " +
					"there by test0: only calls were tried"},
			nil,
		},
		"Functions that do not come back": {
			faults{quarantined: true}, short,
			[]string{"FAIL claims and XPUPorts are gone, and their Functions are free again",
				"  0000-3b-02-1 of pool node1/0000-3b-00-0/fast has the taint " +
					"xpu.opiproject.org/quarantined"},
			nil,
		},
		"a Function of a pod that was never Ready": {
			faults{sick: "xpu-test-red-2", quarantined: true}, short,
			[]string{"  0000-3b-02-4 of pool node1/0000-3b-00-0/fast has the taint " +
				"xpu.opiproject.org/quarantined"},
			[]string{"xpu-test-red-2"},
		},
		"an XPUPort of a pod that was never Ready": {
			faults{sick: "xpu-test-red-2", portStays: true}, short,
			[]string{"  XPUPort xpu-test.xpu-test-red-2 is still there"},
			[]string{"xpu-test-red-2"},
		},
		"XPUPorts that stay": {
			faults{portStays: true}, short,
			[]string{"  XPUPort xpu-test.xpu-test-blue-1 is still there"},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			checks, failed := newWorld(t, test.faults).run(test.options)
			got := lines(checks)
			for _, line := range test.want {
				if !slices.Contains(got, line) {
					t.Errorf("lacks %q", line)
				}
			}
			if !slices.Equal(failed, test.failed) {
				t.Errorf("failed pods are %v, want %v", failed, test.failed)
			}
			if t.Failed() {
				t.Log(strings.Join(got, "\n"))
			}
		})
	}
}

// TestOneNode: two pods of a network are on the only node.
func TestOneNode(t *testing.T) {
	o := options()
	o.Nodes, o.Networks = []string{"node2"}, []string{"red"}
	checks, _ := newWorld(t, faults{}).run(o)
	if got := lines(checks); got[0] != "ok red: 2 of 2 pods are Ready" ||
		!slices.Contains(got, "ok red: 2 of 2 packets, IPv4") {
		t.Error(strings.Join(got, "\n"))
	}
}

// TestNodes: nodes that offer no Function in the wanted way are left out, which is said.
func TestNodes(t *testing.T) {
	w := newWorld(t, faults{})
	w.create(&v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "plain"},
		Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDevicePlugin,
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"8086"}}}}},
		&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node3"},
			Status: v1alpha1.XPUNodeStatus{Functions: 4,
				Pools: []v1alpha1.XPUNodePool{{Name: "plain", Functions: 4, Healthy: 4}}}},
		&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node4"},
			Status: v1alpha1.XPUNodeStatus{Functions: 4,
				Pools: []v1alpha1.XPUNodePool{{Name: "fast", Functions: 4, Healthy: 4}}}},
		published("node4", resourceapi.DeviceTaint{Key: v1alpha1.TaintCordoned,
			Effect: resourceapi.DeviceTaintEffectNoSchedule}))

	other, number := published("node5"), published("node6")
	pool, one := "other", int64(1)
	other.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"pool": {StringValue: &pool},
	}
	number.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"pool": {IntValue: &one},
	}
	classOfPool := class("xpu-fast")
	must.Succeed(t, w.api.Get(t.Context(), client.ObjectKeyFromObject(classOfPool), classOfPool))
	classOfPool.Spec.Selectors[0].CEL.Expression += ` && ` +
		`!device.attributes["xpu.opiproject.org"].?pool.orValue("").startsWith("o")`
	must.Succeed(t, w.api.Update(t.Context(), classOfPool))
	w.create(other, number)
	for _, name := range []string{"node5", "node6"} {
		w.create(&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: v1alpha1.XPUNodeStatus{Functions: 4,
				Pools: []v1alpha1.XPUNodePool{{Name: "fast", Functions: 4, Healthy: 4}}}})
	}

	byClass, byResource := options(), options()
	byClass.Class, byResource.Resource = "xpu-fast", "xpu.opiproject.org/plain"
	for want, o := range map[string]connectivity.Options{
		"4 pods of networks blue, red on nodes node1, node2, by DeviceClass xpu-fast, in namespace " +
			"xpu-test; not tested, because they offer no Function this way: nodes node3, node4, " +
			"node5, node6; the scheduler places no pod where a selector of the class fails, as on node " +
			"node6: device 0000-3b-02-0: spec.selectors[0]: no such overload": byClass,
		"4 pods of networks blue, red on node node3, by extended resource xpu.opiproject.org/plain, " +
			"in namespace xpu-test; not tested, because they offer no Function this way: 5 nodes": byResource,
	} {
		test, err := connectivity.Plan(t.Context(), w.cluster(), o)
		must.Succeed(t, err)
		if got := test.String(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// TestReadySince: the time until a pod is Ready begins before it is made, and its image is pulled
// only where it is missing.
func TestReadySince(t *testing.T) {
	w := newWorld(t, faults{})
	var held atomic.Int64 // of the last pod
	o := options()
	o.Namespace, o.PullSecrets = corev1.NamespaceDefault, []string{"registry"}
	o.Networks, o.Nodes = []string{"blue"}, []string{"node1"}
	test, err := connectivity.Plan(t.Context(), w.through(interceptor.Funcs{
		Create: func(
			ctx context.Context, api client.WithWatch, o client.Object, _ ...client.CreateOption,
		) error {
			if err := api.Create(ctx, o); err != nil {
				return err
			}
			pod, isPod := o.(*corev1.Pod)
			if !isPod {
				return nil
			}
			spec := pod.Spec.DeepCopy()
			if spec.Containers[0].ImagePullPolicy != corev1.PullIfNotPresent ||
				!slices.Equal(spec.ImagePullSecrets,
					[]corev1.LocalObjectReference{{Name: "registry"}}) {
				t.Errorf("%+v", spec)
			}
			begin := time.Now() // the answer comes when the pod is Ready, as of a busy API server
			must.Eventually(t, "the pod is Ready", func() bool {
				must.Succeed(t, api.Get(ctx, client.ObjectKeyFromObject(pod), pod))
				return len(pod.Status.Conditions) > 0
			})
			held.Store(int64(time.Since(begin)))
			return nil
		},
	}), o)
	must.Succeed(t, err)

	var checks []connectivity.Check
	_, err = test.Run(t.Context(), func(c connectivity.Check) { checks = append(checks, c) })
	must.Succeed(t, err)
	_, err = test.Release(t.Context(), func(connectivity.Check) {})
	must.Succeed(t, err)
	if least := time.Duration(held.Load()); checks[0].Took < least {
		t.Errorf("Ready after %s, but the API server took %s", checks[0].Took, least)
	}
}

// TestInterrupted: everything goes although the test did not end.
func TestInterrupted(t *testing.T) {
	w := newWorld(t, faults{unready: "xpu-test-blue-1"})
	ctx, interrupt := context.WithCancel(t.Context())
	test, err := connectivity.Plan(ctx, w.cluster(), options())
	must.Succeed(t, err)

	ended := make(chan error, 1)
	go func() {
		_, err := test.Run(ctx, func(connectivity.Check) {})
		ended <- err
	}()
	must.Eventually(t, "the pods exist", func() bool {
		var pods corev1.PodList
		must.Succeed(t, w.api.List(t.Context(), &pods, client.HasLabels{connectivity.Label}))
		return len(pods.Items) == 4
	})
	interrupt()
	if err := <-ended; err == nil {
		t.Error("an interrupted test has no error")
	}

	freed, err := test.Release(t.Context(), func(connectivity.Check) {})
	if !freed || err != nil {
		t.Errorf("released %v, %v", freed, err)
	}
	must.Succeed(t, connectivity.Cleanup(t.Context(), w.api, "")) // nothing is left
}

// TestLostAnswer: what was made goes although the API server's answer did not come.
func TestLostAnswer(t *testing.T) {
	w := newWorld(t, faults{})
	test, err := connectivity.Plan(t.Context(), w.through(interceptor.Funcs{
		Create: func(
			ctx context.Context, api client.WithWatch, o client.Object, _ ...client.CreateOption,
		) error {
			return errors.Join(api.Create(ctx, o), errors.New("connection lost"))
		},
	}), options())
	must.Succeed(t, err)

	if _, err := test.Run(t.Context(), func(connectivity.Check) {}); err == nil {
		t.Error("a lost answer is no error")
	}
	_, err = test.Release(t.Context(), func(connectivity.Check) {})
	must.Succeed(t, err)
	w.wantNoNamespace()
}

// TestReleaseFails: whatever cannot be read when pods are to be deleted, the rest goes.
func TestReleaseFails(t *testing.T) {
	for name, broken := range map[string]client.ObjectList{
		"pods": &corev1.PodList{}, "claims": &resourceapi.ResourceClaimList{},
		"XPUPorts": &v1alpha1.XPUPortList{},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, faults{})
			releases := false
			test, err := connectivity.Plan(t.Context(), w.through(interceptor.Funcs{
				List: func(
					ctx context.Context, api client.WithWatch, list client.ObjectList,
					o ...client.ListOption,
				) error {
					if releases && reflect.TypeOf(list) == reflect.TypeOf(broken) {
						return errors.New("API server is away")
					}
					return api.List(ctx, list, o...)
				},
			}), options())
			must.Succeed(t, err)
			_, err = test.Run(t.Context(), func(connectivity.Check) {})
			must.Succeed(t, err)

			releases = true
			if free, err := test.Release(t.Context(), func(connectivity.Check) {}); free || err == nil {
				t.Errorf("%v, %v, want an error", free, err)
			}
			w.wantNoNamespace()
		})
	}
}

// through returns the cluster with changes to its API.
func (w *world) through(changes interceptor.Funcs) connectivity.Cluster {
	c := w.cluster()
	c.API = interceptor.NewClient(w.api, changes)
	return c
}

func (w *world) wantNoNamespace() {
	w.t.Helper()
	var namespace corev1.Namespace
	err := w.api.Get(w.t.Context(), types.NamespacedName{Name: connectivity.DefaultNamespace},
		&namespace)
	if !apierrors.IsNotFound(err) {
		w.t.Errorf("namespace %s is left: %v", connectivity.DefaultNamespace, err)
	}
}

// TestCleanupRefused: nothing is said to be gone that the user may not read.
func TestCleanupRefused(t *testing.T) {
	cluster.Need(t)
	config := cluster.Admin()
	config.Impersonate = rest.ImpersonationConfig{UserName: "nobody",
		Groups: []string{"system:authenticated"}}
	err := connectivity.Cleanup(t.Context(), apiOf(t, config), corev1.NamespaceDefault)
	if !apierrors.IsForbidden(err) {
		t.Errorf("error %v, want that it is forbidden", err)
	}
}

// TestCleanupWaits: pods that end late are waited for.
func TestCleanupWaits(t *testing.T) {
	cluster.Need(t)
	api := apiOf(t, cluster.Admin())
	slow := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceDefault, Name: "slow",
			Labels:     map[string]string{connectivity.Label: "earlier"},
			Finalizers: []string{"example.com/slow"}},
		Spec: corev1.PodSpec{AutomountServiceAccountToken: new(bool),
			Containers: []corev1.Container{{Name: "probe", Image: "probe"}}}}
	must.Succeed(t, api.Create(t.Context(), slow))

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	const want = "1 pod in namespace default not gone yet: "
	if err := connectivity.Cleanup(ctx, api, corev1.NamespaceDefault); err == nil ||
		!strings.HasPrefix(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}

	must.Succeed(t, api.Get(t.Context(), client.ObjectKeyFromObject(slow), slow))
	slow.Finalizers = nil
	must.Succeed(t, api.Update(t.Context(), slow))
	must.Succeed(t, connectivity.Cleanup(t.Context(), api, corev1.NamespaceDefault))
}

// TestRights: in a namespace of theirs, users need the rights that "xpuctl test --help" lists, and
// objects that are not of the test stay.
func TestRights(t *testing.T) {
	w := newWorld(t, faults{})
	foreign := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceDefault, Name: "web"},
		Spec: corev1.PodSpec{AutomountServiceAccountToken: new(bool),
			Containers: []corev1.Container{{Name: "web", Image: "web"}}}}
	w.create(foreign)
	w.allow(corev1.NamespaceDefault, []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods"},
			Verbs: []string{"get", "list", "watch", "create", "patch", "delete"}},
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaimtemplates"},
			Verbs: []string{"create", "list", "delete"}},
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"},
			Verbs: []string{"list"}},
	}, []rbacv1.PolicyRule{
		{APIGroups: []string{v1alpha1.GroupName}, Resources: []string{"*"}, Verbs: []string{"list"}},
	})

	config := cluster.Admin()
	config.Impersonate = rest.ImpersonationConfig{UserName: "alice",
		Groups: []string{"system:authenticated"}}
	o := options()
	o.Namespace, o.Class = corev1.NamespaceDefault, "xpu-fast"
	o.Image = "example.com/xpu-agent:v1"
	test, err := connectivity.Plan(t.Context(),
		connectivity.Cluster{API: apiOf(t, config), Log: w.log}, o)
	must.Succeed(t, err)

	var checks []connectivity.Check
	report := func(c connectivity.Check) { checks = append(checks, c) }
	good, err := test.Run(t.Context(), report)
	must.Succeed(t, err)
	freed, err := test.Release(t.Context(), report)
	must.Succeed(t, err)
	note := "  you may not read ResourceSlices, which say whether the Functions are free"
	if !good || !freed || !slices.Contains(lines(checks), note) ||
		!slices.Contains(lines(checks), "ok claims and XPUPorts are gone") {
		t.Error(strings.Join(lines(checks), "\n"))
	}

	must.Succeed(t, w.api.Get(t.Context(), client.ObjectKeyFromObject(foreign), foreign))
	var templates resourceapi.ResourceClaimTemplateList
	must.Succeed(t, w.api.List(t.Context(), &templates, client.InNamespace(o.Namespace)))
	if len(templates.Items) > 0 {
		t.Errorf("%d ResourceClaimTemplates are left", len(templates.Items))
	}
}

// allow gives alice rights in a namespace, and in the cluster.
func (w *world) allow(namespace string, there, everywhere []rbacv1.PolicyRule) {
	w.t.Helper()
	alice := []rbacv1.Subject{{Kind: "User", Name: "alice", APIGroup: rbacv1.GroupName}}
	local := metav1.ObjectMeta{Namespace: namespace, Name: "tester"}
	global := metav1.ObjectMeta{Name: "tester"}
	w.create(
		&rbacv1.Role{ObjectMeta: local, Rules: there},
		&rbacv1.RoleBinding{ObjectMeta: local, Subjects: alice, RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "Role", Name: "tester"}},
		&rbacv1.ClusterRole{ObjectMeta: global, Rules: everywhere},
		&rbacv1.ClusterRoleBinding{ObjectMeta: global, Subjects: alice, RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "tester"}},
	)
}

// TestPlanErrors: what the user has to name is said, and nothing is made.
func TestPlanErrors(t *testing.T) {
	w := newWorld(t, faults{})
	w.create(&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "secret"},
		Spec: v1alpha1.XPUNetworkSpec{VLAN: 30, Subnets: []string{"10.30.0.0/24"},
			AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromNone}}})

	for want, change := range map[string]func(*connectivity.Options){
		"XPUNetwork green does not exist; there are: blue, red, secret": func(o *connectivity.Options) {
			o.Networks = []string{"green"}
		},
		"XPUNetwork secret does not allow namespace xpu-test": func(o *connectivity.Options) {
			o.Networks = []string{"secret"}
		},
		"node node3 has no Functions in a DevicePool that claims get; these have: node1, node2": func(o *connectivity.Options) {
			o.Nodes = []string{"node3"}
		},
		"namespace none: ": func(o *connectivity.Options) { o.Namespace = "none" },
		"name the image of xpu-agent by --image, because its DaemonSet in namespace other is not " +
			"readable: ": func(o *connectivity.Options) { o.Agents = "other" },
	} {
		o := options()
		change(&o)
		if _, err := connectivity.Plan(t.Context(), w.cluster(), o); err == nil ||
			!strings.HasPrefix(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}

	w.create(class("xpu-slow"))
	_, err := connectivity.Plan(t.Context(), w.cluster(), options())
	const want = "name how pods get Functions: --class xpu-fast, --class xpu-slow"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %q", err, want)
	}
}
