// SPDX-License-Identifier: Apache-2.0

package provisioning_test

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning/provisioningtest"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// web is a pod. attached returns the journal's record once the pod has the Function.
var web = journal.Pod{Namespace: "default", Name: "web", UID: "web-1"}

func attached(f function.Function) journal.Attachment {
	a := blue(f)
	a.VFIndex, a.State, a.Pod, a.Resource = f.Index, journal.Attached, web, "xpu.opiproject.org/fast"
	// the journal refuses an attached record without them
	a.Before, a.Observed = &netdev.Snapshot{}, &netdev.Observed{}
	return a
}

// serve provisions the Function for the pod, as the node's agent does.
func serve(t *testing.T, crd *provisioning.CRD, records *journal.Journal, f function.Function) {
	t.Helper()
	must.Succeed(t, records.Put(attached(f)))
	if _, err := crd.Provision(within(t, 20*time.Second), attached(f)); err != nil {
		t.Fatal(err)
	}
}

func portOf(
	t *testing.T, c client.Client, f function.Function,
) (port v1alpha1.XPUPort, exists bool) {
	t.Helper()
	key := client.ObjectKey{Namespace: kubeapitest.AgentNamespace, Name: claim.PortName(node, f.ID)}
	err := c.Get(t.Context(), key, &port)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return port, err == nil
}

// TestCRDMakesPortsAgain checks that a Port that was deleted by a user or with the Node is created
// again with the same spec, belongs to the current Node, and is served.
func TestCRDMakesPortsAgain(t *testing.T) {
	cluster.Need(t)
	agent := opitest.Start(t)
	declare(t, agent)
	startController(t)
	records, c, f := provisioningtest.NewJournal(t), admin(t), vf(0)
	api := startAPI(t)
	crd := newCRD(t, api, records)
	inBackground(t, "reconciler", crd.Run)
	serve(t, crd, records, f)
	first, _ := portOf(t, c, f)
	for _, test := range []struct {
		name string
		do   func()
	}{
		{"deleted", func() {}},
		{"Node object made again", func() {
			if err := c.Delete(t.Context(),
				&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}); err != nil {
				t.Fatal(err)
			}

			second := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
				Name: node, Labels: map[string]string{"made": "again"},
			}}
			if err := c.Create(t.Context(), second); err != nil {
				t.Fatal(err)
			}

			must.Eventually(t, "the agent knows the new Node object", func() bool {
				labels, err := api.NodeLabels(t.Context())
				return err == nil && labels["made"] == "again"
			})
		}},
	} {
		before, _ := portOf(t, c, f)
		test.do()
		if err := c.Delete(t.Context(), &before); err != nil { // as the garbage collector does
			t.Fatal(err)
		}

		var port v1alpha1.XPUPort
		must.Eventually(t, test.name+": the Port is up again", func() bool {
			var exists bool
			port, exists = portOf(t, c, f)
			return exists && port.UID != before.UID && len(port.Status.Conditions) > 0 &&
				port.Status.Conditions[0].Status == metav1.ConditionTrue && len(agent.Ports()) == 1
		})

		if port.Spec.Pod == nil || *port.Spec.Pod != *first.Spec.Pod ||
			port.Spec.MAC != first.Spec.MAC || port.Spec.Network != first.Spec.Network {
			t.Errorf("%s: spec %+v, want %+v", test.name, port.Spec, first.Spec)
		}
		if !maps.Equal(port.Labels, first.Labels) {
			t.Errorf("%s: labels %v, want %v", test.name, port.Labels, first.Labels)
		}

		var owner corev1.Node
		if err := c.Get(t.Context(), client.ObjectKey{Name: node}, &owner); err != nil {
			t.Fatal(err)
		}
		if port.OwnerReferences[0].UID != owner.UID {
			t.Errorf("%s: owner %s, want the Node %s", test.name,
				port.OwnerReferences[0].UID, owner.UID)
		}
	}
}

