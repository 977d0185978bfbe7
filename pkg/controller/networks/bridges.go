// SPDX-License-Identifier: Apache-2.0

package networks

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
	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// Bridge is the logical bridge of a network at an XPU, by the names of both.
type Bridge struct{ Network, XPU string }

// bridgesOf returns the bridges that a Port needs.
func bridgesOf(port *v1alpha1.XPUPort) (bridges []Bridge) {
	for _, network := range port.Spec.AllNetworks() {
		bridges = append(bridges, Bridge{Network: network, XPU: port.Spec.XPU})
	}
	return bridges
}

// bridgeState is what is known about a bridge that Ports need, or about one that still must be
// deleted.
type bridgeState struct {
	known bool // whether err is the last outcome
	// why the agent does not serve or does not delete the bridge; nil if it serves it
	err error
}

// Bridges has OPI agents serve a network at an XPU from the first XPUPort there to the last. It
// works on pairs of network and XPU, so that an unstable agent causes work for its own bridges
// only.
type Bridges struct {
	cluster reconciling.Cluster
	options Options
	retries workqueue.TypedRateLimiter[Bridge]
	wakeups queue.Wakeups[Bridge]
	// changed wakes the reconciler of networks.
	changed func(network string)

	mu  sync.Mutex
	all map[Bridge]*bridgeState
	// The same bridges by XPU and by network, because an event of one XPU or network must not cost
	// more than its own bridges.
	byXPU, byNetwork multimap.Sets[string, Bridge]
}

// newBridges returns bridges of which nothing is known yet.
func newBridges(cluster reconciling.Cluster, o Options) *Bridges {
	return &Bridges{
		cluster: cluster, options: o, retries: reconciling.RetryLimiter[Bridge](),
		all: map[Bridge]*bridgeState{},
	}
}

func (r *Bridges) setup(mgr ctrl.Manager) error {
	onNetwork := func(_ context.Context, o client.Object) []Bridge {
		return slices.Collect(maps.Keys(r.ofNetwork(o.GetName())))
	}
	// The network in conflict with one that is gone or has other subnets may be usable now.
	onRival := func(ctx context.Context, o client.Object) (woken []Bridge) {
		for _, rival := range r.options.Catalog.Rivals(ctx, o) {
			woken = slices.AppendSeq(woken, maps.Keys(r.ofNetwork(rival.Name)))
		}
		return woken
	}
	ofXPU := func(_ context.Context, xpu string) []Bridge { return r.OfXPU(xpu) }
	onXPU := func(_ context.Context, o client.Object) []Bridge { return r.OfXPU(o.GetName()) }

	return builder.TypedControllerManagedBy[Bridge](mgr).Named("bridge").
		WithOptions(controller.TypedOptions[Bridge]{
			MaxConcurrentReconciles: r.options.Concurrency,
			RateLimiter:             reconciling.RetryLimiter[Bridge](),
		}).
		WatchesRawSource(model.Source(r.options.Ports, r.portChanged)).
		Watches(&v1alpha1.XPUNetwork{}, handler.TypedEnqueueRequestsFromMapFunc(onNetwork),
			reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPUNetwork{}, handler.TypedEnqueueRequestsFromMapFunc(onRival),
			reconciling.WhenGone).
		Watches(&v1alpha1.XPUNetwork{}, handler.TypedEnqueueRequestsFromMapFunc(onRival),
			reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPU{}, handler.TypedEnqueueRequestsFromMapFunc(onXPU),
			reconciling.WhenGone).
		WatchesRawSource(sessions.Source(r.options.Sessions, sessions.ConnectionChanged, ofXPU)).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r)
}

// portChanged enqueues a bridge when the first Port needs it, and BridgeGrace after the last Port
// is gone.
func (r *Bridges) portChanged(
	_ context.Context, change model.Change, queue model.Queue[Bridge],
) {
	for _, b := range bridgesOf(change.Port()) {
		switch needing := r.count(b); {
		case change.Made() && (r.begin(b) || needing == 1):
			queue.Add(b)
		case change.Gone() && needing == 0:
			queue.AddAfter(b, r.options.BridgeGrace)
		}
	}
}

// count returns how many Ports need the bridge.
func (r *Bridges) count(b Bridge) int {
	return r.options.Ports.Count(model.ByBridge, model.BridgeKey(b.Network, b.XPU))
}

