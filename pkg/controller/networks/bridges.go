// SPDX-License-Identifier: Apache-2.0

package networks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
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

// Bridges has OPI agents serve a network at an XPU from the first XPUPort there to the last.
// XPUPorts in networks that it is routed with count too. It works on pairs of network and XPU, so
// that an unstable agent causes work for its own bridges only.
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
	// left has the networks that beginLeft was called for.
	left sets.Set[types.UID]
}

// newBridges returns bridges of which nothing is known yet.
func newBridges(cluster reconciling.Cluster, o Options) *Bridges {
	return &Bridges{
		cluster: cluster, options: o, retries: reconciling.RetryLimiter[Bridge](),
		all: map[Bridge]*bridgeState{}, left: sets.New[types.UID](),
	}
}

func (r *Bridges) setup(mgr ctrl.Manager) error {
	onNetwork := func(ctx context.Context, o client.Object) []Bridge {
		return r.around(o.GetName(), r.mustRouteWith(ctx, o.GetName())).UnsortedList()
	}
	ofXPU := r.OfXPU
	onXPU := func(ctx context.Context, o client.Object) []Bridge {
		return r.OfXPU(ctx, o.GetName())
	}

	return builder.TypedControllerManagedBy[Bridge](mgr).Named("bridge").
		WithOptions(controller.TypedOptions[Bridge]{
			MaxConcurrentReconciles: r.options.Concurrency,
			RateLimiter:             reconciling.RetryLimiter[Bridge](),
		}).
		WatchesRawSource(model.Source(r.options.Ports, r.portChanged)).
		Watches(&v1alpha1.XPUNetwork{}, handler.TypedEnqueueRequestsFromMapFunc(onNetwork),
			reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPUNetwork{}, handler.TypedEnqueueRequestsFromMapFunc(r.toDecide),
			reconciling.WhenGone).
		Watches(&v1alpha1.XPUNetwork{}, handler.TypedEnqueueRequestsFromMapFunc(r.toDecide),
			reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPU{}, handler.TypedEnqueueRequestsFromMapFunc(onXPU),
			reconciling.WhenGone).
		WatchesRawSource(sessions.Source(r.options.Sessions, sessions.ConnectionChanged, ofXPU)).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r)
}

// portChanged enqueues a bridge when the first Port needs it, and BridgeGrace after the last Port
// is gone. It wakes a network when its first Port comes to an XPU or its last one goes, because the
// network's status depends on whether Ports of its own are there.
func (r *Bridges) portChanged(
	ctx context.Context, change model.Change, queue model.Queue[Bridge],
) {
	if !change.Made() && !change.Gone() {
		return
	}

	own := bridgesOf(change.Port())
	first := false
	for _, b := range own {
		n := r.count(b)
		first = first || n == 1
		if change.Made() && n == 1 || change.Gone() && n == 0 {
			r.changed(b.Network)
		}
	}

	for b := range r.neededWith(ctx, own...) {
		switch {
		case change.Made() && (r.begin(b) || first):
			queue.Add(b)
		case change.Gone() && !r.IsNeeded(ctx, b):
			queue.AddAfter(b, r.options.BridgeGrace)
		}
	}
}

// count returns how many Ports at the bridge's XPU are in its network.
func (r *Bridges) count(b Bridge) int {
	return r.options.Ports.Count(model.ByBridge, model.BridgeKey(b.Network, b.XPU))
}

// begin records a bridge that a Port needs, or that an agent may still have. It reports whether the
// bridge is new.
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
func (r *Bridges) OfXPU(ctx context.Context, xpu string) []Bridge {
	found := sets.New[Bridge]()
	for _, port := range r.options.Ports.Present(model.ByXPU, xpu) {
		found.Insert(bridgesOf(port)...)
	}
	found = r.neededWith(ctx, found.UnsortedList()...)

	r.mu.Lock()
	defer r.mu.Unlock()
	return found.Insert(slices.Collect(r.byXPU.All(xpu))...).UnsortedList()
}

