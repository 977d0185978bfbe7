// SPDX-License-Identifier: Apache-2.0

package kubeapi_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func devicePool(name string) *v1alpha1.DevicePool {
	return &v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}},
		},
	}
}

func resourceClaim(name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "fast"},
		}}}},
	}
}

// events counts the calls of the functions in [kubeapi.Events].
type events struct{ declarations, ports atomic.Int64 }

// running returns a running API with the rights of the node's agent and no others.
func running(t *testing.T, node string) (*kubeapi.API, *events) {
	t.Helper()
	cluster.Need(t)
	e := &events{}
	api, err := kubeapi.New(cluster.Agent(node), node, kubeapi.Events{
		DeclarationsChanged: func() { e.declarations.Add(1) }, PortsChanged: func() {
			e.ports.Add(1)
		},
	})

	if err != nil {
		t.Fatal(err)
	}

	must.Run(t, api.Run)
	synced, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()

	if !api.Synced(synced) {
		t.Fatal("the API server was not read within 10 s")
	}

	return api, e
}

func TestDeclarations(t *testing.T) {
	cluster.Need(t)
	admin := newClient(t, cluster.Admin())
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "reads", Labels: map[string]string{"rack": "7"}},
	}
	created(t, node, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "reads-not"}},
		devicePool("reads-first"))
	api, told := running(t, "reads")
	labels := func() map[string]string {
		t.Helper()
		got, err := api.NodeLabels(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return got
	}

	has := func(name string) bool {
		t.Helper()
		pools, err := api.DevicePools(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		for _, p := range pools {
			if p.Name == name {
				return true
			}
		}

		return false
	}

	if diff := cmp.Diff(map[string]string{"rack": "7"}, labels()); diff != "" {
		t.Errorf("labels: -want +got\n%s", diff)
	}
	if !has("reads-first") {
		t.Error("DevicePool reads-first is missing")
	}

	must.Eventually(t, "what was there is told", func() bool {
		return told.declarations.Load() > 0
	})

	before := told.declarations.Load()
	second := devicePool("reads-second")
	created(t, second)

	must.Eventually(t, "a DevicePool comes", func() bool {
		return has("reads-second") &&
			told.declarations.Load() > before
	})

	before = told.declarations.Load()
	if err := admin.Delete(t.Context(), second); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "a DevicePool goes", func() bool {
		return !has("reads-second") &&
			told.declarations.Load() > before
	})

	before = told.declarations.Load()
	node.Labels["rack"] = "8"
	if err := admin.Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "a label changes", func() bool {
		return labels()["rack"] == "8" &&
			told.declarations.Load() > before
	})

	if told.ports.Load() != 0 {
		t.Errorf("%d events about Ports, want none", told.ports.Load())
	}
}

func TestNodeIsMissing(t *testing.T) {
	api, _ := running(t, "missing")
	if labels, err := api.NodeLabels(t.Context()); !apierrors.IsNotFound(err) ||
		!strings.Contains(err.Error(), "missing") {
		t.Errorf("NodeLabels = %v, %v; want an error that names the node", labels, err)
	}
}

