// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// LabelXPU is on the DeviceTaintRules of an XPU. Its value is the XPU's UID.
const LabelXPU = v1alpha1.GroupName + "/xpu-uid"

const (
	// rulesEvery is how often the rules of an XPU that is down are compared with its pools.
	rulesEvery = time.Minute
	// maxRules bounds the rules of one XPU, because node agents say which pools there are.
	maxRules = 256
)

// ruleVersions are the versions of DeviceTaintRule that have the fields that rules here need, the
// newest first. v1 is of Kubernetes 1.37, v1beta2 of 1.36, and v1alpha3 of 1.33.
var ruleVersions = []string{"v1", "v1beta2", "v1alpha3"}

// firstWithRules is the first patch release of Kubernetes 1.36 whose scheduler does not end because
// of DeviceTaintRules (kubernetes/kubernetes#139651).
const firstWithRules = 3

// taintRules keeps new pods away from the devices of an XPU whose OPI agent cannot be reached, by
// DeviceTaintRules. The agents of nodes taint their devices themselves; the rules also hold while
// the node's agent cannot.
//
// What an agent that is silent does is not known. So the XPU has rules only when this process has
// failed to reach the agent for the time After. In a tenant cluster it is the infra cluster that has
// failed, and has said for how long. Rules have the effect NoSchedule, and stay until the agent
// answers again or the XPU is gone. With the time 0, all rules are deleted.
type taintRules struct {
	reconciling.Cluster
	TaintOptions
	discovery discovery.DiscoveryInterface
	// seen has the agents of the XPUs, by the XPU's name. One goroutine uses it.
	seen map[string]seenAgent
}

// seenAgent is what this process has seen of an XPU's OPI agent.
type seenAgent struct {
	xpu   types.UID
	away  time.Time // since when it has not answered; zero if it answered last, or was never asked
	clean bool      // the XPU has no rules
}

// TaintOptions configure the DeviceTaintRules of XPUs.
type TaintOptions struct {
	// After is how long an OPI agent must have been away before the devices of its XPU are tainted.
	// 0 deletes the rules.
	After time.Duration
	// Sessions are those with the agents. It is nil in a tenant cluster, where the status of an XPU
	// says what the infra cluster knows of its agent.
	Sessions *sessions.Sessions
	// BrokerAway says why nothing is known of the infra cluster, "" if its broker is there. It is nil
	// in a single cluster.
	BrokerAway func() string
}

// SetupTaintRules adds the reconciler of DeviceTaintRules to the manager.
func SetupTaintRules(mgr ctrl.Manager, cluster reconciling.Cluster, o TaintOptions) error {
	return (&taintRules{Cluster: cluster, TaintOptions: o}).setup(mgr)
}

func (r *taintRules) setup(mgr ctrl.Manager) error {
	var err error
	r.discovery, err = discovery.NewDiscoveryClientForConfigAndClient(mgr.GetConfig(),
		mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("discovery: %w", err)
	}
	r.seen = map[string]seenAgent{}
	controller := reconciling.NewController(mgr, "taintrule", 1)
	if r.Sessions == nil {
		return controller.For(&v1alpha1.XPU{}, whenAwayReported).Complete(r.Guarded(r))
	}
	return controller.
		For(&v1alpha1.XPU{}, reconciling.WhenSpecChanged).
		WatchesRawSource(sessions.Source(r.Sessions, sessions.HealthChanged, sessions.RequestFor)).
		WatchesRawSource(
			sessions.Source(r.Sessions, sessions.ConnectionChanged, sessions.RequestFor)).
		Complete(r.Guarded(r))
}

// Reconcile gives the XPU its rules, or takes them away. It does neither while nothing is known of
// the XPU's agent. Where rules are not wanted at all, or would end the scheduler, it takes them away.
func (r *taintRules) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var xpu v1alpha1.XPU
	err := r.Client.Get(ctx, req.NamespacedName, &xpu)
	if apierrors.IsNotFound(err) { // the garbage collector deletes its rules
		delete(r.seen, req.Name)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
	}

	seen := r.seen[xpu.Name]
	if seen.xpu != xpu.UID {
		seen = seenAgent{xpu: xpu.UID}
	}
	defer func() { r.seen[xpu.Name] = seen }()

	result, err := r.follow(ctx, &xpu, &seen)
	if apierrors.IsForbidden(err) {
		every := wait.Jitter(rulesEvery, 0.2)
		ctrl.LoggerFrom(ctx).Error(err, "the controller may not work on DeviceTaintRules; apply "+
			"the role of its version, or leave out --device-taint-rules-after",
			"retry", every.String())
		return ctrl.Result{RequeueAfter: every}, nil
	}
	return result, err
}