// TestCRDDeletesStrays checks that, with the rights of an agent, only XPUPorts are deleted that the
// agent created and that the journal does not have.
func TestCRDDeletesStrays(t *testing.T) {
	cluster.Need(t)
	declare(t, opitest.Start(t))
	startController(t)
	api, c := startAPI(t), admin(t)
	records := provisioningtest.NewJournal(t)
	before := newCRD(t, api, records)

	f := func(address string) function.Function {
		return function.Function{
			ID: function.ID{Address: pci.Address(address)}, PF: provisioningtest.PF,
		}
	}

	kept, stray := f("0000:3b:02.0"), f("0000:3b:02.1")
	withoutPort, inUse := f("0000:3b:02.2"), f("0000:3b:02.3")
	for _, f := range []function.Function{kept, stray, withoutPort, inUse} {
		serve(t, before, records, f)
	}

	ofClaim := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: kubeapitest.AgentNamespace, Name: node + "-0000-3b-02-4",
		},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: node, Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:02.4"},
			XPU:     provisioningtest.XPU,
			Network: provisioningtest.Green, MAC: "02:00:00:00:00:01", Claim: v1alpha1.ClaimRef{
				Name: "c", UID: "c", Request: "nic",
			},
		},
	}

	otherName := ofClaim.DeepCopy()
	otherName.Name, otherName.Spec.Function.PCIAddress, otherName.Spec.Claim = "by-hand", "0000:3b:02.5", v1alpha1.ClaimRef{}
	// The controller deletes Ports of claims that do not exist. The finalizer keeps this one.
	ofClaim.Finalizers = []string{"example.com/test"}
	for _, port := range []*v1alpha1.XPUPort{ofClaim, otherName} {
		if err := c.Create(t.Context(), port); err != nil {
			t.Fatal(err)
		}
	}

	must.Succeed(t, records.Delete(stray.ID))
	must.Succeed(t, records.Delete(inUse.ID))
	without := attached(withoutPort)
	without.Port = nil
	must.Succeed(t, records.Put(without))
	after := newCRD(t, api, records)
	after.InUse = func(id function.ID) bool { return id == inUse.ID }
	inBackground(t, "reconciler", after.Run)

	left := func() []string {
		var list v1alpha1.XPUPortList
		if err := c.List(t.Context(), &list,
			client.InNamespace(kubeapitest.AgentNamespace)); err != nil {
			t.Fatal(err)
		}

		var names []string
		for _, port := range list.Items {
			names = append(names, port.Name)
		}
		return names
	}

	want := []string{"by-hand", "node-0000-3b-02-0", "node-0000-3b-02-3", "node-0000-3b-02-4"}
	must.Eventually(t, "the strays are gone", func() bool { return slices.Equal(left(), want) })
	// The reconciler learns of the next stray by its creation, as when a Create arrives late.
	late := otherName.DeepCopy()
	late.ResourceVersion, late.UID, late.Name = "", "", "node-0000-3b-02-1"
	late.Spec.Function.PCIAddress = string(stray.ID.Address)
	late.Finalizers = []string{v1alpha1.FinalizerPort}
	if err := c.Create(t.Context(), late); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "the one that came late is gone", func() bool {
		return slices.Equal(left(), want)
	})
}

// store is an API server of one node with one XPU, whose cache may lag behind. There is no
// controller: a deleted Port is gone at once.
type store struct {
	mutex   sync.Mutex
	ports   map[types.NamespacedName]v1alpha1.XPUPort
	memory  map[types.NamespacedName]v1alpha1.XPUPort
	frozen  bool   // lastSeen is not updated
	silent  bool   // changes send no notification
	err     error  // result of every write
	reason  string // why Ports are not ready; "" if they are
	asked   int    // requests to create or delete, also refused ones
	created int
	deleted int
	changed notify.Signal
}

func (s *store) do(change func()) {
	s.mutex.Lock()
	defer s.mutex.Unlock()

	change()
	if s.frozen || maps.EqualFunc(s.ports, s.memory, func(a, b v1alpha1.XPUPort) bool {
		return a.UID == b.UID
	}) {
		return
	}

	s.memory = maps.Clone(s.ports)
	if !s.silent {
		s.changed.Notify()
	}
}

func (s *store) get(n *int) int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return *n
}

func (s *store) Synced(context.Context) bool                   { return true }
func (s *store) Subscribe(ctx context.Context) <-chan struct{} { return s.changed.Subscribe(ctx) }
func (s *store) XPUAway(function.Function) string              { return "" }

func (s *store) XPUOf(context.Context, pci.Address) (*v1alpha1.XPU, error) {
	return &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: provisioningtest.XPU}}, nil
}

func (s *store) Ports(context.Context) ([]v1alpha1.XPUPort, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return slices.Collect(maps.Values(s.memory)), nil
}

func (s *store) PortsOf(ctx context.Context, f function.ID) ([]v1alpha1.XPUPort, error) {
	all, err := s.Ports(ctx)
	return slices.DeleteFunc(all, func(p v1alpha1.XPUPort) bool {
		return claim.FunctionOf(p.Spec.Function) != f
	}), err
}

