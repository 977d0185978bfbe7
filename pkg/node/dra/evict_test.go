// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controlplane"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

const evictingPool = "node1/0000-3b-00-0/fast"

// losing is a node with a DevicePool that has pods evicted after 2 minutes. A claim has the pool's
// second VF.
type losing struct {
	pools
	written writes
	journal *journal.Journal
	record  journal.Attachment
	changes chan struct{}

	state    sync.Mutex // guards what follows, which the publisher asks for
	features devicemodel.Features
	// since is when the device went; zero while it is there, or while that is not known.
	since time.Time
	// replaced is when a program of the pod lost the device in whose place another one is.
	replaced time.Time
}

func newLosing(t *testing.T) *losing {
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	must.Succeed(t, err)
	vf := pooltest.VF(0x3b, 1)
	l := &losing{journal: j, features: devicemodel.AllFeatures(), changes: make(chan struct{}, 1),
		record: journal.Attachment{
			Function: vf.ID, PF: vf.PF, PFName: vf.PFName, VFIndex: 1, State: journal.Attached,
			Claim: journal.Claim{Namespace: "default", Name: "nic", UID: "uid", Request: "nic",
				Pool: evictingPool, Device: vf.ID.DeviceName()},
			Pod:     journal.Pod{Namespace: "default", Name: "p", UID: "pod-uid"},
			Sandbox: "sandbox", BootID: "boot", Place: netdev.Place{NetNS: "/run/netns/p"},
			Before: &netdev.Snapshot{}, Observed: &netdev.Observed{},
			Interface: function.Interface{Name: "net1"}, ReservedAt: time.Now(),
			AttachedAt: time.Now(),
		}}
	must.Succeed(t, j.Put(l.record))
	l.has(pooltest.VF(0x3b, 0), vf)
	return l
}

// has sets the Functions of the pool.
func (l *losing) has(functions ...function.Function) { l.hasWith(nil, functions...) }

// hasWith is has for a pool whose spec is changed.
func (l *losing) hasWith(change func(*v1alpha1.DevicePoolSpec), functions ...function.Function) {
	p := pooltest.DRA("fast", functions...)
	p.Spec.EvictLostAfter = &metav1.Duration{Duration: 2 * time.Minute}
	p.Spec.Attributes = []v1alpha1.PoolAttribute{{Name: "rail", String: new("r1")}}
	if change != nil {
		change(&p.Spec)
	}
	l.set(p)
}

func (l *losing) missingFor(address pci.Address) (time.Duration, bool) {
	l.state.Lock()
	defer l.state.Unlock()
	if l.since.IsZero() || address != l.record.Function.Address {
		return 0, false
	}
	return time.Since(l.since), true
}

func (l *losing) replacedFor(journal.Attachment) (time.Duration, bool) {
	l.state.Lock()
	defer l.state.Unlock()
	if l.replaced.IsZero() {
		return 0, false
	}
	return time.Since(l.replaced), true
}

// change changes what the publisher asks for.
func (l *losing) change(change func()) {
	l.state.Lock()
	defer l.state.Unlock()
	change()
}

// lose has the pod lose its Function, whose device is gone.
func (l *losing) lose(t *testing.T) {
	l.change(func() { l.since = time.Now() })
	l.record.State, l.record.LostAt = journal.Lost, time.Now()
	must.Succeed(t, l.journal.Put(l.record))
	l.has(pooltest.VF(0x3b, 0))
	l.changes <- struct{}{}
}

func (l *losing) publisher(
	t *testing.T, publish func(context.Context, resourceslice.DriverResources) error,
) *Publisher {
	return &Publisher{
		Node: "node1", Pools: l.Pools, Health: noProblems(),
		Features: func() (features devicemodel.Features, known bool) {
			l.change(func() { features = l.features })
			return features, true
		},
		Losses: &Losses{Node: "node1", Journal: l.journal, MissingFor: l.missingFor,
			Replaced: l.replacedFor},
		Publish: publish, Metrics: NewMetrics(prometheus.NewRegistry()), Log: testr.New(t),
	}
}

// devices returns the taints of the devices that were published last.
func (l *losing) devices() map[string][]resourceapi.DeviceTaint {
	found := map[string][]resourceapi.DeviceTaint{}
	for _, slice := range l.written.last().Pools[evictingPool].Slices {
		for _, d := range slice.Devices {
			found[d.Name] = d.Taints
		}
	}
	return found
}