// follow makes or deletes rules, as the XPU's agent and the cluster are.
func (r *taintRules) follow(
	ctx context.Context, xpu *v1alpha1.XPU, seen *seenAgent,
) (ctrl.Result, error) {
	answers, away, known := r.agentOf(xpu, seen)
	answers = answers || !xpu.DeletionTimestamp.IsZero()
	if answers && seen.clean {
		return ctrl.Result{}, nil
	}

	kind, harm, err := r.kind(ctx)
	if err != nil || kind.Empty() {
		return ctrl.Result{}, err
	}

	off, again := r.After == 0, ctrl.Result{RequeueAfter: wait.Jitter(rulesEvery, 0.2)}
	switch {
	case answers || harm || off:
		seen.clean, err = r.remove(ctx, kind, xpu)
		if answers || off {
			return ctrl.Result{}, err
		}
		return again, err
	case !known:
		return ctrl.Result{}, nil
	}

	if left := r.After - away; left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	seen.clean = false
	return again, r.make(ctx, kind, xpu)
}

// agentOf reports whether the XPU's agent answers, or else for how long it is known not to answer.
// known is false if neither is known.
func (r *taintRules) agentOf(
	xpu *v1alpha1.XPU, seen *seenAgent,
) (answers bool, away time.Duration, known bool) {
	if r.Sessions == nil {
		return r.reportedBy(xpu)
	}

	health := r.Sessions.Connection(xpu.Name).Health
	switch {
	case health.Connected || !xpu.DeletionTimestamp.IsZero():
		seen.away = time.Time{}
		return true, 0, true
	case !health.Away:
		return false, 0, false
	case seen.away.IsZero():
		seen.away = time.Now()
	}
	return false, time.Since(seen.away), true
}

// reportedBy is agentOf in a tenant cluster. Without a broker, what the status says may not hold any
// more.
func (r *taintRules) reportedBy(xpu *v1alpha1.XPU) (answers bool, away time.Duration, known bool) {
	ready := v1alpha1.ReadyOf(xpu.Status.Conditions)
	switch {
	case r.BrokerAway() != "" || ready.Reason == v1alpha1.ReasonBrokerAway:
		return false, 0, false
	case ready.Status == metav1.ConditionTrue:
		return true, 0, true
	}
	away = time.Duration(xpu.Status.AwaySeconds) * time.Second
	return false, away, away > 0
}

// remove deletes the XPU's rules, and reports whether it has none. A controller that has just started
// does not know whether there are any.
func (r *taintRules) remove(
	ctx context.Context, kind schema.GroupVersionKind, xpu *v1alpha1.XPU,
) (clean bool, err error) {
	own, err := r.list(ctx, kind, xpu)
	if err != nil {
		return false, err
	}
	for i := range own {
		if err := r.delete(ctx, xpu, &own[i]); err != nil {
			return false, err
		}
	}
	return true, nil
}

// make gives the XPU a rule for each pool of its devices. It deletes rules of pools that are known to
// be another XPU's, and rules that somebody changed. A rule stays where the node reports less than
// before, because that does not say that the devices are another's.
func (r *taintRules) make(
	ctx context.Context, kind schema.GroupVersionKind, xpu *v1alpha1.XPU,
) error {
	own, err := r.list(ctx, kind, xpu)
	if err != nil {
		return err
	}
	pools, err := r.pools(ctx, xpu, own)
	if err != nil {
		return err
	}

	wanted := map[string]*unstructured.Unstructured{}
	for _, pool := range pools {
		rule := ruleFor(kind, xpu, pool)
		wanted[rule.GetName()] = rule
	}
	for i := range own {
		if rule := wanted[own[i].GetName()]; rule != nil && sameRule(rule, &own[i]) {
			delete(wanted, rule.GetName())
			continue
		}
		if err := r.delete(ctx, xpu, &own[i]); err != nil {
			return err
		}
	}
	for _, rule := range wanted {
		if err := r.create(ctx, xpu, rule); err != nil {
			return err
		}
	}
	return nil
}