// begin records a bridge that a Port needs, and reports whether it is new.
func (r *Bridges) begin(b Bridge) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.all[b] != nil {
		return false
	}

	r.all[b] = &bridgeState{}
	r.byXPU.Add(b.XPU, b)
	r.byNetwork.Add(b.Network, b)

	return true
}

// Wake has the agents serve these bridges at once, or delete the bridges that no Port needs.
func (r *Bridges) Wake(these ...Bridge) { r.wakeups.Add(0, these...) }

// OfXPU returns the bridges at an XPU: those that Ports need, and those that still must be deleted.
func (r *Bridges) OfXPU(xpu string) []Bridge {
	found := sets.New[Bridge]()
	for _, port := range r.options.Ports.Present(model.ByXPU, xpu) {
		found.Insert(bridgesOf(port)...)
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	return found.Insert(slices.Collect(r.byXPU.All(xpu))...).UnsortedList()
}

// ofNetwork returns the states of a network's bridges: of those that Ports need, and of those that
// still must be deleted. A bridge that was not worked on yet has the zero state.
func (r *Bridges) ofNetwork(network string) map[Bridge]bridgeState {
	found := map[Bridge]bridgeState{}
	for _, port := range r.options.Ports.Present(model.ByNetwork, network) {
		found[Bridge{Network: network, XPU: port.Spec.XPU}] = bridgeState{}
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	for b := range r.byNetwork.All(network) {
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
func (r *Bridges) reports(network string) map[string]bridgeReport {
	reports := map[string]bridgeReport{}
	for b, state := range r.ofNetwork(network) {
		reports[b.XPU] = bridgeReport{
			needed: r.IsNeeded(b), known: state.known, err: state.err,
		}
	}
	return reports
}

// IsNeeded reports whether a Port needs the bridge.
func (r *Bridges) IsNeeded(b Bridge) bool { return r.count(b) > 0 }

// note records the outcome of an attempt. It forgets a bridge that is gone.
func (r *Bridges) note(b Bridge, known bool, err error) {
	r.mu.Lock()
	state := r.all[b]
	if state == nil {
		r.mu.Unlock()
		return
	}

	news := state.known != known || fmt.Sprint(state.err) != fmt.Sprint(err)
	state.known, state.err = known, err
	gone := known && !r.IsNeeded(b) && (err == nil || errors.Is(err, errNoXPU))
	if gone {
		delete(r.all, b)
		r.byXPU.Remove(b.XPU, b)
		r.byNetwork.Remove(b.Network, b)
	}

	r.mu.Unlock()
	if news || gone {
		r.changed(b.Network)
	}

	if gone {
		// An XPU that is being deleted waits for it.
		r.options.Sessions.Notify(b.XPU, sessions.HealthChanged)
	}
}

// Reconcile has the agent serve the bridge, or delete it.
func (r *Bridges) Reconcile(ctx context.Context, b Bridge) (ctrl.Result, error) {
	if err := r.cluster.CheckLeader(ctx); err != nil {
		return ctrl.Result{}, err
	}

	var xpu v1alpha1.XPU
	err := r.cluster.Client.Get(ctx, client.ObjectKey{Name: b.XPU}, &xpu)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", b.XPU, err)
	}
	if err != nil { // Ports of an XPU that does not exist say so
		r.note(b, true, errNoXPU)
		return ctrl.Result{}, nil
	}

	conn := r.options.Sessions.Connection(b.XPU)
	if conn.Agent == nil {
		r.note(b, conn.Health.Known, errUnreachable)
		return ctrl.Result{}, nil // its return wakes the bridge
	}

	bounded, cancel := context.WithTimeout(ctx, r.options.AgentTimeout)
	defer cancel()

	if r.IsNeeded(b) {
		err = r.serve(ctx, bounded, conn.Agent, b)
	} else if err = conn.Agent.DeleteNetwork(bounded,
		r.options.Installation.NetworkID(b.Network)); err != nil && r.IsNeeded(b) {
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

func (r *Bridges) serve(ctx, bounded context.Context, agent *opi.Session, b Bridge) error {
	network, err := r.options.Catalog.Usable(ctx, b.Network)
	if err != nil {
		return err
	}
	return agent.EnsureNetwork(bounded, AtAgents(r.options.Installation, network))
}
