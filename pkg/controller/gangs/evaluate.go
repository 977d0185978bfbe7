// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// pageSize is how many pods one answer of the API server has.
const pageSize = 250

// evaluate judges the gangs of a namespace that have claims waiting.
func (g *Gangs) evaluate(ctx context.Context, req reconcile.Request) (ctrl.Result, error) {
	groups, err := g.waiting(ctx, req.Namespace)
	if err != nil || len(groups) == 0 {
		return ctrl.Result{}, err
	}

	sizes, err := g.sizes(ctx, req.Namespace)
	var pods map[string][]pod
	if err == nil {
		pods, err = g.pods(ctx, req.Namespace, groups)
	}
	if apierrors.IsForbidden(err) {
		g.release(ctx, req.Namespace, err)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, err
	}

	waits := false
	for group := range groups {
		verdicts := decide(gang{name: group, minCount: sizes[group], pods: pods[group],
			deadline: g.deadline(group, pods[group])}, time.Now())
		waits = g.tell(ctx, req.Namespace, group, verdicts) || waits
	}

	if waits {
		return ctrl.Result{RequeueAfter: reviewPeriod}, nil
	}
	return ctrl.Result{}, nil
}

// waiting returns the PodGroups of the claims of a namespace that wait. It forgets claims that are
// gone, that have another allocation, or that have reported success.
func (g *Gangs) waiting(ctx context.Context, namespace string) (sets.Set[string], error) {
	groups := sets.New[string]()
	for key, allocation := range g.heldIn(namespace) {
		var c resourceapi.ResourceClaim // stays empty if the claim is gone
		if err := g.Client.Get(ctx, key, &c); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("ResourceClaim %s: %w", key, err)
		}
		current := allocationOf(&c) == allocation && !reported(&c)
		if group := g.keep(key, allocation, current); group != "" {
			groups.Insert(group)
		}
	}
	return groups, nil
}

// heldIn returns the claims of a namespace that have asked, with the allocations then.
func (g *Gangs) heldIn(namespace string) map[types.NamespacedName]string {
	g.mu.Lock()
	defer g.mu.Unlock()

	found := map[types.NamespacedName]string{}
	for key, q := range g.held {
		if key.Namespace == namespace {
			found[key] = q.allocation
		}
	}
	return found
}

// keep returns the PodGroup of a claim that waits for its verdict, and "" for one that has it. A
// claim that does not have the allocation any more is forgotten.
func (g *Gangs) keep(key types.NamespacedName, allocation string, current bool) string {
	g.mu.Lock()
	defer g.mu.Unlock()

	q := g.held[key]
	switch {
	case q == nil || q.allocation != allocation: // it has asked anew meanwhile
		return ""
	case !current:
		delete(g.held, key)
		return ""
	case q.verdict.Answer != Wait:
		return ""
	}
	return q.group
}

// reported reports whether the scheduler was told that all devices of the claim are ready.
func reported(c *resourceapi.ResourceClaim) bool {
	devices, err := binding(c)
	return err == nil && len(devices) > 0 && !slices.ContainsFunc(devices,
		func(d claim.Device) bool {
			return !meta.IsStatusConditionTrue(conditionsOf(c, d), v1alpha1.ConditionProvisioned)
		})
}

// conditionsOf returns the conditions of the claim's device.
func conditionsOf(c *resourceapi.ResourceClaim, d claim.Device) []metav1.Condition {
	for i := range c.Status.Devices {
		if s := &c.Status.Devices[i]; claim.IsOf(s, d.Pool, d.Name, d.Share) {
			return s.Conditions
		}
	}
	return nil
}

// sizes returns how many pods of each PodGroup of the namespace run together. It has no PodGroup
// whose pods need not run together, and none if the API server does not serve this version of the
// API: where nothing says how many pods there are, no claim can wait for them.
func (g *Gangs) sizes(ctx context.Context, namespace string) (map[string]int, error) {
	var found schedulingapi.PodGroupList
	err := g.Live.List(ctx, &found, client.InNamespace(namespace))
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list PodGroups of namespace %s: %w", namespace, err)
	}

	sizes := map[string]int{}
	for _, group := range found.Items {
		if policy := group.Spec.SchedulingPolicy.Gang; policy != nil {
			sizes[group.Name] = int(policy.MinCount)
		}
	}
	return sizes, nil
}

