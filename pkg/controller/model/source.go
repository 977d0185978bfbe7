// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Queue is the work queue of a controller.
type Queue[R comparable] = workqueue.TypedRateLimitingInterface[R]

// Source lets a controller watch a model: enqueue is called for each change with the controller's
// queue, as [Ports.Listen] says. It is first called when the model is complete, so that it may look
// up other Ports, and only then the controller begins to work.
func Source[R comparable](
	p *Ports, enqueue func(context.Context, Change, Queue[R]),
) source.TypedSyncingSource[R] {
	return &portSource[R]{ports: p, enqueue: enqueue}
}

type portSource[R comparable] struct {
	ports   *Ports
	enqueue func(context.Context, Change, Queue[R])
	listen  func(Change) // set by Start
}

func (s *portSource[R]) Start(ctx context.Context, queue Queue[R]) error {
	s.listen = func(change Change) { s.enqueue(ctx, change, queue) }
	return nil
}

// WaitForSync also begins to listen. A listener that was called while the model is filled, and that
// looked up another Port, would wait for the model to be complete, and by that keep it from it.
func (s *portSource[R]) WaitForSync(ctx context.Context) error {
	if err := s.ports.wait(ctx); err != nil {
		return err
	}
	s.ports.Listen(s.listen)
	return nil
}

// Requests enqueues the requests that a function returns for the Port of a change. when selects the
// changes.
func Requests(
	when func(Change) bool, of func(context.Context, *v1alpha1.XPUPort) []reconcile.Request,
) func(context.Context, Change, Queue[reconcile.Request]) {
	return func(ctx context.Context, change Change, queue Queue[reconcile.Request]) {
		if !when(change) {
			return
		}
		for _, request := range of(ctx, change.Port()) {
			queue.Add(request)
		}
	}
}

// RequestsBy returns a request for each Port under a key of an index. The only possible error is
// that the controller ends before the model is complete, which is logged.
func (p *Ports) RequestsBy(ctx context.Context, index Index, key string) []reconcile.Request {
	found, err := p.By(ctx, index, key)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing objects to reconcile")
		return nil
	}

	var requests []reconcile.Request
	for _, port := range found {
		requests = append(requests,
			reconcile.Request{NamespacedName: client.ObjectKeyFromObject(port)})
	}

	return requests
}
