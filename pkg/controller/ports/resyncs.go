// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
)

// resyncs compares all ports and networks of an agent with the wanted ones: at each new connection,
// because the agent may have forgotten some, and then every ResyncPeriod. Ports and networks that
// differ are reconciled.
//
// Orphans are the installation's ports, networks, gateways and VRFs that no object wants, for
// example after an XPUPort was removed by force, a cluster was restored from an older state, or a
// network was deleted while the agent was away. They are deleted after OrphanGrace. Ports and
// networks of others are reported in the XPU's status.
type resyncs struct {
	reconciling.Cluster
	Options
	serving *reconciler
	retries workqueue.TypedRateLimiter[reconcile.Request]
	seen    reconciling.Durations[orphan]
}

// orphan is a port, a gateway, a network or a VRF of the installation at an agent that no object
// wants.
type orphan struct{ xpu, kind, id string }

// The kinds of orphans, in the order in which they are deleted: a network cannot be deleted before
// its ports and its gateway, nor a VRF before its gateways.
const (
	kindPort    = "port"
	kindGateway = "gateway"
	kindNetwork = "network"
	kindVRF     = "vrf"
)

func (o orphan) rank() int {
	return slices.Index([]string{kindPort, kindGateway, kindNetwork, kindVRF}, o.kind)
}

func (r *resyncs) setup(mgr ctrl.Manager) error {
	return reconciling.NewController(mgr, "resync", r.Concurrency).
		WatchesRawSource(sessions.Source(r.Sessions, sessions.ConnectionChanged,
			sessions.RequestFor)).
		Complete(r.Guarded(r))
}

// Reconcile is called when the connection to the XPU's agent changed, also at its end because the
// XPU is gone, or when the next comparison is due.
func (r *resyncs) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var xpu v1alpha1.XPU
	err := r.Client.Get(ctx, req.NamespacedName, &xpu)
	if apierrors.IsNotFound(err) {
		r.seen.Retain(func(o orphan) bool { return o.xpu != req.Name })
		r.retries.Forget(req)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
	}
	return r.compare(ctx, &xpu)
}

// compare compares what the XPU's agent has with what is wanted.
func (r *resyncs) compare(ctx context.Context, xpu *v1alpha1.XPU) (ctrl.Result, error) {
	agent := r.Sessions.Connection(xpu.Name).Agent
	if agent == nil {
		return ctrl.Result{}, nil // there will be another look
	}

	// Each port is then created again at a new connection, because the agent may have lost it.
	if !agent.Traits().Verifies {
		r.serving.wakeups.Add(0, r.Ports.RequestsBy(ctx, model.ByXPU, xpu.Name)...)
		return ctrl.Result{}, nil
	}

	bounded, cancel := context.WithTimeout(ctx, r.AgentTimeout)
	defer cancel()

	// The agent is listed before the model is read, because ports are created only for XPUPorts
	// that the model has.
	bridges, err := agent.ListNetworks(bounded)
	if err != nil {
		return r.later(ctx, xpu, err)
	}

	// An agent may refuse its VRFs and gateways to this client. Routed networks are then not in
	// service here, and their bridges ask for each of them.
	vrfs, gateways, err := agent.ListGateways(bounded)
	if err != nil && !opi.IsDenied(err) {
		return r.later(ctx, xpu, err)
	}

	listed, err := agent.ListPorts(bounded)
	if err != nil {
		return r.later(ctx, xpu, err)
	}

	r.retries.Forget(reconciling.RequestFor(xpu))
	orphans := sets.New[orphan]()
	foreign := &v1alpha1.XPUForeign{}
	up := r.compareNetworks(ctx, xpu, bridges, orphans, foreign)
	if err := r.compareGateways(ctx, xpu, vrfs, gateways, up, orphans, foreign); err != nil {
		return ctrl.Result{}, err
	}
	if err := r.comparePorts(ctx, xpu, listed, up, orphans, foreign); err != nil {
		return ctrl.Result{}, err
	}

	after := r.collect(ctx, bounded, agent, xpu, orphans)
	r.Sessions.Compared(xpu.Name, agent, orphans.Len() == 0)
	before := xpu.DeepCopy()

	if xpu.Status.Foreign = foreign; len(foreign.Examples) == 0 {
		xpu.Status.Foreign = nil
	}
	if err := reconciling.WriteStatus(ctx, r.Client, xpu, before); err != nil {
		return ctrl.Result{}, err
	}

	// The jitter keeps the comparisons of many agents apart.
	period := r.ResyncPeriod + rand.N(r.ResyncPeriod/4+1)
	return ctrl.Result{RequeueAfter: optional.Min(after, period)}, nil
}

