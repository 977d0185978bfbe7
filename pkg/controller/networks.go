package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// agentsAtOnce is how many agents are asked at the same time for one network.
const agentsAtOnce = 32

// networks has every XPU serve every XPUNetwork, before the first Port needs it.
type networks struct{ base }

func (r *networks) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	all := func(ctx context.Context, _ client.Object) []reconcile.Request {
		return r.requests(ctx, &v1alpha1.XPUNetworkList{})
	}
	return newController(mgr, "xpunetwork", r.Concurrency).
		For(&v1alpha1.XPUNetwork{}, whenSpecChanged).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(r.networkRivals), whenGone).
		Watches(&v1alpha1.XPU{}, enqueue(all), whenGone).
		Watches(&v1alpha1.XPUPort{}, enqueue(r.waitsFor), whenGone).
		WatchesRawSource(r.sessions.source(connectionChanged, all)).
		Complete(withConflicts(r))
}

// waitsFor returns the network of a deleted Port if the network is being deleted too, and so waits for its Ports.
func (r *networks) waitsFor(ctx context.Context, o client.Object) []reconcile.Request {
	var network v1alpha1.XPUNetwork
	key := client.ObjectKey{Name: o.(*v1alpha1.XPUPort).Spec.Network}
	if err := r.client.Get(ctx, key, &network); err != nil || network.DeletionTimestamp.IsZero() {
		return nil
	}
	return []reconcile.Request{{NamespacedName: key}}
}

// networkRivals are the networks that have a VLAN or VNI in common with this one, itself included.
func (r *base) networkRivals(ctx context.Context, o client.Object) []reconcile.Request {
	var requests []reconcile.Request
	for _, key := range segmentKeys(o.(*v1alpha1.XPUNetwork)) {
		requests = append(requests, r.requests(ctx, &v1alpha1.XPUNetworkList{}, client.MatchingFields{networksByID: key})...)
	}
	return requests
}

// checkRivals returns a *problem if an older network has the VLAN or VNI of this one.
func (r *base) checkRivals(ctx context.Context, n *v1alpha1.XPUNetwork) error {
	for _, key := range segmentKeys(n) {
		var same v1alpha1.XPUNetworkList
		if err := r.client.List(ctx, &same, client.MatchingFields{networksByID: key}); err != nil {
			return fmt.Errorf("list XPUNetworks with %s: %w", key, err)
		}
		for i := range same.Items {
			if other := &same.Items[i]; other.Name != n.Name && older(other, n) {
				return problemf(v1alpha1.ReasonConflict,
					"%s is that of XPUNetwork %s, which is older; delete one of them", key, other.Name)
			}
		}
	}
	return nil
}

func (r *networks) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var network v1alpha1.XPUNetwork
	if err := r.client.Get(ctx, req.NamespacedName, &network); err != nil {
		r.retries.Forget(req)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if network.DeletionTimestamp.IsZero() {
		if err := r.changeFinalizer(ctx, &network, controllerutil.AddFinalizer, v1alpha1.FinalizerNetwork); err != nil {
			return ctrl.Result{}, err
		}
		before := network.DeepCopy()
		message, err := r.ensure(ctx, &network)
		return r.conclude(ctx, &network, before, &network.Status.Conditions, message, err)
	}
	if !controllerutil.ContainsFinalizer(&network, v1alpha1.FinalizerNetwork) {
		return ctrl.Result{}, nil
	}
	if err := r.remove(ctx, &network); err != nil {
		return r.conclude(ctx, &network, network.DeepCopy(), &network.Status.Conditions, "", err)
	}
	r.retries.Forget(req)
	return ctrl.Result{}, r.changeFinalizer(ctx, &network, controllerutil.RemoveFinalizer, v1alpha1.FinalizerNetwork)
}

// ensure has every XPU that can be reached serve the network, and sets status.xpus.
func (r *networks) ensure(ctx context.Context, network *v1alpha1.XPUNetwork) (success string, err error) {
	before := network.Status.XPUs
	network.Status.XPUs = nil
	if err := r.checkRivals(ctx, network); err != nil {
		return "", err
	}
	want := r.Installation.Network(network.Name, network.Spec.VLAN, network.Spec.VNI)
	answers, err := r.askAll(ctx, func(ctx context.Context, agent *opi.Session) error { return agent.EnsureNetwork(ctx, want) })
	if err != nil {
		return "", err
	}
	var failure *problem
	serving := 0
	for _, a := range answers {
		on := a.status(before)
		if a.err != nil && failure == nil {
			failure = problemf(v1alpha1.ReasonFailed, "XPU %s does not serve it: %s", a.xpu, on.Message)
		}
		if on.Ready {
			serving++
		}
		network.Status.XPUs = append(network.Status.XPUs, on)
	}
	if failure != nil {
		failure.retry = r.retries.When(requestFor(network))
		return "", failure
	}
	r.retries.Forget(requestFor(network))
	switch {
	case len(answers) == 0:
		return "", problemf(v1alpha1.ReasonNoXPU, "there is no XPU that could serve it; create one")
	case serving == 0:
		return "", problemf(v1alpha1.ReasonXPUUnavailable, "none of %d XPUs can be reached", len(answers))
	}
	return fmt.Sprintf("%d of %d XPUs serve it", serving, len(answers)), nil
}