// pods returns the pods of PodGroups of a namespace.
func (g *Gangs) pods(
	ctx context.Context, namespace string, groups sets.Set[string],
) (map[string][]pod, error) {
	pods := map[string][]pod{}
	page := &corev1.PodList{}
	for {
		err := g.Live.List(ctx, page, client.InNamespace(namespace), client.Limit(pageSize),
			client.Continue(page.Continue))
		if err != nil {
			return nil, fmt.Errorf("list pods of namespace %s: %w", namespace, err)
		}

		for i := range page.Items {
			p := &page.Items[i]
			group := groupName(p)
			if !groups.Has(group) || p.DeletionTimestamp != nil ||
				p.Status.Phase == corev1.PodFailed {
				continue
			}
			member, err := g.member(ctx, p)
			if err != nil {
				return nil, err
			}
			pods[group] = append(pods[group], member)
		}

		if page.Continue == "" {
			return pods, nil
		}
		page = &corev1.PodList{ListMeta: metav1.ListMeta{Continue: page.Continue}}
	}
}

// member returns what decides about a pod of a gang.
func (g *Gangs) member(ctx context.Context, p *corev1.Pod) (pod, error) {
	m := pod{name: p.Name, bound: p.Spec.NodeName != ""}
	names, missing := claimsOf(p)
	// The claims of a pod that has succeeded may be gone.
	m.begun = p.Status.Phase == corev1.PodSucceeded && len(p.Spec.ResourceClaims) > 0
	m.lacks = missing
	if len(p.Spec.ResourceClaims) == 0 && len(names) == 0 {
		m.lacks = "it is not bound"
	}

	for _, name := range names {
		var c resourceapi.ResourceClaim
		err := g.Client.Get(ctx, client.ObjectKey{Namespace: p.Namespace, Name: name}, &c)
		if apierrors.IsNotFound(err) {
			m.lacks = fmt.Sprintf("ResourceClaim %s does not exist", name)
			continue
		}
		if err != nil {
			return pod{}, fmt.Errorf("ResourceClaim %s/%s: %w", p.Namespace, name, err)
		}
		g.addClaim(&m, p, &c)
	}

	return m, nil
}

// claimsOf returns the names of the pod's claims. missing says which one does not exist yet.
func claimsOf(p *corev1.Pod) (names []string, missing string) {
	for i := range p.Spec.ResourceClaims {
		wanted := &p.Spec.ResourceClaims[i]
		name, _, err := resourceclaim.Name(p, wanted)
		switch {
		case err != nil:
			missing = fmt.Sprintf("its ResourceClaim %s does not exist yet", wanted.Name)
		case name != nil:
			names = append(names, *name)
		}
	}
	if made := p.Status.ExtendedResourceClaimStatus; made != nil {
		names = append(names, made.ResourceClaimName)
	}
	return names, missing
}

// addClaim adds what a claim says about its pod.
func (g *Gangs) addClaim(m *pod, p *corev1.Pod, c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		m.lacks = fmt.Sprintf("ResourceClaim %s is not allocated", c.Name)
		return
	}
	devices, err := binding(c)
	if err != nil {
		m.lacks = err.Error()
		return
	}
	if len(devices) == 0 {
		return
	}

	m.begun = m.begun || m.bound || reported(c)
	of := gangClaim{key: client.ObjectKeyFromObject(c), allocation: allocationOf(c)}
	if at := c.Status.Allocation.AllocationTimestamp; at != nil {
		of.allocated = at.Time
	}
	for _, d := range devices {
		failed := meta.FindStatusCondition(conditionsOf(c, d), v1alpha1.ConditionProvisionFailed)
		of.told = of.told || failed != nil
		if failed != nil && failed.Reason == v1alpha1.ReasonGangFailed {
			of.givenBackAt, of.givenBack = failed.LastTransitionTime.Time, failed.Message
		}
	}

	var lacks string
	if lacks, of.failed = g.stateOf(p, c, devices, of); lacks != "" {
		m.lacks = lacks
	}
	m.claims = append(m.claims, of)
}