func (s *store) CreatePort(_ context.Context, port *v1alpha1.XPUPort) (err error) {
	s.do(func() {
		s.asked++
		key := client.ObjectKeyFromObject(port)
		if _, exists := s.ports[key]; s.err != nil || exists {
			err = cmp.Or(s.err,
				error(apierrors.NewAlreadyExists(schema.GroupResource{}, port.Name)))
			return
		}

		s.created++
		port.UID = types.UID("port-" + time.Now().String())
		port.Status.Conditions = []metav1.Condition{
			{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue},
		}
		if s.reason != "" {
			port.Status.Conditions[0] = metav1.Condition{
				Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: s.reason,
				Message: "why",
			}
		}

		if s.ports == nil {
			s.ports = map[types.NamespacedName]v1alpha1.XPUPort{}
		}

		s.ports[key] = *port
	})
	return err
}

func (s *store) DeletePort(_ context.Context, key types.NamespacedName, uid types.UID) (err error) {
	s.do(func() {
		s.asked++
		have, exists := s.ports[key]
		switch {
		case s.err != nil:
			err = s.err
		case !exists:
			err = apierrors.NewNotFound(schema.GroupResource{}, key.Name)
		case uid != "" && have.UID != uid:
			err = apierrors.NewConflict(schema.GroupResource{}, key.Name, errors.New("another one"))
		default:
			s.deleted++
			delete(s.ports, key)
		}
	})
	return err
}

// reconciler runs a CRD with the store in a bubble of its own, where time passes as soon as all
// goroutines wait.
func reconciler(
	t *testing.T,
	test func(t *testing.T, crd *provisioning.CRD, s *store, records *journal.Journal),
) {
	synctest.Test(t, func(t *testing.T) {
		s, records := &store{}, provisioningtest.NewJournal(t)
		crd := newCRD(t, s, records)
		inBackground(t, "reconciler", crd.Run)
		synctest.Wait()
		test(t, crd, s, records)
	})
}

// TestReconcilerWithoutEvent checks that a change without an event is found within a minute.
func TestReconcilerWithoutEvent(t *testing.T) {
	reconciler(t, func(t *testing.T, crd *provisioning.CRD, s *store, records *journal.Journal) {
		serve(t, crd, records, vf(0))
		s.do(func() { s.silent = true })
		must.Succeed(t, records.Delete(vf(0).ID))
		time.Sleep(time.Minute)
		synctest.Wait()
		if deleted := s.get(&s.deleted); deleted != 1 {
			t.Errorf("%d Ports deleted that the journal knows nothing of, want 1", deleted)
		}

		must.Succeed(t, records.Put(attached(vf(0))))
		time.Sleep(time.Minute)
		synctest.Wait()
		if created := s.get(&s.created); created != 2 {
			t.Errorf("%d Ports created, want the one of the pod a second time", created)
		}

		time.Sleep(time.Hour)
		if created, deleted := s.get(&s.created), s.get(&s.deleted); created != 2 || deleted != 1 {
			t.Errorf("%d created and %d deleted although nothing happened", created, deleted)
		}
	})
}

// TestReconcilerStates checks that only an attachment that is being released does not get its Port
// again.
func TestReconcilerStates(t *testing.T) {
	for state, want := range map[journal.State]int{
		journal.Reserved: 1, journal.Attaching: 1, journal.Attached: 1, journal.Lost: 1,
		journal.Detaching: 1, journal.Releasing: 0,
	} {
		reconciler(t, func(t *testing.T, _ *provisioning.CRD, s *store, records *journal.Journal) {
			a := attached(vf(0))
			a.State = state
			must.Succeed(t, records.Put(a))
			s.changed.Notify()
			synctest.Wait()
			if created := s.get(&s.created); created != want {
				t.Errorf("%s: %d Ports created, want %d", state, created, want)
			}
		})
	}
}

