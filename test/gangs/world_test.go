// SPDX-License-Identifier: Apache-2.0

// Package gangs tests jobs whose pods get all of their interfaces or none, with the scheduler and
// the claim controller of Kubernetes and with xpu-controller. Nodes, their agents and OPI agents
// are played.
package gangs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

const (
	gates     = "GenericWorkload=true,DRAWorkloadResourceClaims=true"
	namespace = "default"
	vfs       = 8 // of each node
	pf        = pci.Address("0000:3b:00.0")
)

// world is a cluster of played nodes, each with an xPU whose OPI agent is played.
type world struct {
	testing.TB
	client.WithWatch
	config    *rest.Config
	scheduler *program
	agents    []*opitest.Agent
	stop      func() // the running controller

	mu   sync.Mutex
	seen map[types.UID]bool // bound pods
	// early are pods that were bound before all Ports of their gang were up.
	early []string
}

// newWorld starts API server, scheduler and claim controller, and creates what an administrator and
// the agents of the nodes would create.
func newWorld(t testing.TB, nodes int) *world {
	assets := needs.Kubernetes(t)
	environment := &envtest.Environment{
		CRDDirectoryPaths:     []string{filepath.Join("..", "..", "deploy", "crds")},
		ErrorIfCRDPathMissing: true, ControlPlaneStartTimeout: time.Minute,
	}
	environment.ControlPlane.GetAPIServer().Configure().Append("feature-gates", gates).
		Append("runtime-config", "scheduling.k8s.io/v1beta1=true")
	api, err := environment.Start()
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, environment.Stop()) })
	api.QPS = -1

	admin, err := environment.AddUser(
		envtest.User{Name: "admin", Groups: []string{"system:masters"}}, nil)
	must.Succeed(t, err)
	kubeconfig, err := admin.KubeConfig()
	must.Succeed(t, err)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must.Succeed(t, os.WriteFile(path, kubeconfig, 0o600))
	w := &world{TB: t, config: api, seen: map[types.UID]bool{}, scheduler: run(t, assets, "kube-scheduler", path)}
	run(t, assets, "kube-controller-manager", path,
		"--controllers=resourceclaim-controller,podgroup-protection-controller")

	scheme, err := controller.Scheme()
	must.Succeed(t, err)
	w.WithWatch, err = client.NewWithWatch(api, client.Options{Scheme: scheme})
	must.Succeed(t, err)
	w.declare()
	for i := range nodes {
		w.node(i)
	}
	must.Run(t, w.watchBinding)
	must.Run(t, w.playAgents)
	w.start()
	t.Cleanup(func() { w.stop() })
	return w
}

// program is a program of Kubernetes that can be killed.
type program struct {
	testing.TB
	path, log string
	flags     []string
	running   *exec.Cmd
}

// run runs a program of Kubernetes until the test ends. The end of its log is shown if the test
// fails.
func run(t testing.TB, assets, name, kubeconfig string, flags ...string) *program {
	p := &program{TB: t, path: filepath.Join(assets, name),
		log: filepath.Join(t.TempDir(), name+".log"),
		flags: append([]string{
			"--kubeconfig=" + kubeconfig, "--leader-elect=false", "--feature-gates=" + gates,
			"--secure-port=0", "--kube-api-qps=1000", "--kube-api-burst=2000",
		}, flags...)}
	p.start()
	t.Cleanup(func() {
		p.kill()
		if text, err := os.ReadFile(p.log); t.Failed() && err == nil {
			t.Logf("%s: ...%s", name, text[max(0, len(text)-3000):])
		}
	})
	return p
}

func (p *program) start() {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must.Succeed(p, err)
	defer log.Close() // the program has its own descriptor
	p.running = exec.Command(p.path, p.flags...)
	p.running.Stdout, p.running.Stderr = log, log
	must.Succeed(p, p.running.Start())
}

