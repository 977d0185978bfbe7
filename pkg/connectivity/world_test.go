// SPDX-License-Identifier: Apache-2.0

package connectivity_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/connectivity"
	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// cluster is the API server of all tests of the package, which run one after the other.
var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../deploy", func(c *kubeapitest.Cluster) { cluster = c }))
}

// faults are what does not work in a world.
type faults struct {
	full        string // there is no free Function for this pod
	hidden      string // the log of this pod cannot be read
	stalled     string // the log of this pod does not come
	unready     string // this pod never gets a node
	sick        string // this pod has what it asked for, and never gets Ready
	mute        string // this pod answers nothing
	dead        string // the program of this pod ends with a complaint
	small       bool   // no large packet arrives
	mtu         int    // of interfaces, instead of the network's
	leak        bool   // the segments of the networks are one
	deaf        bool   // nobody hears calls
	deafToIPv6  bool   // nobody hears calls by IPv6
	unrouted    bool   // no route leads to addresses of other networks
	quarantined bool   // Functions do not come back
	portStays   bool   // XPUPorts do not go
	wrongMAC    bool   // xPUs expect other addresses
}

// world plays everything of a cluster that is no API server: scheduler, kubelet, agents, the
// controller, and the packets.
type world struct {
	t   *testing.T
	api client.WithWatch
	faults

	mutex sync.Mutex
	pods  map[types.UID]*virtual
}

// virtual is the program in a pod.
type virtual struct {
	peer   wire.Peer
	found  wire.Interface
	orders chan wire.Order
	last   int
	log    *io.PipeReader
	claim  string
	heard  []wire.Peer
	called []wire.Call
}

// The networks of a world: of the same subnets, so that only segments keep them apart.
const networkMTU = 1400

func newWorld(t *testing.T, f faults) *world {
	t.Helper()
	cluster.Need(t)
	w := &world{t: t, api: apiOf(t, cluster.Admin()), faults: f, pods: map[types.UID]*virtual{}}
	w.create(declared()...)
	must.Run(t, w.play)
	return w
}

// create makes objects until the test ends.
func (w *world) create(objects ...client.Object) {
	w.t.Helper()
	for _, o := range objects {
		must.Succeed(w.t, w.api.Create(w.t.Context(), o))
		w.t.Cleanup(func() { must.Succeed(w.t, w.api.Delete(context.Background(), o)) })
	}
}

func apiOf(t *testing.T, config *rest.Config) client.WithWatch {
	t.Helper()
	scheme := runtime.NewScheme()
	must.Succeed(t, errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)))
	api, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	must.Succeed(t, err)
	return api
}

// declared returns what an administrator and the agents have declared.
func declared() []client.Object {
	var all []client.Object
	for i, name := range []string{"blue", "red"} {
		all = append(all, &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1alpha1.XPUNetworkSpec{VLAN: int32(10 + i), MTU: ptr.To(int32(networkMTU)),
				Subnets:           []string{"10.10.0.0/24", "fd00:10::/64"},
				AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll}}})
	}
	for _, name := range []string{"node1", "node2"} {
		all = append(all, &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: v1alpha1.XPUNodeStatus{Functions: 8,
				Pools: []v1alpha1.XPUNodePool{{Name: "fast", Functions: 4, Healthy: 4}}}},
			published(name))
	}

	labels := map[string]string{"app.kubernetes.io/name": "xpu-agent"}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "xpu-system", Name: "xpu-agent"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{Containers: []corev1.Container{
					{Name: "xpu-agent", Image: "example.com/xpu-agent:v1"}}}}}}
	return append(all, class("xpu-fast"), set)
}

// published returns the ResourceSlice of a node with one device.
func published(node string, taints ...resourceapi.DeviceTaint) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node},
		Spec: resourceapi.ResourceSliceSpec{Driver: v1alpha1.GroupName, NodeName: ptr.To(node),
			Pool: resourceapi.ResourcePool{Name: node + "/0000-3b-00-0/fast",
				ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "0000-3b-02-0", Taints: taints}}}}
}