// later tries again. The session finds out whether the agent answers at all. If the agent has no
// lists, or lists without an end, each port and network is verified separately.
func (r *resyncs) later(ctx context.Context, xpu *v1alpha1.XPU, err error) (ctrl.Result, error) {
	ctrl.LoggerFrom(ctx).Info("cannot compare what the OPI agent has with what is wanted", "error",
		err.Error())
	if errors.Is(err, opi.ErrUnsupported) {
		r.serving.wakeups.Add(0, r.Ports.RequestsBy(ctx, model.ByXPU, xpu.Name)...)
		return ctrl.Result{RequeueAfter: r.ResyncPeriod}, nil
	}
	return ctrl.Result{RequeueAfter: r.retries.When(reconciling.RequestFor(xpu))}, nil
}

// comparePorts enqueues the XPUPorts that are up and that the agent does not serve as wanted. up
// contains the ids of the networks in service.
func (r *resyncs) comparePorts(
	ctx context.Context, xpu *v1alpha1.XPU, listed []opi.PortStatus, up sets.Set[string],
	orphans sets.Set[orphan], foreign *v1alpha1.XPUForeign,
) error {
	wanted, err := r.Ports.By(ctx, model.ByXPU, xpu.Name)
	if err != nil {
		return err
	}

	has := map[string]opi.PortStatus{}
	for _, port := range listed {
		has[port.ID] = port
	}

	backed := sets.New[string]()
	for i := range wanted {
		port := wanted[i]
		want, err := r.AgentPorts.Of(port, xpu)
		backed.Insert(want.ID)
		got := has[want.ID]
		served := err == nil && got.State == opi.StateUp && got.Equal(want) &&
			up.HasAll(want.Networks...)
		if isReady(port) && !served { // others are being worked at
			r.serving.wakeups.Add(0, reconciling.RequestFor(port))
		}
	}

	for _, port := range listed {
		switch {
		case port.State == opi.StateUnknown:
			foreign.Unknown++
			foreign.Examples = example(foreign.Examples, "port "+port.ID+" (unknown whose)")
		case port.State == opi.StateDeleting && len(port.Networks) == 0: // whosever it is
		case !r.Installation.OwnsPort(port.Port),
			r.AgentPorts.ClaimedElsewhere(ctx, xpu.Name, port) != "":
			foreign.Ports++
			foreign.Examples = example(foreign.Examples, "port "+port.ID)
		case !backed.Has(port.ID) && port.State != opi.StateDeleting:
			orphans.Insert(orphan{xpu.Name, kindPort, port.ID})
		}
	}

	return nil
}

// compareNetworks enqueues the bridges that the agent does not serve as wanted. It returns the ids
// of the networks in service.
func (r *resyncs) compareNetworks(
	ctx context.Context, xpu *v1alpha1.XPU, listed []opi.NetworkStatus, orphans sets.Set[orphan],
	foreign *v1alpha1.XPUForeign,
) (up sets.Set[string]) {
	up = sets.New[string]()
	for _, network := range listed {
		if network.State == opi.StateUp {
			up.Insert(network.ID)
		}
	}

	known := sets.New[string]()
	for _, b := range r.Bridges.OfXPU(ctx, xpu.Name) {
		id := r.Installation.NetworkID(b.Network)
		known.Insert(id)
		if !up.Has(id) && r.Bridges.IsNeeded(ctx, b) {
			r.Bridges.Wake(b)
		}
	}

	for _, network := range listed {
		switch { // the id alone says whose a network is
		case !r.Installation.Owns(network.ID):
			foreign.Networks++
			foreign.Examples = example(foreign.Examples,
				fmt.Sprintf("network %s (VLAN %d)", network.ID, network.VLAN))
		case !known.Has(network.ID) && network.State != opi.StateDeleting:
			orphans.Insert(orphan{xpu.Name, kindNetwork, network.ID})
		}
	}

	return up
}