func (p *program) kill() {
	_ = p.running.Process.Kill()
	_ = p.running.Wait() // it was killed
}

// start runs a controller until stop.
func (w *world) start() {
	mgr, err := ctrl.NewManager(w.config, ctrl.Options{
		Scheme: w.Scheme(), Logger: logr.Discard(), Cache: controller.CacheOptions(namespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})
	must.Succeed(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	must.Succeed(w, controller.Setup(ctx, mgr, controller.Options{
		Installation: opitest.Installation, Namespace: namespace,
		Registerer: prometheus.NewRegistry(), Debounce: 50 * time.Millisecond,
		FailedGrace: 50 * time.Millisecond, CollectGrace: 100 * time.Millisecond,
	}))

	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		must.Succeed(w, <-ended)
	})
}

// declare creates the objects of an administrator.
func (w *world) declare() {
	const ours = `device.driver == "` + v1alpha1.GroupName + `"`
	template := func(name string, count int64) *resourceapi.ResourceClaimTemplate {
		request := resourceapi.DeviceRequest{Name: "nic",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "xpu", Count: count}}
		return &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{
				Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}}}},
		}
	}
	for _, o := range []client.Object{
		&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"},
			Spec: v1alpha1.XPUNetworkSpec{VLAN: 100, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll}}},
		&v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "careful"},
			Spec: v1alpha1.DevicePoolSpec{
				Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}, Network: "blue",
				Provision: v1alpha1.ProvisionBeforeBind}},
		&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "xpu"},
			Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{
				{CEL: &resourceapi.CELDeviceSelector{Expression: ours}}}}},
		template("rail", 1), template("2-rails", 2), template("8-rails", 8),
	} {
		must.Succeed(w, w.Create(context.Background(), o))
	}
}

// node creates a node with an xPU and devices.
func (w *world) node(i int) {
	name := nodeName(i)
	ctx := context.Background()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	must.Succeed(w, w.Create(ctx, node))
	node.Status.Allocatable = corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("8Gi"),
		corev1.ResourcePods: resource.MustParse("50"),
	}
	node.Status.Capacity = node.Status.Allocatable
	node.Status.Conditions = []corev1.NodeCondition{
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue},
	}
	must.Succeed(w, w.Status().Update(ctx, node))
	must.EventuallySucceed(w, "the node is tainted no more", func() error {
		if err := w.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil {
			return err
		}
		node.Spec.Taints = nil // no controller of nodes runs
		return w.Update(ctx, node)
	})

	agent := opitest.Start(w.TB)
	w.agents = append(w.agents, agent)
	must.Succeed(w, w.Create(ctx, &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "xpu-" + name},
		Spec: v1alpha1.XPUSpec{NodeName: name, Endpoint: agent.Config().Endpoint, Insecure: true}}))

	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: v1alpha1.GroupName, NodeName: &name,
			Pool: resourceapi.ResourcePool{ResourceSliceCount: 1,
				Name: claim.PoolID{Node: name, PF: pf, DevicePool: "careful"}.String()},
		},
	}
	for n := range vfs {
		slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{
			Name:                     vf(n).DeviceName(),
			BindingConditions:        []string{v1alpha1.ConditionProvisioned},
			BindingFailureConditions: []string{v1alpha1.ConditionProvisionFailed},
		})
	}
	must.Succeed(w, w.Create(ctx, slice))
}

func nodeName(i int) string { return fmt.Sprintf("node%d", i+1) }

// vf is the n-th VF of each node.
func vf(n int) function.ID {
	return function.ID{Address: pci.Address(fmt.Sprintf("0000:3b:02.%d", n))}
}

// railsOf is the annotation of a pod with the number of its Functions.
const railsOf = "rails"

