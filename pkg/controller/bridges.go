// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// bridge is the logical bridge of a network at an XPU, by the names of both.
type bridge struct{ network, xpu string }

func bridgeOf(port *v1alpha1.XPUPort) bridge {
	return bridge{network: port.Spec.Network, xpu: port.Spec.XPU}
}

// bridgeState is what is known about a bridge that Ports need, or about one that still must be
// deleted.
type bridgeState struct {
	known bool // whether err is the last outcome
	// why the agent does not serve or does not delete the bridge; nil if it serves it
	err error
}

// bridges has OPI agents serve a network at an XPU from the first XPUPort there to the last. It
// works on pairs of network and XPU, so that an unstable agent causes work for its own bridges
// only.
type bridges struct {
	base
	retries workqueue.TypedRateLimiter[bridge]
	wakeups queue.Wakeups[bridge]
	// changed wakes the reconciler of networks.
	changed func(network string)

	mu  sync.Mutex
	all map[bridge]*bridgeState
	// The same bridges by XPU and by network, because an event of one XPU or network must not cost
	// more than its own bridges.
	byXPU, byNetwork map[string]sets.Set[bridge]
}

func (r *bridges) setup(mgr ctrl.Manager) error {
	r.all = map[bridge]*bridgeState{}
	r.byXPU, r.byNetwork = map[string]sets.Set[bridge]{}, map[string]sets.Set[bridge]{}
	r.retries = reconciling.RetryLimiter[bridge]()
	onNetwork := func(_ context.Context, o client.Object) []bridge {
		return slices.Collect(maps.Keys(r.ofNetwork(o.GetName())))
	}
	ofXPU := func(_ context.Context, xpu string) []bridge { return r.ofXPU(xpu) }
	onXPU := func(_ context.Context, o client.Object) []bridge { return r.ofXPU(o.GetName()) }

	return builder.TypedControllerManagedBy[bridge](mgr).Named("bridge").
		WithOptions(controller.TypedOptions[bridge]{
			MaxConcurrentReconciles: r.Concurrency, RateLimiter: reconciling.RetryLimiter[bridge](),
		}).
		WatchesRawSource(model.Source(r.store, r.portChanged)).
		Watches(&v1alpha1.XPUNetwork{}, handler.TypedEnqueueRequestsFromMapFunc(onNetwork),
			reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPU{}, handler.TypedEnqueueRequestsFromMapFunc(onXPU), reconciling.WhenGone).
		WatchesRawSource(sessions.Source(r.sessions, sessions.ConnectionChanged, ofXPU)).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r)
}

// portChanged enqueues a bridge when the first Port needs it, and BridgeGrace after the last Port
// is gone.
func (r *bridges) portChanged(
	_ context.Context, change model.Change, queue model.Queue[bridge],
) {
	b := bridgeOf(change.Port())
	switch needing := r.ports(b); {
	case change.Made() && (r.begin(b) || needing == 1):
		queue.Add(b)
	case change.Gone() && needing == 0:
		queue.AddAfter(b, r.BridgeGrace)
	}
}

// ports returns how many Ports need the bridge.
func (r *bridges) ports(b bridge) int {
	return r.store.Count(model.ByBridge, model.BridgeKey(b.network, b.xpu))
}

// begin records a bridge that a Port needs, and reports whether it is new.
func (r *bridges) begin(b bridge) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.all[b] != nil {
		return false
	}

	r.all[b] = &bridgeState{}
	insert(r.byXPU, b.xpu, b)
	insert(r.byNetwork, b.network, b)

	return true
}

// release has the agent delete the bridge at once, unless a Port needs it.
func (r *bridges) release(b bridge) { r.wakeups.Add(0, b) }

func insert(index map[string]sets.Set[bridge], key string, b bridge) {
	if index[key] == nil {
		index[key] = sets.New[bridge]()
	}
	index[key].Insert(b)
}

func remove(index map[string]sets.Set[bridge], key string, b bridge) {
	if index[key].Delete(b).Len() == 0 {
		delete(index, key)
	}
}