// create creates a rule. A rule of the same name that is not the XPU's stays as it is.
func (r *taintRules) create(
	ctx context.Context, xpu *v1alpha1.XPU, rule *unstructured.Unstructured,
) error {
	log := ctrl.LoggerFrom(ctx).WithValues("rule", rule.GetName())
	err := r.Client.Create(ctx, rule)
	switch {
	case apierrors.IsAlreadyExists(err):
		log.Info("a DeviceTaintRule of this name is not of the XPU; it is left as it is")
		return nil
	case err != nil:
		return fmt.Errorf("XPU %s: create DeviceTaintRule %s: %w", xpu.Name, rule.GetName(), err)
	}
	log.Info("tainted the devices of an XPU whose OPI agent cannot be reached")
	return nil
}

// delete deletes a rule that was listed as the XPU's, unless it was made anew since.
func (r *taintRules) delete(
	ctx context.Context, xpu *v1alpha1.XPU, rule *unstructured.Unstructured,
) error {
	uid, revision := rule.GetUID(), rule.GetResourceVersion()
	err := r.Client.Delete(ctx, rule,
		client.Preconditions{UID: &uid, ResourceVersion: &revision})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("XPU %s: delete DeviceTaintRule %s: %w", xpu.Name, rule.GetName(), err)
	}
	if err == nil {
		ctrl.LoggerFrom(ctx).Info("deleted a DeviceTaintRule of an XPU", "rule", rule.GetName())
	}
	return nil
}

// kind returns the newest version of DeviceTaintRule that the API server serves; the zero value if
// there is none. harm says that rules may end the scheduler, so that there must be none.
func (r *taintRules) kind(ctx context.Context) (kind schema.GroupVersionKind, harm bool, err error) {
	info, err := r.discovery.ServerVersion()
	if err != nil {
		return kind, false, fmt.Errorf("version of the API server: %w", err)
	}
	if harm = RulesHarm(info.GitVersion); harm {
		ctrl.LoggerFrom(ctx).V(1).Info("DeviceTaintRules may end the scheduler of this version",
			"version", info.GitVersion)
	}

	for _, v := range ruleVersions {
		version := schema.GroupVersion{Group: resourceapi.GroupName, Version: v}
		list, err := r.discovery.ServerResourcesForGroupVersion(version.String())
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return kind, false, fmt.Errorf("kinds of %s: %w", version, err)
		}
		if slices.ContainsFunc(list.APIResources, func(resource metav1.APIResource) bool {
			return resource.Kind == "DeviceTaintRule"
		}) {
			return version.WithKind("DeviceTaintRule"), harm, nil
		}
	}

	ctrl.LoggerFrom(ctx).V(1).Info("the API server has no DeviceTaintRules")
	return kind, harm, nil
}

// RulesHarm reports whether DeviceTaintRules may end the scheduler of a cluster, whose API server has
// this version: "v1.36.2". A version that is no release of Kubernetes 1 is not known to be harmless.
func RulesHarm(gitVersion string) bool {
	v, err := version.ParseGeneric(gitVersion)
	return err != nil || v.Major() != 1 || v.Minor() == 36 && v.Patch() < firstWithRules
}

// list returns the rules of the XPU. A rule that has the label alone is somebody else's.
func (r *taintRules) list(
	ctx context.Context, kind schema.GroupVersionKind, xpu *v1alpha1.XPU,
) ([]unstructured.Unstructured, error) {
	var all unstructured.UnstructuredList
	all.SetGroupVersionKind(kind)
	err := r.Client.List(ctx, &all, client.MatchingLabels{LabelXPU: string(xpu.UID)})
	if err != nil {
		return nil, fmt.Errorf("XPU %s: list its DeviceTaintRules: %w", xpu.Name, err)
	}
	return slices.DeleteFunc(all.Items, func(rule unstructured.Unstructured) bool {
		return !metav1.IsControlledBy(&rule, xpu)
	}), nil
}

// pools returns the pools of devices of the XPU, as they are named in ResourceSlices: those of its
// rules, unless they are known to be another XPU's, and those that the node reports of each PF that the
// XPU is known to serve. Without an XPUNode nothing is known of the latter.
func (r *taintRules) pools(
	ctx context.Context, xpu *v1alpha1.XPU, own []unstructured.Unstructured,
) (pools []string, err error) {
	var ofNode v1alpha1.XPUList
	if err := r.Client.List(ctx, &ofNode, client.MatchingFields{ByNode: xpu.Node()}); err != nil {
		return nil, fmt.Errorf("XPUs of node %s: %w", xpu.Node(), err)
	}
	for i := range own {
		pool, _, _ := unstructured.NestedString(own[i].Object, "spec", "deviceSelector", "pool")
		if ruleName(xpu, pool) == own[i].GetName() && !isAnothers(ofNode.Items, xpu, pool) {
			pools = append(pools, pool)
		}
	}

	reported, err := r.reported(ctx, xpu, ofNode.Items)
	if err != nil {
		return nil, err
	}
	for _, pool := range reported {
		if slices.Contains(pools, pool) {
			continue
		}
		if len(pools) == maxRules {
			ctrl.LoggerFrom(ctx).Info("the XPU has more pools than DeviceTaintRules are made for",
				"rules", maxRules)
			break
		}
		pools = append(pools, pool)
	}
	return pools, nil
}