// gang creates a PodGroup and its pods, which ask for this many rails each, by a claim for each rail
// or by one claim.
func (w *world) gang(name string, pods int32, rails int, oneClaim bool) []*corev1.Pod {
	ctx := context.Background()
	must.Succeed(w, w.Create(ctx, &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: schedulingapi.PodGroupSpec{SchedulingPolicy: schedulingapi.PodGroupSchedulingPolicy{
			Gang: &schedulingapi.GangSchedulingPolicy{MinCount: pods}}},
	}))

	var made []*corev1.Pod
	for i := range pods {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s-%d", name, i),
				Annotations: map[string]string{railsOf: fmt.Sprint(rails)}},
			Spec: corev1.PodSpec{
				SchedulingGroup: &corev1.PodSchedulingGroup{PodGroupName: &name},
				Containers:      []corev1.Container{{Name: "main", Image: "pause"}},
			},
		}
		template, claims := "rail", rails
		if oneClaim {
			template, claims = fmt.Sprint(rails, "-rails"), 1
		}
		for n := range claims {
			p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{
				Name: fmt.Sprint("rail", n), ResourceClaimTemplateName: &template})
		}
		must.Succeed(w, w.Create(ctx, p))
		made = append(made, p)
	}
	return made
}

// watchBinding notes each pod that is bound before all Ports of its gang are up. It knows the claims
// by their pods, whose names begin with the gang's.
func (w *world) watchBinding(ctx context.Context) error {
	var checks sync.WaitGroup
	defer checks.Wait()
	begun := sets.New[string]()
	bound := func(pod *corev1.Pod) {
		// Ports that are up for the first pod of a gang are up for the others.
		if gang := *pod.Spec.SchedulingGroup.PodGroupName; !begun.Has(gang) {
			begun.Insert(gang)
			checks.Go(func() { w.check(ctx, gang, pod) })
		} else {
			w.note(pod, "")
		}
	}

	for ctx.Err() == nil { // the API server ends a watch that it finds slow
		watching, err := w.Watch(ctx, &corev1.PodList{}, client.InNamespace(namespace))
		if err != nil && ctx.Err() == nil {
			return err
		}
		if err != nil {
			return nil
		}
		for event := range watching.ResultChan() {
			pod, isPod := event.Object.(*corev1.Pod)
			if isPod && pod.Spec.NodeName != "" && !w.sees(pod.UID) {
				bound(pod)
			}
		}
	}
	return nil
}

// check notes whether a pod is bound before all Ports of its gang are up.
func (w *world) check(ctx context.Context, gang string, pod *corev1.Pod) {
	w.note(pod, w.missing(ctx, gang))
}

// note notes a bound pod, and what its gang lacked then.
func (w *world) note(pod *corev1.Pod, missing string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[pod.UID] = true
	if missing != "" {
		w.early = append(w.early, fmt.Sprintf("pod %s: %s", pod.Name, missing))
	}
}

// sees reports whether it was checked that the pod was not bound too early.
func (w *world) sees(pod types.UID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[pod]
}

// missing says which Ports of a gang are not up.
func (w *world) missing(ctx context.Context, gang string) string {
	var group schedulingapi.PodGroup
	var pods corev1.PodList
	var ports v1alpha1.XPUPortList
	err := errors.Join(
		w.Get(ctx, client.ObjectKey{Namespace: namespace, Name: gang}, &group),
		w.List(ctx, &pods, client.InNamespace(namespace)),
		w.List(ctx, &ports, client.InNamespace(namespace)))
	if err != nil {
		return err.Error()
	}

	up := map[string]int{}
	for _, p := range ports.Items {
		if p.Status.BridgePort != "" {
			up[p.Spec.Claim.Pod]++
		}
	}
	complete := int32(0)
	for _, p := range pods.Items {
		if *p.Spec.SchedulingGroup.PodGroupName == gang &&
			fmt.Sprint(up[p.Name]) == p.Annotations[railsOf] {
			complete++
		}
	}
	if want := group.Spec.SchedulingPolicy.Gang.MinCount; complete < want {
		return fmt.Sprintf("%d of %d pods of the gang have all Ports: %v", complete, want, up)
	}
	return ""
}