// TestEvict: the pod of a Function whose device has been missing is evicted after the time that the
// pool says, and not before. The device is published until its record is gone. Everything else
// waits.
func TestEvict(t *testing.T) {
	noExecute := []resourceapi.DeviceTaint{
		{Key: v1alpha1.TaintLost, Effect: resourceapi.DeviceTaintEffectNoExecute},
	}
	kept := map[string][]resourceapi.DeviceTaint{"0000-3b-00-2": nil}
	evicted := map[string][]resourceapi.DeviceTaint{"0000-3b-00-2": nil, "0000-3b-00-3": noExecute}
	back := map[string][]resourceapi.DeviceTaint{"0000-3b-00-2": nil, "0000-3b-00-3": nil}
	first := pooltest.VF(0x3b, 0)

	for name, test := range map[string]struct {
		change func(*testing.T, *losing)
		want   map[string][]resourceapi.DeviceTaint
	}{
		"gone": {func(*testing.T, *losing) {}, evicted},
		"the card is gone": {func(_ *testing.T, l *losing) { l.has() },
			map[string][]resourceapi.DeviceTaint{"0000-3b-00-3": noExecute}},
		"back, and something else is missing": {func(_ *testing.T, l *losing) {
			l.since = time.Time{}
			l.has(first, pooltest.VF(0x3b, 1))
		}, back},
		"back, but the inventory does not list it": {func(_ *testing.T, l *losing) {
			l.since = time.Time{}
		}, kept},
		"gone once more since": {func(_ *testing.T, l *losing) {
			l.since = l.since.Add(30 * time.Second)
		}, kept},
		"a program had it": {func(t *testing.T, l *losing) {
			l.record.Interface.Userspace, l.record.Place = true, netdev.Place{}
			must.Succeed(t, l.journal.Put(l.record))
		}, evicted},
		"a program had it, and it is there": {func(t *testing.T, l *losing) {
			l.record.Interface.Userspace, l.record.Place = true, netdev.Place{}
			l.since = time.Time{}
			must.Succeed(t, l.journal.Put(l.record))
			l.has(first, pooltest.VF(0x3b, 1))
		}, back},
		"a program had it, and another is there": {func(t *testing.T, l *losing) {
			l.since, l.replaced = time.Time{}, time.Now()
			l.has(first, pooltest.VF(0x3b, 1))
		}, evicted},
		"attached again": {func(t *testing.T, l *losing) {
			l.record.State, l.record.LostAt = journal.Attached, time.Time{}
			must.Succeed(t, l.journal.Put(l.record))
		}, kept},
		"another port of the bond": {func(t *testing.T, l *losing) { l.bond(t, journal.Attached) },
			kept},
		"the bond has lost both ports": {func(t *testing.T, l *losing) { l.bond(t, journal.Lost) },
			evicted},
		"without counters": {func(_ *testing.T, l *losing) {
			l.features.Counters = false
			l.hasWith(func(s *v1alpha1.DevicePoolSpec) { s.MaxAllocated = new(int32(1)) }, first)
		}, evicted},
		"without taints": {func(_ *testing.T, l *losing) { l.features.Taints = false }, kept},
		"a pool that evicts nobody": {func(_ *testing.T, l *losing) {
			l.set(pooltest.DRA("fast", first))
		}, kept},
		"released": {func(t *testing.T, l *losing) {
			must.Succeed(t, l.journal.Delete(l.record.Function))
		}, kept},
		"another node's pool": {func(t *testing.T, l *losing) {
			l.record.Claim.Pool = "node2/0000-3b-00-0/fast"
			must.Succeed(t, l.journal.Put(l.record))
		}, kept},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLosing(t)
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan error)
				go func() {
					done <- l.publisher(t, l.written.PublishResources).Run(ctx, l.changes)
				}()
				synctest.Wait()

				l.lose(t)
				time.Sleep(debounce)
				l.change(func() { test.change(t, l) })
				l.changes <- struct{}{}
				time.Sleep(time.Minute)
				synctest.Wait()
				if taints := l.devices()["0000-3b-00-3"]; len(taints) > 0 {
					t.Errorf("taints %v after a minute", taints)
				}

				time.Sleep(time.Minute + time.Second)
				synctest.Wait()
				if diff := gocmp.Diff(test.want, l.devices()); diff != "" {
					t.Errorf("after two minutes -want +got:\n%s", diff)
				}
				for name := range l.written.last().Pools {
					if name != evictingPool {
						t.Errorf("pool %s is published", name)
					}
				}

				stop()
				must.Succeed(t, <-done)
				must.Succeed(t, l.journal.Close())
			})
		})
	}
}