// answer is the outcome of a request to one XPU's agent.
type answer struct {
	xpu string
	connection
	err error // nil unless connected
}

// askAll asks all agents that can be reached, at the same time. There is an answer for each XPU; they are sorted by its name.
func (r *networks) askAll(ctx context.Context, ask func(context.Context, *opi.Session) error) ([]answer, error) {
	var all v1alpha1.XPUList
	if err := r.client.List(ctx, &all); err != nil {
		return nil, fmt.Errorf("list XPUs: %w", err)
	}
	answers := make([]answer, len(all.Items))
	var group errgroup.Group
	group.SetLimit(agentsAtOnce)
	for i, xpu := range all.Items {
		group.Go(func() error {
			answers[i] = answer{xpu: xpu.Name, connection: r.sessions.connection(xpu.Name)}
			if agent := answers[i].agent; agent != nil {
				ctx, cancel := context.WithTimeout(ctx, r.AgentTimeout)
				defer cancel()
				answers[i].err = ask(ctx, agent)
			}
			return nil
		})
	}
	_ = group.Wait() // the answers carry the errors
	slices.SortFunc(answers, func(a, b answer) int { return strings.Compare(a.xpu, b.xpu) })
	return answers, nil
}

// status is that of the network on the XPU. Of an XPU of which nothing is known yet it is what it was before.
func (a answer) status(before []v1alpha1.XPUNetworkOnXPU) v1alpha1.XPUNetworkOnXPU {
	switch {
	case a.err != nil:
		return v1alpha1.XPUNetworkOnXPU{Name: a.xpu, Message: oneLine(a.err)}
	case a.agent != nil:
		return v1alpha1.XPUNetworkOnXPU{Name: a.xpu, Ready: true}
	case a.health.Known:
		return v1alpha1.XPUNetworkOnXPU{Name: a.xpu, Message: "the OPI agent cannot be reached"}
	}
	for _, was := range before {
		if was.Name == a.xpu {
			return was
		}
	}
	return v1alpha1.XPUNetworkOnXPU{Name: a.xpu, Message: "not connected yet"}
}

// remove deletes the network from the XPUs once no Port needs it. Its error is a *problem without a reason while nothing is
// known of an XPU yet.
func (r *networks) remove(ctx context.Context, network *v1alpha1.XPUNetwork) error {
	ports, err := listPorts(ctx, r.client, client.MatchingFields{portsByNetwork: network.Name})
	if err != nil {
		return err
	}
	if len(ports) > 0 {
		return problemf(v1alpha1.ReasonInUse, "%d XPUPorts use it, such as %s/%s; it is deleted once they are gone",
			len(ports), ports[0].Namespace, ports[0].Name)
	}
	id := r.Installation.NetworkID(network.Name)
	answers, err := r.askAll(ctx, func(ctx context.Context, agent *opi.Session) error { return agent.DeleteNetwork(ctx, id) })
	if err != nil {
		return err
	}
	var left []string
	for _, a := range answers {
		switch {
		case !a.health.Known:
			return &problem{} // it will report
		case a.err != nil:
			p := problemf(v1alpha1.ReasonReleasing, "XPU %s still serves it: %s", a.xpu, oneLine(a.err))
			p.retry = r.retries.When(requestFor(network))
			if errors.Is(a.err, opi.ErrInUse) {
				p.reason = v1alpha1.ReasonInUse
			}
			return p
		case a.agent == nil:
			left = append(left, a.xpu)
		}
	}
	if len(left) > 0 {
		r.events.Eventf(network, nil, corev1.EventTypeWarning, v1alpha1.ReasonXPUUnavailable, "Delete",
			"deleted without XPUs %s, which cannot be reached and may still have it as %s", strings.Join(left, ", "), id)
	}
	return nil
}

// usableNetwork returns the network, or a *problem if no Port can join it.
func (r *base) usableNetwork(ctx context.Context, name string) (*v1alpha1.XPUNetwork, error) {
	var network v1alpha1.XPUNetwork
	err := r.client.Get(ctx, client.ObjectKey{Name: name}, &network)
	if apierrors.IsNotFound(err) {
		return nil, problemf(v1alpha1.ReasonNetworkNotFound, "XPUNetwork %s does not exist; create it, "+
			"or name another one in the InterfaceConfig, the CNI configuration or the DevicePool", name)
	}
	if err != nil {
		return nil, fmt.Errorf("XPUNetwork %s: %w", name, err)
	}
	err = r.checkRivals(ctx, &network)
	if rival, ok := errors.AsType[*problem](err); ok {
		return nil, problemf(v1alpha1.ReasonNetworkNotReady, "XPUNetwork %s cannot be used: %s", name, rival.message)
	}
	return &network, err
}