// compareGateways enqueues the bridges whose gateway the agent does not have as wanted, and removes
// their networks from those in service.
func (r *resyncs) compareGateways(
	ctx context.Context, xpu *v1alpha1.XPU, vrfs []opi.VRFStatus, gateways []opi.GatewayStatus,
	up sets.Set[string], orphans sets.Set[orphan], foreign *v1alpha1.XPUForeign,
) error {
	wanted, err := r.wantedGateways(ctx, xpu.Name)
	if err != nil {
		return err
	}

	routing := opi.NewRouting(vrfs, gateways)
	used := sets.New[string]() // VRFs
	known := sets.New[string]()
	for b, network := range wanted {
		id := r.Installation.NetworkID(b.Network)
		if network == nil { // it is not known whether it has one
			known.Insert(opi.GatewayID(id))
			continue
		}
		if network.Gateway == nil {
			continue
		}

		known.Insert(opi.GatewayID(id))
		used.Insert(network.Gateway.VRF)
		if up.Has(id) && !routing.Serves(id, *network.Gateway) {
			up.Delete(id)
			if r.Bridges.IsNeeded(ctx, b) {
				r.Bridges.Wake(b)
			}
		}
	}

	unknown := false // in which VRF some gateway is
	for _, g := range gateways {
		unknown = unknown || g.State == opi.StateUnknown
		used.Insert(g.VRF)
		switch { // as for networks, the id alone says whose a gateway or VRF is
		case !r.Installation.Owns(g.ID):
			foreign.Gateways++
			foreign.Examples = example(foreign.Examples, "gateway "+g.ID)
		case !known.Has(g.ID) && g.State != opi.StateDeleting:
			orphans.Insert(orphan{xpu.Name, kindGateway, g.ID})
		}
	}

	for _, v := range vrfs {
		switch {
		case !r.Installation.Owns(v.ID):
			foreign.VRFs++
			foreign.Examples = example(foreign.Examples, "VRF "+v.ID)
		case !used.Has(v.ID) && !unknown && v.State != opi.StateDeleting:
			orphans.Insert(orphan{xpu.Name, kindVRF, v.ID})
		}
	}

	return nil
}

// wantedGateways returns the networks that an XPU must have, by their bridges. A network is nil if
// the XPUNetwork does not exist or cannot be used, so that it is not known what it needs.
func (r *resyncs) wantedGateways(
	ctx context.Context, xpu string,
) (map[networks.Bridge]*opi.Network, error) {
	wanted := map[networks.Bridge]*opi.Network{}
	for _, b := range r.Bridges.OfXPU(ctx, xpu) {
		wanted[b] = nil
		network, err := r.Catalog.Usable(ctx, b.Network)
		if _, refused := errors.AsType[*reconciling.Refusal](err); refused {
			continue
		}
		if err != nil {
			return nil, err
		}
		wanted[b] = new(networks.AtAgents(r.Installation, network))
	}
	return wanted, nil
}

// example appends to a list of examples, up to MaxForeignExamples.
func example(list []string, text string) []string {
	if len(list) == v1alpha1.MaxForeignExamples {
		return list
	}
	return append(list, text)
}

// collect deletes the orphans that have existed for OrphanGrace. It returns the pause until the
// next attempt, 0 if there is no orphan left.
func (r *resyncs) collect(
	ctx, bounded context.Context, agent *opi.Session, xpu *v1alpha1.XPU, orphans sets.Set[orphan],
) (after time.Duration) {
	log := ctrl.LoggerFrom(ctx)
	r.seen.Retain(func(o orphan) bool { return o.xpu != xpu.Name || orphans.Has(o) })
	sorted := orphans.UnsortedList()
	slices.SortFunc(sorted, func(a, b orphan) int {
		return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.id, b.id))
	})
	deleted := false
	for _, o := range sorted {
		if waited := r.seen.Elapsed(o); waited < r.OrphanGrace {
			after = optional.Min(after, r.OrphanGrace-waited)
			continue
		}

		remove := map[string]func(context.Context, string) error{
			kindPort: agent.DeletePort, kindGateway: agent.DeleteGateway,
			kindNetwork: agent.DeleteNetwork, kindVRF: agent.DeleteVRF,
		}[o.kind]

		if err := remove(bounded, o.id); err != nil {
			log.Info("cannot delete an orphan", o.kind, o.id, "error", err.Error())
			after = optional.Min(after, r.OrphanGrace)
			continue
		}

		r.seen.Reset(o)
		r.Orphans.WithLabelValues(xpu.Name, o.kind).Inc()
		log.Info("deleted an orphan: no object of the cluster wants it", o.kind, o.id)
		r.Events.Eventf(xpu, nil, corev1.EventTypeNormal, "OrphanDeleted", "Delete",
			"deleted %s %s of this cluster, which no object had wanted for %s", o.kind, o.id,
			r.OrphanGrace)
		deleted = true
	}

	if deleted {
		// The orphan may have been in their way.
		r.serving.wakeups.Add(0, r.serving.waiting(ctx, xpu.Name)...)
		// an object that came in this moment may have wanted it
		after = optional.Min(after, reconciling.FirstRetry)
	}

	return after
}
