// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestNodeMadeAnew: when the Node object was deleted and made again, the garbage collector deletes
// the ResourceSlices of the one before. Those that follow belong to the new one, so that they stay.
func TestNodeMadeAnew(t *testing.T) {
	node := func(uid types.UID) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", UID: uid}}
	}
	client := fake.NewClientset(node("first"))
	slices := client.ResourceV1().ResourceSlices()
	var uid atomic.Value
	uid.Store(types.UID("first"))

	writer := &SliceWriter{Client: client, Node: "node1",
		NodeUID:     func() types.UID { return uid.Load().(types.UID) },
		HandleError: func(_ context.Context, err error, msg string) { t.Log(msg, err) }}
	list := &pools{}
	list.set(pooltest.DRA("fast", pooltest.VF(0x3b, 0)))
	publisher := &Publisher{
		Node: "node1", Pools: list.Pools, Health: noProblems(), Features: allFeatures,
		Publish: writer.PublishResources, Stale: writer.Stale,
		Metrics: NewMetrics(prometheus.NewRegistry()), Log: testr.New(t),
	}
	changes := make(chan struct{}, 1)
	must.Run(t, func(ctx context.Context) error { return publisher.Run(ctx, changes) })
	t.Cleanup(writer.Stop)

	wantOwner := func(want types.UID) {
		t.Helper()
		must.EventuallySucceed(t, "ResourceSlices of Node "+string(want), func() error {
			all, err := slices.List(t.Context(), metav1.ListOptions{})
			if err != nil || len(all.Items) == 0 {
				return fmt.Errorf("%d ResourceSlices, %w", len(all.Items), err)
			}
			for _, s := range all.Items {
				if s.OwnerReferences[0].UID != want {
					return fmt.Errorf("owner is %s", s.OwnerReferences[0].UID)
				}
			}
			return nil
		})
	}
	wantOwner("first")

	_, err := client.CoreV1().Nodes().Update(t.Context(), node("second"), metav1.UpdateOptions{})
	must.Succeed(t, err)
	uid.Store(types.UID("second"))
	changes <- struct{}{}
	all, err := slices.List(t.Context(), metav1.ListOptions{})
	must.Succeed(t, err)
	for _, s := range all.Items { // as the garbage collector does
		must.Succeed(t, slices.Delete(t.Context(), s.Name, metav1.DeleteOptions{}))
	}
	wantOwner("second")
}