// ofXPU returns the bridges at an XPU: those that Ports need, and those that still must be deleted.
func (r *bridges) ofXPU(xpu string) []bridge {
	found := sets.New[bridge]()
	for _, port := range r.store.Present(model.ByXPU, xpu) {
		found.Insert(bridgeOf(port))
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	return found.Union(r.byXPU[xpu]).UnsortedList()
}

// ofNetwork returns the states of a network's bridges: of those that Ports need, and of those that
// still must be deleted. A bridge that was not worked on yet has the zero state.
func (r *bridges) ofNetwork(network string) map[bridge]bridgeState {
	found := map[bridge]bridgeState{}
	for _, port := range r.store.Present(model.ByNetwork, network) {
		found[bridgeOf(port)] = bridgeState{}
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	for b := range r.byNetwork[network] {
		found[b] = *r.all[b]
	}

	return found
}

// bridgeReport is the state of a bridge, and whether a Port needs it.
type bridgeReport struct {
	needed, known bool
	err           error
}

// reports returns the states of a network's bridges by XPU.
func (r *bridges) reports(network string) map[string]bridgeReport {
	reports := map[string]bridgeReport{}
	for b, state := range r.ofNetwork(network) {
		reports[b.xpu] = bridgeReport{
			needed: r.isNeeded(b), known: state.known, err: state.err,
		}
	}
	return reports
}

// isNeeded reports whether a Port needs the bridge.
func (r *bridges) isNeeded(b bridge) bool { return r.ports(b) > 0 }

// note records the outcome of an attempt. It forgets a bridge that is gone.
func (r *bridges) note(b bridge, known bool, err error) {
	r.mu.Lock()
	state := r.all[b]
	if state == nil {
		r.mu.Unlock()
		return
	}

	news := state.known != known || fmt.Sprint(state.err) != fmt.Sprint(err)
	state.known, state.err = known, err
	gone := known && !r.isNeeded(b) && (err == nil || errors.Is(err, errNoXPU))
	if gone {
		delete(r.all, b)
		remove(r.byXPU, b.xpu, b)
		remove(r.byNetwork, b.network, b)
	}

	r.mu.Unlock()
	if news || gone {
		r.changed(b.network)
	}

	if gone {
		r.sessions.Notify(b.xpu, sessions.HealthChanged) // an XPU that is being deleted waits for it
	}
}

// Reconcile has the agent serve the bridge, or delete it.
func (r *bridges) Reconcile(ctx context.Context, b bridge) (ctrl.Result, error) {
	if err := r.CheckLeader(ctx); err != nil {
		return ctrl.Result{}, err
	}

	var xpu v1alpha1.XPU
	err := r.Client.Get(ctx, client.ObjectKey{Name: b.xpu}, &xpu)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", b.xpu, err)
	}
	if err != nil { // Ports of an XPU that does not exist say so
		r.note(b, true, errNoXPU)
		return ctrl.Result{}, nil
	}

	conn := r.sessions.Connection(b.xpu)
	if conn.Agent == nil {
		r.note(b, conn.Health.Known, errUnreachable)
		return ctrl.Result{}, nil // its return wakes the bridge
	}

	bounded, cancel := context.WithTimeout(ctx, r.AgentTimeout)
	defer cancel()

	if r.isNeeded(b) {
		err = r.serve(ctx, bounded, conn.Agent, b)
	} else if err = conn.Agent.DeleteNetwork(bounded,
		r.Installation.NetworkID(b.network)); err != nil && r.isNeeded(b) {
		return ctrl.Result{RequeueAfter: reconciling.FirstRetry}, nil // a Port came meanwhile
	}

	if _, isOpi := errors.AsType[*opi.Error](err); err != nil && !isOpi {
		if refusal, ok := errors.AsType[*reconciling.Refusal](err); ok {
			r.note(b, true, errors.New(refusal.Message)) // the XPUNetwork's events wake the bridge
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, err
	}

	r.note(b, true, err)
	if err != nil {
		return ctrl.Result{RequeueAfter: r.retries.When(b)}, nil
	}

	r.retries.Forget(b)
	return ctrl.Result{}, nil
}

var (
	errNoXPU       = errors.New("there is no such XPU")
	errUnreachable = errors.New("the OPI agent cannot be reached")
)

// isAway reports whether the error says that the agent could not be reached.
func isAway(err error) bool {
	return errors.Is(err, errUnreachable) || errors.Is(err, opi.ErrUnavailable)
}

func (r *bridges) serve(ctx, bounded context.Context, agent *opi.Session, b bridge) error {
	network, err := r.usableNetwork(ctx, b.network)
	if err != nil {
		return err
	}
	return agent.EnsureNetwork(bounded, r.opiNetwork(network))
}