// bond makes the Function a port of a bond of the pod, whose other port is in the state.
func (l *losing) bond(t *testing.T, other journal.State) {
	bond := &function.Bond{Name: "bond0", Mode: function.BondActiveBackup, MIIMon: 100}
	l.record.Interface.Bond = bond
	must.Succeed(t, l.journal.Put(l.record))
	second := l.record
	second.Function, second.PF = pooltest.VF(0x86, 0).ID, pooltest.VF(0x86, 0).PF
	second.Claim.Pool, second.Claim.Device = "", ""
	second.State, second.Interface.Name = other, "net2"
	if other != journal.Lost {
		second.LostAt = time.Time{}
	}
	must.Succeed(t, l.journal.Put(second))
}

// TestEvictKeepsAttributes: selectors that match the other devices of the pool find the same
// attributes at a device that is gone, also those that the pool got meanwhile, and those that the
// card did not show any more at its end. An agent that never published the device does not know
// them: it publishes nothing, because the error of a selector ends the scheduling of pods.
func TestEvictKeepsAttributes(t *testing.T) {
	l := newLosing(t)
	all := devicemodel.AllFeatures()
	resources := func() resourceslice.DriverResources {
		pools, _ := l.Pools()
		return devicemodel.Resources("node1", pools, noProblems().Problems, nil)
	}
	mark := func(losses *Losses) resourceslice.DriverResources {
		pools, _ := l.Pools()
		out := resources()
		losses.mark(out, pools, all)
		return out
	}

	losses := l.publisher(t, nil).Losses
	mark(losses)
	ending := pooltest.VF(0x3b, 1)
	ending.PFName, ending.PCIeRoot, ending.NUMANode = "", "", -1
	l.has(pooltest.VF(0x3b, 0), ending)
	mark(losses)
	l.lose(t)
	l.since = time.Now().Add(-time.Hour)
	another := func(s *v1alpha1.DevicePoolSpec) {
		s.Attributes = append(s.Attributes, v1alpha1.PoolAttribute{Name: "fabric", String: new("f")})
	}
	l.hasWith(another, pooltest.VF(0x3b, 0), pooltest.VF(0x3b, 1))
	want := resources().Pools[evictingPool].Slices[0].Devices[1].Attributes
	l.hasWith(another, pooltest.VF(0x3b, 0))

	devices := mark(losses).Pools[evictingPool].Slices[0].Devices
	if len(devices) != 2 {
		t.Fatalf("%d devices, want the one that is gone too", len(devices))
	}
	if diff := gocmp.Diff(want, devices[1].Attributes); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}

	fresh := mark(l.publisher(t, nil).Losses).Pools[evictingPool].Slices[0].Devices
	if len(fresh) != 1 {
		t.Errorf("%d devices of an agent that never published the one that is gone", len(fresh))
	}
}