// class returns a DeviceClass of all devices of the driver.
func class(name string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
			CEL: &resourceapi.CELDeviceSelector{
				Expression: `device.driver == "xpu.opiproject.org"`}}}}}
}

// play acts until ctx ends.
func (w *world) play(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := w.act(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// act starts the programs of new pods, passes orders on, and removes what belongs to pods that are
// gone.
func (w *world) act(ctx context.Context) error {
	var pods corev1.PodList
	if err := w.api.List(ctx, &pods, client.HasLabels{connectivity.Label}); err != nil {
		return err
	}

	exist := map[types.UID]bool{}
	for _, pod := range pods.Items {
		exist[pod.UID] = true
		// A test deletes pods and their namespace at any time.
		if err := w.serve(ctx, pod); err != nil && !apierrors.IsNotFound(err) &&
			!apierrors.IsConflict(err) && !apierrors.IsForbidden(err) {
			return err
		}
	}

	w.mutex.Lock()
	defer w.mutex.Unlock()
	for uid, p := range w.pods {
		if exist[uid] {
			continue
		}
		delete(w.pods, uid)
		close(p.orders)
		if err := w.release(ctx, p); err != nil {
			return err
		}
	}
	return w.finalizeNamespaces(ctx)
}

func (w *world) serve(ctx context.Context, pod corev1.Pod) error {
	w.mutex.Lock()
	p := w.pods[pod.UID]
	w.mutex.Unlock()
	if p == nil {
		return w.start(ctx, pod)
	}

	var order wire.Order
	if text := pod.Annotations[wire.AnnotationOrder]; text != "" {
		if err := json.Unmarshal([]byte(text), &order); err != nil {
			return err
		}
	}
	if order.Number > p.last {
		p.last = order.Number
		p.orders <- order
	}
	return nil
}

// start gives a new pod its claim, its XPUPort and its interface, and makes it Ready.
func (w *world) start(ctx context.Context, pod corev1.Pod) error {
	p := w.newVirtual(pod)
	w.mutex.Lock()
	w.pods[pod.UID] = p
	number := len(w.pods)
	w.mutex.Unlock()
	if pod.Name == w.full {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled,
			Status:  corev1.ConditionFalse,
			Message: "0/2 nodes are available: 1 cannot allocate all claims."}}
		return w.api.Status().Update(ctx, &pod)
	}
	if pod.Name == w.unready {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled,
			Status: corev1.ConditionFalse, Message: "0/2 nodes are available"}}
		return w.api.Status().Update(ctx, &pod)
	}

	var template resourceapi.ResourceClaimTemplate
	if err := w.api.Get(ctx, types.NamespacedName{Namespace: pod.Namespace,
		Name: *pod.Spec.ResourceClaims[0].ResourceClaimTemplateName}, &template); err != nil {
		return err
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: template.Spec.ObjectMeta,
		Spec: template.Spec.Spec}
	claim.Namespace, claim.Name = pod.Namespace, p.claim
	if err := w.api.Create(ctx, claim); err != nil {
		return err
	}
	if err := w.allocate(ctx, p, claim, number); err != nil {
		return err
	}

	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning,
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		ResourceClaimStatuses: []corev1.PodResourceClaimStatus{
			{Name: "nic", ResourceClaimName: &claim.Name}}}
	if pod.Name == w.sick {
		pod.Status.Conditions[0].Status = corev1.ConditionFalse
	}
	return w.api.Status().Update(ctx, &pod)
}

func deviceName(number int) string { return fmt.Sprintf("0000-3b-02-%d", number) }