// ofNetwork returns the states of a network's bridges: of those at the XPUs of its Ports, and of
// those that were begun and are not gone yet. A bridge that was not worked on yet has the zero
// state.
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
	needed   bool
	hasPorts bool // a Port at the XPU is in the bridge's network
	known    bool
	err      error
}

// reports returns the states of a network's bridges by XPU.
func (r *Bridges) reports(
	ctx context.Context, network string,
) (map[string]bridgeReport, error) {
	routedWith, err := r.routedWith(ctx, network)
	if err != nil {
		return nil, err
	}

	reports := map[string]bridgeReport{}
	states := r.ofNetwork(network)
	for b := range r.around(network, routedWith) {
		reports[b.XPU] = bridgeReport{
			needed: r.isNeeded(b, routedWith), hasPorts: r.count(b) > 0, known: states[b].known,
			err: states[b].err,
		}
	}

	return reports, nil
}

// IsNeeded reports whether Ports need the bridge: Ports at the XPU in its network, or in a network
// that it is routed with. A bridge of which this is not known is needed.
func (r *Bridges) IsNeeded(ctx context.Context, b Bridge) bool {
	if r.count(b) > 0 {
		return true
	}
	routedWith, err := r.routedWith(ctx, b.Network)
	return err != nil || r.isNeeded(b, routedWith)
}

// note records the outcome of an attempt. It forgets a bridge that is gone.
func (r *Bridges) note(ctx context.Context, b Bridge, known bool, err error) {
	needed := r.IsNeeded(ctx, b)
	r.mu.Lock()
	state := r.all[b]
	if state == nil {
		r.mu.Unlock()
		return
	}

	news := state.known != known || fmt.Sprint(state.err) != fmt.Sprint(err)
	state.known, state.err = known, err
	gone := known && !needed && (err == nil || errors.Is(err, errNoXPU))
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
		r.retries.Forget(b)
		// An XPU that is being deleted waits for it.
		r.options.Sessions.Notify(b.XPU, sessions.HealthChanged)
	}
}

// Reconcile has the agent serve the bridge, or delete it.
func (r *Bridges) Reconcile(ctx context.Context, b Bridge) (ctrl.Result, error) {
	if err := r.cluster.CheckLeader(ctx); err != nil {
		return ctrl.Result{}, err
	}

	if r.IsNeeded(ctx, b) {
		r.begin(b)
	}

	var xpu v1alpha1.XPU
	err := r.cluster.Client.Get(ctx, client.ObjectKey{Name: b.XPU}, &xpu)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", b.XPU, err)
	}
	if err != nil { // Ports of an XPU that does not exist say so
		r.note(ctx, b, true, errNoXPU)
		return ctrl.Result{}, nil
	}

	conn := r.options.Sessions.Connection(b.XPU)
	if conn.Agent == nil {
		r.note(ctx, b, conn.Health.Known, errUnreachable)
		return ctrl.Result{}, nil // its return wakes the bridge
	}

	bounded, cancel := context.WithTimeout(ctx, r.options.AgentTimeout)
	defer cancel()

	if r.IsNeeded(ctx, b) {
		err = r.serve(ctx, bounded, conn.Agent, b)
	} else {
		err = conn.Agent.DeleteNetwork(bounded, r.options.Installation.NetworkID(b.Network))
		if r.IsNeeded(ctx, b) { // a Port came meanwhile, or a conflict ended
			r.note(ctx, b, false, nil)
			return ctrl.Result{RequeueAfter: reconciling.FirstRetry}, nil
		}
	}

	if _, isOpi := errors.AsType[*opi.Error](err); err != nil && !isOpi {
		if refusal, ok := errors.AsType[*reconciling.Refusal](err); ok {
			r.note(ctx, b, true, errors.New(refusal.Message)) // the XPUNetwork's events wake the bridge
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, err
	}

	r.note(ctx, b, true, err)
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