// TestReconcilerLeavesProvisionAlone checks that the reconciler does not write the Port of a
// Function that is being provisioned or deprovisioned.
func TestReconcilerLeavesProvisionAlone(t *testing.T) {
	refusal := errors.New("not now")
	reconciler(t, func(t *testing.T, crd *provisioning.CRD, s *store, records *journal.Journal) {
		during := func(call func() error) {
			t.Helper()
			s.do(func() { s.err, s.asked = refusal, 0 })
			done := make(chan error, 1)
			go func() { done <- call() }()

			for range 20 {
				synctest.Wait()
				s.changed.Notify()
			}

			synctest.Wait()
			if asked := s.get(&s.asked); asked != 1 {
				t.Errorf("the API server was asked %d times, want once", asked)
			}

			s.do(func() { s.err = nil })
			if err := <-done; err != nil {
				t.Error(err)
			}

			synctest.Wait()
		}

		a := attached(vf(0))
		a.State = journal.Reserved
		must.Succeed(t, records.Put(a))

		during(func() error {
			_, err := crd.Provision(t.Context(), blue(vf(0)))
			return err
		})

		a.State = journal.Releasing
		must.Succeed(t, records.Put(a))
		during(func() error { return crd.Deprovision(t.Context(), blue(vf(0))) })
		time.Sleep(time.Hour)
		if created, deleted := s.get(&s.created), s.get(&s.deleted); created != 1 || deleted != 1 {
			t.Errorf("%d created and %d deleted, want one Port that came and went",
				created, deleted)
		}
	})
}

// TestReconcilerDeletesBeforeProvision checks that Provision does not use a Port that is about to
// be deleted, even if the cache does not show the deletion yet.
func TestReconcilerDeletesBeforeProvision(t *testing.T) {
	reconciler(t, func(t *testing.T, crd *provisioning.CRD, s *store, records *journal.Journal) {
		serve(t, crd, records, vf(0))
		must.Succeed(t, records.Delete(vf(0).ID))
		s.changed.Notify()
		s.do(func() { s.frozen = true })
		synctest.Wait()
		if deleted := s.get(&s.deleted); deleted != 1 {
			t.Fatalf("%d deleted, want the Port that the journal knows nothing of", deleted)
		}

		must.Succeed(t, records.Put(attached(vf(0))))
		r := blue(vf(0))
		r.Pod = web
		done := make(chan error, 1)
		go func() {
			_, err := crd.Provision(t.Context(), r)
			done <- err
		}()

		time.Sleep(time.Second)
		select {
		case err := <-done:
			t.Fatalf("Provision returned %v for a Port that is deleted", err)
		default:
		}

		s.do(func() { s.frozen = false })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if ports, _ := s.Ports(t.Context()); len(ports) != 1 || s.get(&s.created) != 2 {
			t.Errorf("Ports %+v after %d were created, want the second", ports, s.get(&s.created))
		}
	})
}

// TestReconcilerTriesAgain checks that a write that the API server refuses is tried again, not too
// often, and logged once.
func TestReconcilerTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		log := funcr.New(func(_, line string) { told = append(told, line) }, funcr.Options{})
		s, records := &store{err: errors.New("not now")}, provisioningtest.NewJournal(t)
		must.Succeed(t, records.Put(attached(vf(0))))
		crd := newCRD(t, s, records)
		crd.Log = log
		inBackground(t, "reconciler", crd.Run)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if asked := s.get(&s.asked); asked < 40 || asked > 80 {
			t.Errorf("asked %d times in 10 min, want about every 10 s", asked)
		}
		if len(told) != 1 ||
			!strings.Contains(told[0], "create XPUPort xpu-system/node-0000-3b-02-0: not now") {
			t.Errorf("told %q, want once what is wrong", told)
		}

		s.do(func() { s.err = nil })
		time.Sleep(15 * time.Second)
		synctest.Wait()
		if created := s.get(&s.created); created != 1 {
			t.Errorf("%d created, want the Port", created)
		}
	})
}

// TestUndeclared checks that Provision soon reports an object that is not declared, but only after
// the object had time to be created. If the xPU is busy, Provision waits as long as the caller
// allows.
func TestUndeclared(t *testing.T) {
	for reason, want := range map[string]struct{ least, most time.Duration }{
		v1alpha1.ReasonNetworkNotFound: {5 * time.Second, 15 * time.Second},
		v1alpha1.ReasonNoXPU:           {5 * time.Second, 15 * time.Second},
		v1alpha1.ReasonProvisioning:    {time.Minute, time.Minute},
	} {
		reconciler(t, func(t *testing.T, crd *provisioning.CRD, s *store, _ *journal.Journal) {
			s.reason = reason
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()

			begin := time.Now()
			_, err := crd.Provision(ctx, blue(vf(0)))
			if took := time.Since(begin); err == nil || took < want.least || took > want.most {
				t.Errorf("%s: %v after %s, want an error after %s to %s", reason, err, took,
					want.least, want.most)
			}
			if err == nil || !strings.Contains(err.Error(), reason+": why") {
				t.Errorf("%s: error %v, want the reason in it", reason, err)
			}
		})
	}
}