// stateOf returns what a claim lacks, and why an xPU refuses one of its Ports.
func (g *Gangs) stateOf(
	p *corev1.Pod, c *resourceapi.ResourceClaim, devices []claim.Device, of gangClaim,
) (lacks, failed string) {
	g.mu.Lock()
	defer g.mu.Unlock()

	q := g.held[of.key]
	asked := q != nil && q.allocation == of.allocation
	switch {
	case asked && q.state == Failed && of.givenBackAt.IsZero():
		return "", fmt.Sprintf("ResourceClaim %s: %s", c.Name, q.failure)
	case of.told:
		return fmt.Sprintf("ResourceClaim %s is given back", c.Name), ""
	case !resourceclaim.IsReservedForPod(p, c, true):
		// The scheduler has left off binding the pod.
		return fmt.Sprintf("ResourceClaim %s is not reserved for it", c.Name), ""
	case asked && q.state == Up || reported(c):
		return "", ""
	}

	for _, d := range devices {
		told := meta.FindStatusCondition(conditionsOf(c, d), v1alpha1.ConditionProvisioned)
		if told != nil && told.Status == metav1.ConditionFalse &&
			told.Reason != v1alpha1.ReasonGangIncomplete {
			return fmt.Sprintf("ResourceClaim %s: %s: %s", c.Name, told.Reason, told.Message), ""
		}
	}
	return fmt.Sprintf("a Port of ResourceClaim %s is not up", c.Name), ""
}

// deadline returns when an incomplete gang is given back: after the timeout, from the first of the
// allocations that wait. A controller that was just started first looks at all claims.
func (g *Gangs) deadline(group string, pods []pod) time.Time {
	var first time.Time
	var keys []types.NamespacedName
	for _, p := range pods {
		for _, c := range p.claims {
			if p.bound || c.told {
				continue
			}
			keys = append(keys, c.key)
			if !c.allocated.IsZero() && (first.IsZero() || c.allocated.Before(first)) {
				first = c.allocated
			}
		}
	}

	asked := g.askedSince(keys)
	if first.IsZero() {
		first = asked
	}
	deadline, earliest := first.Add(g.timeout), asked.Add(min(g.timeout, lookAround))
	if deadline.Before(earliest) {
		return earliest
	}
	return deadline
}

// lookAround is how long a controller that was just started has for looking at all claims.
const lookAround = 30 * time.Second

// askedSince returns when the first of the claims asked, or now if none did.
func (g *Gangs) askedSince(keys []types.NamespacedName) time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()

	since := time.Now()
	for _, key := range keys {
		if q := g.held[key]; q != nil && q.since.Before(since) {
			since = q.since
		}
	}
	return since
}

// release lets the claims of a namespace report alone, because the controller may not read what
// would say how many pods belong together. Its role is older than the controller.
func (g *Gangs) release(ctx context.Context, namespace string, err error) {
	ctrl.LoggerFrom(ctx).Error(err, "pods of PodGroups are not held together: apply the role of "+
		"this version of xpu-controller", "namespace", namespace)

	g.mu.Lock()
	defer g.mu.Unlock()
	for key, q := range g.held {
		if key.Namespace == namespace && q.verdict.Answer == Wait {
			q.verdict.Answer = Alone
			g.decided.Add(0, reconcile.Request{NamespacedName: key})
		}
	}
}

// tell stores the verdicts of a gang, and wakes up the claims for which they are new. It reports
// whether a claim still waits.
func (g *Gangs) tell(
	ctx context.Context, namespace, group string, verdicts map[types.NamespacedName]Verdict,
) (waits bool) {
	g.mu.Lock()
	defer g.mu.Unlock()

	for key, verdict := range verdicts {
		if verdict.Answer == GiveBack && g.held[key] == nil {
			// The claim has not asked, because its Port is not up yet.
			g.held[key] = newQuestion(verdict.allocation, group)
		}
	}

	for key, q := range g.held {
		if key.Namespace != namespace || q.group != group || q.verdict.Answer != Wait {
			continue
		}
		verdict := verdicts[key] // the zero value for a claim whose pod is going
		if verdict.Answer == Wait || verdict.allocation != q.allocation {
			waits = true
			continue
		}

		q.verdict = verdict
		if verdict.Answer == GiveBack {
			ctrl.LoggerFrom(ctx).Info("giving back a claim of a gang", "claim", key,
				"podGroup", group, "why", verdict.Message)
		}
		g.decided.Add(0, reconcile.Request{NamespacedName: key})
	}
	return waits
}
