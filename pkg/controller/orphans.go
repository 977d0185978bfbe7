package controller

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// orphans deletes ports from agents that no XPUPort backs, such as after an XPUPort was removed by force, or a cluster was
// restored from an older state. It looks each time the connection to an agent comes up.
type orphans struct {
	base
	seen durations[orphan]
}

type orphan struct{ xpu, id string }

func (r *orphans) setup(mgr ctrl.Manager) error {
	if r.OrphanGrace < 0 {
		return nil
	}
	return newController(mgr, "orphan", r.Concurrency).
		WatchesRawSource(r.sessions.source(connectionChanged, theXPU)).
		Complete(reconcile.AsReconciler(r.client, r))
}

// Reconcile is for an XPU of which the connection came up or went down a moment ago.
func (r *orphans) Reconcile(ctx context.Context, xpu *v1alpha1.XPU) (ctrl.Result, error) {
	agent := r.sessions.connection(xpu.Name).agent
	if agent == nil {
		return ctrl.Result{}, nil // there will be another look
	}
	log := ctrl.LoggerFrom(ctx)
	agentCtx, cancel := context.WithTimeout(ctx, r.AgentTimeout)
	defer cancel()
	// In this order: a port is made only for an XPUPort that the cache has.
	listed, err := agent.ListPorts(agentCtx)
	if err != nil {
		log.V(1).Info("cannot look for orphans", "error", err.Error())
		return ctrl.Result{RequeueAfter: r.retries.When(requestFor(xpu))}, nil
	}
	r.retries.Forget(requestFor(xpu))
	backed, err := r.backed(ctx, xpu)
	if err != nil {
		return ctrl.Result{}, err
	}
	suspects := sets.New[orphan]()
	for _, port := range listed {
		if r.Installation.OwnsPort(port.Port) && !backed.Has(port.ID) {
			suspects.Insert(orphan{xpu: xpu.Name, id: port.ID})
		}
	}
	r.seen.retain(func(o orphan) bool { return o.xpu != xpu.Name || suspects.Has(o) })
	var after time.Duration
	for key := range suspects {
		if waited := r.seen.elapsed(key); waited < r.OrphanGrace {
			after = smaller(after, r.OrphanGrace-waited)
			continue
		}
		r.seen.reset(key)
		if err := agent.DeletePort(agentCtx, key.id); err != nil {
			log.Info("cannot delete orphan", "bridgePort", key.id, "error", err.Error())
			after = smaller(after, r.OrphanGrace)
			continue
		}
		log.Info("deleted a port that no XPUPort backs", "bridgePort", key.id)
		r.events.Eventf(xpu, nil, corev1.EventTypeNormal, "OrphanDeleted", "Delete",
			"deleted port %s, which no XPUPort backed for %s", key.id, r.OrphanGrace)
		// Had an XPUPort come for it in this very moment, its port may be the one that was just deleted.
		r.sessions.tell(xpu.Name, connectionChanged)
	}
	return ctrl.Result{RequeueAfter: after}, nil
}

// backed are the ids of the ports that XPUPorts back at the XPU's agent, which other XPUs may share.
func (r *orphans) backed(ctx context.Context, xpu *v1alpha1.XPU) (sets.Set[string], error) {
	var sharing v1alpha1.XPUList
	if err := r.client.List(ctx, &sharing, client.MatchingFields{xpusByEndpoint: xpu.Spec.Endpoint}); err != nil {
		return nil, fmt.Errorf("list XPUs at %s: %w", xpu.Spec.Endpoint, err)
	}
	backed := sets.New[string]()
	for i := range sharing.Items {
		found, err := listPorts(ctx, r.client, client.MatchingFields{portsByXPU: sharing.Items[i].Name})
		if err != nil {
			return nil, err
		}
		for j := range found {
			if id, err := opi.PortID(claim.FunctionOf(found[j].Spec.Function)); err == nil {
				backed.Insert(id)
			}
		}
	}
	return backed, nil
}