// allocate writes the claim's status, and makes the device and its XPUPort.
func (w *world) allocate(
	ctx context.Context, p *virtual, claim *resourceapi.ResourceClaim, number int,
) error {
	const pool = "node1/0000-3b-00-0/fast"
	name := deviceName(number)
	claim.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "nic", Driver: v1alpha1.GroupName, Pool: pool, Device: name}}}},
		Devices: []resourceapi.AllocatedDeviceStatus{{Driver: v1alpha1.GroupName, Pool: pool,
			Device: name, NetworkData: &resourceapi.NetworkDeviceData{
				InterfaceName: "test0", HardwareAddress: p.found.MAC,
				IPs: []string{p.found.Addresses[0].String(), p.found.Addresses[1].String()}}}}}
	if err := w.api.Status().Update(ctx, claim); err != nil {
		return err
	}

	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: p.claim},
		Spec: resourceapi.ResourceSliceSpec{Driver: v1alpha1.GroupName, NodeName: ptr.To("node1"),
			Pool:    resourceapi.ResourcePool{Name: pool, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: name}}}}
	if w.quarantined {
		slice.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{
			{Key: v1alpha1.TaintQuarantined, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	if err := w.api.Create(ctx, slice); err != nil {
		return err
	}
	w.t.Cleanup(func() { _ = w.api.Delete(context.Background(), slice) })

	return w.makePort(ctx, p, claim, fmt.Sprintf("0000:3b:02.%d", number))
}

func (w *world) makePort(
	ctx context.Context, p *virtual, claim *resourceapi.ResourceClaim, function string,
) error {
	port := &v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{NodeName: "node1", XPU: "xpu-1",
		Function: v1alpha1.FunctionRef{PCIAddress: function}, Network: p.peer.Network,
		MAC:   p.found.MAC,
		Claim: v1alpha1.ClaimRef{Name: claim.Name, UID: claim.UID, Request: "nic"}}}
	port.Namespace, port.Name = claim.Namespace, p.claim
	if w.wrongMAC {
		port.Spec.MAC = "02:00:00:00:00:ff"
	}
	if err := w.api.Create(ctx, port); err != nil {
		return err
	}

	meta.SetStatusCondition(&port.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Up"})
	return w.api.Status().Update(ctx, port)
}

// release deletes the claim of a pod that is gone, and its XPUPort.
func (w *world) release(ctx context.Context, p *virtual) error {
	for _, o := range []client.Object{&resourceapi.ResourceClaim{}, &v1alpha1.XPUPort{}} {
		if _, isPort := o.(*v1alpha1.XPUPort); isPort && w.portStays {
			continue
		}
		o.SetNamespace(p.namespace())
		o.SetName(p.claim)
		if err := w.api.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

func (p *virtual) namespace() string { return strings.SplitN(p.claim, ".", 2)[0] }

// finalizeNamespaces does what the namespace controller does for an empty namespace.
func (w *world) finalizeNamespaces(ctx context.Context) error {
	var all corev1.NamespaceList
	if err := w.api.List(ctx, &all, client.HasLabels{connectivity.Label}); err != nil {
		return err
	}
	for _, n := range all.Items {
		if n.DeletionTimestamp == nil {
			continue
		}
		if empty, err := w.empty(ctx, n.Name); err != nil {
			return err
		} else if !empty {
			continue
		}
		for _, o := range []client.Object{
			&resourceapi.ResourceClaimTemplate{}, &v1alpha1.XPUPort{},
		} {
			if err := w.api.DeleteAllOf(ctx, o, client.InNamespace(n.Name)); err != nil {
				return err
			}
		}
		n.Spec.Finalizers = nil
		err := w.api.SubResource("finalize").Update(ctx, &n)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

// empty deletes the pods of a namespace. It returns whether there were none, so that what they had
// is released already.
func (w *world) empty(ctx context.Context, namespace string) (bool, error) {
	var pods corev1.PodList
	if err := w.api.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return false, err
	}
	left := len(pods.Items)
	for _, p := range w.pods {
		if p.namespace() == namespace {
			left++
		}
	}
	return left == 0, w.api.DeleteAllOf(ctx, &corev1.Pod{},
		client.InNamespace(namespace), client.GracePeriodSeconds(0))
}

// newVirtual returns the running program of a pod.
func (w *world) newVirtual(pod corev1.Pod) *virtual {
	var network string
	for _, argument := range pod.Spec.Containers[0].Command {
		if name, is := strings.CutPrefix(argument, "--network="); is {
			network = name
		}
	}
	host := pod.Name[len(pod.Name)-1] - '0' // the networks have the same addresses

	out, in := io.Pipe()
	p := &virtual{peer: wire.Peer{Pod: pod.Name, Network: network}, log: out,
		orders: make(chan wire.Order, 8), claim: pod.Namespace + "." + pod.Name,
		found: wire.Interface{Name: "test0", MTU: networkMTU, Up: true,
			MAC: fmt.Sprintf("02:00:00:00:%02x:%02x", network[0], host),
			Addresses: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.10.0.%d/24", host)),
				netip.MustParsePrefix(fmt.Sprintf("fd00:10::%d/64", host))}}}
	if network == "red" { // others, so that each network asks for addresses of the other one
		p.found.Addresses = []netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("10.10.0.1%d/24", host)),
			netip.MustParsePrefix(fmt.Sprintf("fd00:10::1%d/64", host))}
	}
	if w.mtu != 0 {
		p.found.MTU = w.mtu
	}

	go w.runProgram(p, in)
	return p
}

// runProgram writes the log of a pod.
func (w *world) runProgram(p *virtual, log *io.PipeWriter) {
	defer log.Close()
	if p.peer.Pod == w.dead {
		fmt.Fprintln(log, "exec format error")
		return
	}

	lines := json.NewEncoder(log)
	if err := lines.Encode(wire.Report{Interface: p.found}); err != nil {
		return
	}
	for order := range p.orders {
		report := wire.Report{Order: order.Number}
		for _, q := range order.Questions {
			report.Answers = append(report.Answers, w.answer(p, q))
		}
		if order.Call {
			w.call(p)
		}

		w.mutex.Lock()
		report.Heard, report.Called = slices.Clone(p.heard), slices.Clone(p.called)
		w.mutex.Unlock()
		if err := lines.Encode(report); err != nil {
			return
		}
	}
}

// answer returns what a packet of a pod leads to.
func (w *world) answer(from *virtual, q wire.Question) wire.Answer {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for _, p := range w.pods {
		reaches := p.peer.Network == from.peer.Network || w.leak
		if p == from || !reaches || p.peer.Pod == w.mute || w.small && q.Size > 1000 {
			continue
		}
		for _, a := range p.found.Addresses {
			if a.Addr() == q.Address {
				p.take(from.peer)
				return wire.Answer{From: &p.peer, Took: 3 * time.Millisecond}
			}
		}
	}
	return wire.Answer{Silent: !w.unrouted, Unsent: w.unrouted}
}

// take notes who has sent a packet, unless it is of the pod's own network.
func (p *virtual) take(from wire.Peer) {
	if from.Network != p.peer.Network && !slices.Contains(p.heard, from) {
		p.heard = append(p.heard, from)
	}
}

// call has all pods of a segment hear a pod.
func (w *world) call(from *virtual) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for _, p := range w.pods {
		if p != from && !w.deaf && (p.peer.Network == from.peer.Network || w.leak) {
			p.take(from.peer)
			p.hear(from.peer, w.deafToIPv6)
		}
	}
}

// hear notes calls of a pod of the same network.
func (p *virtual) hear(from wire.Peer, deafToIPv6 bool) {
	if from.Network != p.peer.Network {
		return
	}
	p.called = append(p.called, wire.Call{From: from})
	if !deafToIPv6 {
		p.called = append(p.called, wire.Call{From: from, IPv6: true})
	}
}

// log returns the log of a pod, as the kubelet does.
func (w *world) log(ctx context.Context, namespace, name string) (io.ReadCloser, error) {
	if name == w.stalled {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if name == w.hidden {
		return nil, errors.New("kubelet is away")
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for _, p := range w.pods {
		if p.claim == namespace+"."+name {
			return p.log, nil
		}
	}
	return nil, fmt.Errorf("pod %s/%s does not run", namespace, name)
}

func (w *world) cluster() connectivity.Cluster {
	return connectivity.Cluster{API: w.api, Log: w.log}
}