// TestXPUNode checks that an agent creates the XPUNode of its node, replaces the status, and reads
// it. It does not read the XPUNode of another node or of a deleted Node with the same name.
func TestXPUNode(t *testing.T) {
	cluster.Need(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "status-a"}}
	created(t, node, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "status-b"}})
	api, _ := running(t, "status-a")
	must.Eventually(t, "the Node is read", func() bool {
		_, err := api.NodeLabels(t.Context())
		return err == nil
	})

	admin := newClient(t, cluster.Admin())
	made := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "status-a"}}
	write := func(status v1alpha1.XPUNodeStatus) {
		t.Helper()
		must.Succeed(t, api.WriteXPUNode(t.Context(), status))
		must.Succeed(t, admin.Get(t.Context(), client.ObjectKeyFromObject(made), made))
		if diff := cmp.Diff(status, made.Status); diff != "" {
			t.Errorf("status: -want +got\n%s", diff)
		}

		must.Eventually(t, "it is read", func() bool {
			read, err := api.XPUNode(t.Context())
			return err == nil && read != nil && cmp.Equal(*read, status)
		})
	}

	if read, err := api.XPUNode(t.Context()); err != nil || read != nil {
		t.Errorf("XPUNode = %+v, %v, want none", read, err)
	}

	status := v1alpha1.XPUNodeStatus{
		Functions: 3, PFs: []v1alpha1.XPUNodePF{{Address: "0000:3b:00.0", Name: "ens3f0", VFs: 2}},
		Pools: []v1alpha1.XPUNodePool{{
			Name: "fast", Functions: 3, Healthy: 2,
			Problems: []v1alpha1.FunctionProblem{
				{Taint: "a/b", Functions: 1, Message: "broken"},
			},
			Overlapping: []string{"0000:3b:00.2 in slow"},
		}},
	}

	write(status)
	if len(made.OwnerReferences) != 1 || made.OwnerReferences[0].UID != node.UID {
		t.Errorf("owners %+v, want the Node", made.OwnerReferences)
	}

	version := made.ResourceVersion
	write(status)
	if made.ResourceVersion != version {
		t.Error("writing the same again changed the object")
	}

	status.PFs, status.Pools[0].Problems, status.Pools[0].Overlapping = nil, nil, nil
	write(status)
	status.Pools = nil
	write(status)

	// The spec is an administrator's. The agent reads it, keeps it, and cannot change it.
	cordons := []v1alpha1.Cordon{{PF: "0000:3b:00.0", Reason: "new firmware"}}
	made.Spec.Cordons = cordons
	must.Succeed(t, admin.Update(t.Context(), made))
	must.Eventually(t, "the cordons are read", func() bool {
		read, err := api.Cordons(t.Context())
		return err == nil && cmp.Equal(read, cordons)
	})
	status.Functions = 4
	write(status)
	agent := newClient(t, cluster.Agent("status-a"))
	made.Spec.Cordons = nil
	err := agent.Patch(t.Context(), made, client.RawPatch(types.MergePatchType, []byte(`{"spec":null}`)))
	if !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("the agent takes its cordons back: error %v", err)
	}
	must.Succeed(t, admin.Get(t.Context(), client.ObjectKeyFromObject(made), made))
	if !cmp.Equal(made.Spec.Cordons, cordons) {
		t.Errorf("cordons %+v", made.Spec.Cordons)
	}

	// A new Node has the name now. The XPUNode belongs to the old Node until it is collected.
	must.Succeed(t, admin.Delete(t.Context(), node.DeepCopy()))
	must.Succeed(t,
		admin.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "status-a"}}))

	must.Eventually(t, "it belongs to a Node that is gone", func() bool {
		read, err := api.XPUNode(t.Context())
		return err == nil && read == nil
	})

	write(status)
	must.Succeed(t, admin.Delete(t.Context(), made))
}

// port returns the XPUPort of VF index of a node, for a claim in namespace "default".
func port(node string, index int, claimName string) *v1alpha1.XPUPort {
	f := functionOf(index)
	return &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: claim.PortName(node, f)},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: node, Function: claim.FunctionRef(f), XPU: "card", Network: "lab",
			MAC:   "02:00:00:00:00:01",
			Claim: v1alpha1.ClaimRef{Name: claimName, UID: uidOf(claimName), Request: "nic"},
		},
	}
}

func functionOf(index int) function.ID {
	return function.ID{Address: pci.Address(fmt.Sprintf("0000:3b:00.%d", index))}
}

func uidOf(claimName string) types.UID { return types.UID(claimName + "-uid") }

// allocated returns the claim as the kubelet passes it to the driver.
func allocated(
	name string, devices ...resourceapi.AllocatedDeviceStatus,
) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uidOf(name)},
		Status:     resourceapi.ResourceClaimStatus{Devices: devices},
	}
}

func setReady(
	t *testing.T, p *v1alpha1.XPUPort, status metav1.ConditionStatus, reason, message string,
) {
	t.Helper()
	p.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: status, Reason: reason, Message: message,
		LastTransitionTime: metav1.Now(),
	}}
	if err := newClient(t, cluster.Admin()).Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
}

// result has the results of Wait.
type result struct {
	port *v1alpha1.XPUPort
	err  error
}

func waitInBackground(
	ctx context.Context, api *kubeapi.API, c *resourceapi.ResourceClaim, f function.ID,
) <-chan result {
	done := make(chan result, 1)
	go func() {
		p, err := api.Wait(ctx, c, f)
		done <- result{p, err}
	}()
	return done
}

