// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	"sigs.k8s.io/multicluster-runtime/pkg/multicluster"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// shuffled lists objects in any order, as a cache does.
type shuffled struct{ client.Reader }

func (s shuffled) List(
	ctx context.Context, list client.ObjectList, _ ...client.ListOption,
) error {
	if err := s.Reader.List(ctx, list); err != nil {
		return err
	}
	items, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	rand.Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
	return meta.SetList(list, items)
}

// TestRemainingStaysTheSame: the text goes into the status of a tenant that leaves, each second. It
// is written only when something has changed.
func TestRemainingStaysTheSame(t *testing.T) {
	all := fake.NewClientBuilder().WithScheme(brokerScheme(t)).Build()
	for n := range 8 {
		port, network := &v1alpha1.XPUPort{}, &v1alpha1.XPUNetwork{}
		port.Namespace, port.Name = "default", fmt.Sprint("port-", n)
		network.Name = fmt.Sprint("network-", n)
		port.Finalizers = []string{v1alpha1.FinalizerPort}
		network.Finalizers = []string{v1alpha1.FinalizerNetwork}
		must.Succeed(t, all.Create(t.Context(), port))
		must.Succeed(t, all.Create(t.Context(), network))
	}

	want := "XPUPorts of its cluster are being let go, such as port-0"
	for range 20 {
		text, err := remainingIn(t.Context(), shuffled{all}, "a")
		must.Succeed(t, err)
		if text != want {
			t.Fatalf("%q, want %q", text, want)
		}
	}
}

// unjoined is a manager of clusters that have not joined.
type unjoined struct{ mcmanager.Manager }

func (unjoined) GetCluster(context.Context, multicluster.ClusterName) (cluster.Cluster, error) {
	return nil, multicluster.ErrClusterNotFound
}

// TestLeavingTenantIsAsked checks that a tenant that leaves stays until it is known whether its
// cluster answers, as after a start of the broker. The objects in its cluster would keep their
// finalizers otherwise.
func TestLeavingTenantIsAsked(t *testing.T) {
	tenant := &v1alpha1.XPUTenant{ObjectMeta: metav1.ObjectMeta{
		Name: "a", Finalizers: []string{v1alpha1.FinalizerTenant},
	}}
	infra := fake.NewClientBuilder().WithScheme(brokerScheme(t)).WithObjects(tenant).Build()
	must.Succeed(t, infra.Delete(t.Context(), tenant))

	members := NewMembers()
	r := &xpuTenants{syncer: syncer{infra: infra, live: infra, members: members,
		manager: unjoined{}, limits: newLimitTracker()}}
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(tenant)}
	stays := func() bool {
		_, err := r.Reconcile(t.Context(), request)
		must.Succeed(t, err)
		return !apierrors.IsNotFound(infra.Get(t.Context(), request.NamespacedName, tenant))
	}

	if !stays() {
		t.Error("it is gone before its cluster was asked")
	}
	members.byTenant["a"] = &member{state: memberState{reason: v1alpha1.ReasonUnreachable}}
	if stays() {
		t.Error("it waits for a cluster that does not answer")
	}
}