// isAnothers reports whether a pool is known to be another XPU's: its PF is served by another one, or
// the XPU is at another node.
func isAnothers(ofNode []v1alpha1.XPU, xpu *v1alpha1.XPU, pool string) bool {
	id, err := claim.ParsePoolID(pool)
	switch node := xpu.Node(); {
	case err != nil:
		return true // the controller made no such rule
	case node == "":
		return false
	case id.Node != node:
		return true
	}
	server := claim.XPUOf(ofNode, id.PF)
	return server != nil && server.Name != xpu.Name
}

// reported returns the pools that the XPU's node publishes by DRA, of each PF that the XPU is
// known to serve.
func (r *taintRules) reported(
	ctx context.Context, xpu *v1alpha1.XPU, ofNode []v1alpha1.XPU,
) (pools []string, err error) {
	var node v1alpha1.XPUNode
	err = r.Client.Get(ctx, client.ObjectKey{Name: xpu.Node()}, &node)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("XPUNode %s: %w", xpu.Node(), err)
	}

	for _, pool := range node.Status.Pools {
		var declared v1alpha1.DevicePool
		err := r.Client.Get(ctx, client.ObjectKey{Name: pool.Name}, &declared)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("DevicePool %s: %w", pool.Name, err)
		}
		if err != nil || declared.Spec.Publish == v1alpha1.PublishDevicePlugin {
			continue
		}

		for _, pf := range node.Status.PFs {
			address := pci.Address(pf.Address)
			if server := claim.ServerOf(ofNode, address); server != nil && server.Name == xpu.Name {
				id := claim.PoolID{Node: xpu.Node(), PF: address, DevicePool: pool.Name}
				pools = append(pools, id.String())
			}
		}
	}
	return pools, nil
}

// ruleName returns the name of the rule of an XPU for one of its pools.
func ruleName(xpu *v1alpha1.XPU, pool string) string {
	digest := sha256.Sum256([]byte(string(xpu.UID) + "/" + pool))
	return fmt.Sprintf("xpu-away-%x", digest[:12])
}

// ruleFor returns the rule of an XPU for one of its pools.
func ruleFor(
	kind schema.GroupVersionKind, xpu *v1alpha1.XPU, pool string,
) *unstructured.Unstructured {
	rule := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"deviceSelector": map[string]any{"driver": v1alpha1.GroupName, "pool": pool},
		"taint": map[string]any{
			"key":    v1alpha1.TaintXPUAway,
			"effect": string(resourceapi.DeviceTaintEffectNoSchedule),
		},
	}}}
	rule.SetGroupVersionKind(kind)
	rule.SetName(ruleName(xpu, pool))
	rule.SetLabels(map[string]string{LabelXPU: string(xpu.UID)})
	rule.SetAnnotations(map[string]string{v1alpha1.GroupName + "/xpu": xpu.Name})
	owner := metav1.NewControllerRef(xpu, v1alpha1.SchemeGroupVersion.WithKind("XPU"))
	owner.BlockOwnerDeletion = nil // a rule must not hold up the XPU's deletion
	rule.SetOwnerReferences([]metav1.OwnerReference{*owner})
	return rule
}

// sameRule reports whether a rule taints what is wanted, with the same effect. The API server adds
// the time to the taint.
func sameRule(want, has *unstructured.Unstructured) bool {
	for _, path := range [][]string{
		{"spec", "deviceSelector"}, {"spec", "taint", "key"}, {"spec", "taint", "effect"},
		{"spec", "taint", "value"},
	} {
		wanted, _, _ := unstructured.NestedFieldNoCopy(want.Object, path...)
		found, _, _ := unstructured.NestedFieldNoCopy(has.Object, path...)
		if !equality.Semantic.DeepEqual(wanted, found) {
			return false
		}
	}
	return true
}