func TestWaitUntilReady(t *testing.T) {
	api, told := running(t, "wait")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()

	done := waitInBackground(ctx, api, allocated("wait-claim"), functionOf(2))

	// The events come in this order: first the Port of the Function's last claim, then the Port of
	// this claim, which is not ready at first.
	admin := newClient(t, cluster.Admin())
	last := port("wait", 2, "wait-last")
	created(t, last)
	setReady(t, last, metav1.ConditionTrue, v1alpha1.ReasonUp, "")
	must.Eventually(t, "the last Port is known", func() bool { return told.ports.Load() >= 2 })
	if err := admin.Delete(t.Context(), last); err != nil {
		t.Fatal(err)
	}

	ours := port("wait", 2, "wait-claim")
	created(t, ours, port("wait", 3, "wait-claim"), port("wait-elsewhere", 2, "wait-claim"))
	setReady(t, ours, metav1.ConditionFalse, v1alpha1.ReasonProvisioning, "not yet")
	must.Eventually(t, "our Port is known", func() bool { return told.ports.Load() >= 6 })

	select {
	case r := <-done:
		t.Fatalf("Wait = %+v, %v before the Port was ready", r.port, r.err)
	default:
	}

	setReady(t, ours, metav1.ConditionTrue, v1alpha1.ReasonUp, "")
	r := <-done
	if r.err != nil || r.port.UID != ours.UID {
		t.Fatalf("Wait = %+v, %v; want the Port of the claim", r.port, r.err)
	}
	if again, err := api.Wait(ctx, allocated("wait-claim"), functionOf(2)); err != nil ||
		again.UID != ours.UID {
		t.Errorf("Wait again = %+v, %v; want the Port at once", again, err)
	}
}

// TestServes checks that Serves returns at once for a served Port and for a claim without a Port.
// Otherwise it waits, and the error says what is missing.
func TestServes(t *testing.T) {
	api, told := running(t, "serves")
	ours := port("serves", 2, "serves-claim")
	created(t, ours)
	setReady(t, ours, metav1.ConditionFalse, v1alpha1.ReasonXPUUnavailable, "the card is away")
	must.Eventually(t, "the Port is known", func() bool { return told.ports.Load() >= 2 })

	serves := func(c *resourceapi.ResourceClaim, f function.ID, within time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return api.Serves(ctx, c.Namespace, c.UID, f)
	}

	c := allocated("serves-claim")
	if err := serves(c, functionOf(3), 20*time.Second); err != nil {
		t.Errorf("a Function without a Port: %v", err)
	}
	if err := serves(allocated("serves-other"), functionOf(2), 20*time.Second); err != nil {
		t.Errorf("a claim without a Port: %v", err)
	}
	if err := serves(c, functionOf(2), 10*time.Millisecond); err == nil ||
		!strings.Contains(err.Error(), "XPUUnavailable: the card is away") {
		t.Errorf("a Port that is not up: %v", err)
	}

	done := make(chan error, 1)
	go func() { done <- serves(c, functionOf(2), 20*time.Second) }()
	setReady(t, ours, metav1.ConditionTrue, v1alpha1.ReasonUp, "")
	if err := <-done; err != nil {
		t.Errorf("a Port that came up: %v", err)
	}
}