// playAgents has a device tainted for some seconds after its Port was refused, as the agents of the
// nodes do.
func (w *world) playAgents(ctx context.Context) error {
	until := map[client.ObjectKey]time.Time{}
	for ctx.Err() == nil {
		var ports v1alpha1.XPUPortList
		var slicesOfNodes resourceapi.ResourceSliceList
		err := errors.Join(w.List(ctx, &ports), w.List(ctx, &slicesOfNodes))
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}

		for _, p := range ports.Items {
			ready := v1alpha1.ReadyOf(p.Status.Conditions)
			if p.Status.BridgePort == "" && v1alpha1.Refused(ready.Reason) {
				device := claim.FunctionOf(p.Spec.Function).DeviceName()
				until[client.ObjectKey{Namespace: p.Spec.NodeName, Name: device}] =
					time.Now().Add(30 * time.Second)
			}
		}
		for i := range slicesOfNodes.Items {
			if err := w.taint(ctx, &slicesOfNodes.Items[i], until); err != nil {
				return err
			}
		}

		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

// taint has exactly those devices tainted whose time has not passed.
func (w *world) taint(
	ctx context.Context, slice *resourceapi.ResourceSlice, until map[client.ObjectKey]time.Time,
) error {
	changed := false
	for i := range slice.Spec.Devices {
		d := &slice.Spec.Devices[i]
		want := time.Now().Before(until[client.ObjectKey{Namespace: slice.Name, Name: d.Name}])
		if want == (len(d.Taints) > 0) {
			continue
		}
		changed, d.Taints = true, nil
		if want {
			d.Taints = []resourceapi.DeviceTaint{{
				Key: v1alpha1.TaintProvisionFailed, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}
	}
	if !changed {
		return nil
	}
	if err := w.Update(ctx, slice); err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil {
		return err
	}
	return nil
}

// bound waits until all the pods are bound, and returns how long the test waited.
func (w *world) bound(pods []*corev1.Pod, within time.Duration) time.Duration {
	w.Helper()
	begin := time.Now()
	var last string
	for time.Since(begin) < within {
		waiting := slices.DeleteFunc(slices.Clone(pods), func(p *corev1.Pod) bool {
			must.Succeed(w, w.Get(context.Background(), client.ObjectKeyFromObject(p), p))
			return p.Spec.NodeName != "" && w.sees(p.UID)
		})
		if len(waiting) == 0 {
			w.checkEarly()
			return time.Since(begin)
		}
		last = w.describe(waiting)
		time.Sleep(50 * time.Millisecond)
	}
	w.Fatalf("not bound within %s: %s", within, last)
	return 0
}

func (w *world) checkEarly() {
	w.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, early := range w.early {
		w.Errorf("bound before its gang was complete: %s", early)
	}
}

// describe says what the claims of pods report.
func (w *world) describe(pods []*corev1.Pod) (text string) {
	var claims resourceapi.ResourceClaimList
	must.Succeed(w, w.List(context.Background(), &claims))
	for _, c := range claims.Items {
		text += fmt.Sprintf("\n%s allocated %t reserved %d", c.Name, c.Status.Allocation != nil,
			len(c.Status.ReservedFor))
		for _, d := range c.Status.Devices {
			for _, condition := range []string{
				v1alpha1.ConditionProvisioned, v1alpha1.ConditionProvisionFailed,
			} {
				if at := meta.FindStatusCondition(d.Conditions, condition); at != nil {
					text += fmt.Sprintf("; %s %s: %s: %s", d.Device, at.Status, at.Reason, at.Message)
				}
			}
		}
	}
	for _, p := range pods {
		for _, condition := range p.Status.Conditions {
			text += fmt.Sprintf("\npod %s: %s: %s", p.Name, condition.Reason, condition.Message)
		}
	}
	return text
}