// TestKubernetesEvicts: Kubernetes deletes the pod of a Function that is gone for good. It also deletes
// pods whose claims only watch the device, unless they tolerate the taint with its effect.
func TestKubernetesEvicts(t *testing.T) {
	assets := needs.Kubernetes(t)
	cluster, err := controlplane.Start(t.Context(), assets, t.TempDir())
	must.Succeed(t, err)
	clientset, err := kubernetes.NewForConfig(cluster.Config)
	must.Succeed(t, err)
	_, err = clientset.CoreV1().Nodes().Create(t.Context(),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, metav1.CreateOptions{})
	must.Succeed(t, err)
	namespace, err := clientset.CoreV1().Namespaces().Get(t.Context(), "default",
		metav1.GetOptions{})
	must.Succeed(t, err)
	namespace.Labels[resourceapi.DRAAdminNamespaceLabelKey] = "true"
	_, err = clientset.CoreV1().Namespaces().Update(t.Context(), namespace,
		metav1.UpdateOptions{})
	must.Succeed(t, err)
	makePodOfLoser(t, clientset, "p", nil)
	makePodOfLoser(t, clientset, "watches", func(r *resourceapi.ExactDeviceRequest) {
		r.AdminAccess = new(true)
	})
	makePodOfLoser(t, clientset, "no-effect", tolerates(""))
	makePodOfLoser(t, clientset, "tolerates", tolerates(resourceapi.DeviceTaintEffectNoExecute))

	l := newLosing(t)
	writer := &SliceWriter{Client: clientset, Node: "node1",
		HandleError: func(_ context.Context, err error, msg string) { t.Log(msg, err) }}
	must.Run(t, func(ctx context.Context) error {
		return l.publisher(t, writer.PublishResources).Run(ctx, l.changes)
	})
	must.EventuallySucceed(t, "the devices are published", func() error {
		return publishedDevices(t, clientset, 2)
	})
	l.lose(t)
	must.EventuallySucceed(t, "the device is gone", func() error {
		return publishedDevices(t, clientset, 1)
	})
	pods := clientset.CoreV1().Pods("default")
	if p, err := pods.Get(t.Context(), "p", metav1.GetOptions{}); err != nil ||
		!p.DeletionTimestamp.IsZero() {
		t.Fatalf("the pod of a Function that may come back: %v, %v", p.DeletionTimestamp, err)
	}

	l.since = time.Now().Add(-time.Hour)
	l.changes <- struct{}{}
	for _, name := range []string{"p", "watches", "no-effect"} {
		must.EventuallySucceed(t, "pod "+name+" is deleted", func() error {
			p, err := pods.Get(t.Context(), name, metav1.GetOptions{})
			if err == nil && p.DeletionTimestamp.IsZero() {
				return errors.New("not yet")
			}
			return err
		})
	}
	if p, err := pods.Get(t.Context(), "tolerates", metav1.GetOptions{}); err != nil ||
		!p.DeletionTimestamp.IsZero() {
		t.Errorf("the pod that tolerates it: %v, %v", p.DeletionTimestamp, err)
	}
}

// tolerates makes a request watch the device and tolerate the taint lost with the effect.
func tolerates(effect resourceapi.DeviceTaintEffect) func(*resourceapi.ExactDeviceRequest) {
	return func(r *resourceapi.ExactDeviceRequest) {
		r.AdminAccess = new(true)
		r.Tolerations = []resourceapi.DeviceToleration{{Key: v1alpha1.TaintLost,
			Operator: resourceapi.DeviceTolerationOpExists, Effect: effect}}
	}
}

// makePodOfLoser creates a pod on the node, with a claim of the same name that has the pool's second
// VF.
func makePodOfLoser(
	t *testing.T, clientset kubernetes.Interface, name string,
	change func(*resourceapi.ExactDeviceRequest),
) {
	t.Helper()
	ctx, create := t.Context(), metav1.CreateOptions{}
	request := &resourceapi.ExactDeviceRequest{DeviceClassName: "xpu"}
	if change != nil {
		change(request)
	}
	pod, err := clientset.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName:       "node1",
			ResourceClaims: []corev1.PodResourceClaim{{Name: "nic", ResourceClaimName: &name}},
			Containers:     []corev1.Container{{Name: "main", Image: "pause"}},
		},
	}, create)
	must.Succeed(t, err)

	claims := clientset.ResourceV1().ResourceClaims("default")
	c, err := claims.Create(ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "nic", Exactly: request}},
		}},
	}, create)
	must.Succeed(t, err)
	c.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "nic", Driver: v1alpha1.GroupName, Pool: evictingPool,
				Device:      pooltest.VF(0x3b, 1).ID.DeviceName(),
				AdminAccess: request.AdminAccess, Tolerations: request.Tolerations,
			}},
		}},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: pod.Name, UID: pod.UID},
		},
	}
	_, err = claims.UpdateStatus(ctx, c, metav1.UpdateOptions{})
	must.Succeed(t, err)
}

// publishedDevices returns an error unless the node's slices have this many devices.
func publishedDevices(t *testing.T, clientset kubernetes.Interface, want int) error {
	t.Helper()
	all, err := clientset.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	found := 0
	for _, slice := range all.Items {
		found += len(slice.Spec.Devices)
	}
	if found != want {
		return fmt.Errorf("%d devices, want %d", found, want)
	}
	return nil
}