// TestWaitGivesUp checks that the error says what is missing.
func TestWaitGivesUp(t *testing.T) {
	api, told := running(t, "giveup")
	condition := func(conditionType, reason, message string) resourceapi.AllocatedDeviceStatus {
		return resourceapi.AllocatedDeviceStatus{Driver: v1alpha1.GroupName, Pool: "p", Device: "d",
			Conditions: []metav1.Condition{
				{Type: conditionType, Status: metav1.ConditionFalse, Reason: reason,
					Message: message},
			}}
	}

	seen := int64(0)
	known := func(changes int64) {
		t.Helper()
		seen += changes
		must.Eventually(t, "the Port is known", func() bool { return told.ports.Load() >= seen })
	}

	for i, test := range []struct {
		name    string
		prepare func(t *testing.T, index int)
		claim   *resourceapi.ResourceClaim
		want    []string
	}{
		{"no Port", func(*testing.T, int) {}, allocated("giveup"),
			[]string{"xpu-controller has not made XPUPort default/giveup-0000-3b-00-0"}},
		{"no Port, and the claim says why", func(*testing.T, int) {},
			allocated("giveup", resourceapi.AllocatedDeviceStatus{Driver: "gpu.example.com"},
				condition(v1alpha1.ConditionProvisioned, v1alpha1.ReasonNoXPU,
					"no XPU has PF 0000:3b:00.0; create one")),
			[]string{"has not made XPUPort", "NoXPU: no XPU has PF 0000:3b:00.0; create one"}},
		{"the Port of another claim", func(t *testing.T, index int) {
			p := port("giveup", index, "giveup-other")
			created(t, p)
			setReady(t, p, metav1.ConditionTrue, v1alpha1.ReasonUp, "")
			known(2)
		}, allocated("giveup"),
			[]string{"has not made XPUPort default/giveup-0000-3b-00-2 for this claim"}},
		{"a Port that nothing is known of", func(t *testing.T, index int) {
			created(t, port("giveup", index, "giveup"))
			known(1)
		},
			allocated("giveup"),
			[]string{"XPUPort default/giveup-0000-3b-00-3", "waiting for xPU card"}},
		{"a Port that is not ready", func(t *testing.T, index int) {
			p := port("giveup", index, "giveup")
			created(t, p)
			setReady(t, p, metav1.ConditionFalse, v1alpha1.ReasonXPUUnavailable,
				"XPU card is not connected")
			known(2)
		}, allocated("giveup"),
			[]string{"XPUPort default/giveup-0000-3b-00-4: XPUUnavailable: XPU card is not " +
				"connected"}},
		{"a Port that is on its way out", func(t *testing.T, index int) {
			p := port("giveup", index, "giveup")
			p.Finalizers = []string{v1alpha1.FinalizerPort}
			created(t, p)
			setReady(t, p, metav1.ConditionTrue, v1alpha1.ReasonUp, "")
			admin := newClient(t, cluster.Admin())
			if err := admin.Delete(t.Context(), p); err != nil {
				t.Fatal(err)
			}

			known(3)
			t.Cleanup(func() {
				if err := admin.Patch(context.Background(), p,
					client.RawPatch(types.MergePatchType,
						[]byte(`{"metadata":{"finalizers":null}}`))); err != nil {
					t.Error(err)
				}
			})
		}, allocated("giveup"), []string{"XPUPort default/giveup-0000-3b-00-5 is being deleted"}},
	} {
		test.prepare(t, i)
		ctx, cancel := context.WithCancel(t.Context())
		done := waitInBackground(ctx, api, test.claim, functionOf(i))
		cancel()
		r := <-done
		if r.err == nil {
			t.Errorf("%s: Wait = %+v, want an error", test.name, r.port)
			continue
		}

		for _, text := range test.want {
			if !strings.Contains(r.err.Error(), text) {
				t.Errorf("%s: error %q, want %q in it", test.name, r.err, text)
			}
		}
	}
}

func TestProvisionFailed(t *testing.T) {
	api, _ := running(t, "refused")
	p, fine := port("refused", 2, "refused"), port("refused", 3, "refused")
	created(t, p, fine)
	setReady(t, fine, metav1.ConditionFalse, v1alpha1.ReasonXPUUnavailable,
		"XPU card is not connected")
	setReady(t, p, metav1.ConditionFalse, v1alpha1.ReasonFailed, "no such representor")
	must.Eventually(t, "the refusal is known", func() bool {
		return strings.Contains(api.ProvisionFailed(functionOf(2)), "Failed: no such representor")
	})
	if message := api.ProvisionFailed(functionOf(3)); message != "" {
		t.Errorf("ProvisionFailed of a Function whose xPU is away = %q, want nothing: it is not "+
			"the Function's fault", message)
	}

	setReady(t, p, metav1.ConditionTrue, v1alpha1.ReasonUp, "")
	must.Eventually(t, "the xPU took it after all", func() bool {
		return api.ProvisionFailed(functionOf(2)) == ""
	})
}

// TestSyncedEnds checks that an agent that must stop does not wait for an API server that is out of
// reach.
func TestSyncedEnds(t *testing.T) {
	cluster.Need(t)
	config := cluster.Agent("unsynced")
	config.Host = "https://127.0.0.1:1"
	api, err := kubeapi.New(config, "unsynced",
		kubeapi.Events{DeclarationsChanged: func() {}, PortsChanged: func() {}})
	if err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- api.Run(ctx) }()
	synced := make(chan bool, 1)
	go func() { synced <- api.Synced(ctx) }()
	stop()
	if <-synced {
		t.Error("Synced = true although nothing could be read")
	}
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("Run = %v, want nil when its context ends", err)
	}
}
