// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
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

const (
	// pageSize is how many pods one answer of the API server has. A pod can have 1.5 MiB, which is
	// what etcd stores at most of an object.
	pageSize = 16
	// requestPause is how long a namespace is not read again for each request that it took: a
	// namespace has 50 requests a second. The controller has 200 (--kube-api-qps).
	requestPause = 20 * time.Millisecond
)

// evaluate judges the gangs of a namespace that have claims waiting.
func (g *Gangs) evaluate(ctx context.Context, req reconcile.Request) (ctrl.Result, error) {
	if left := g.resting(req.Namespace); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	groups, err := g.waiting(ctx, req.Namespace)
	if err != nil || len(groups) == 0 {
		return ctrl.Result{}, err
	}

	found, err := g.read(ctx, req.Namespace, groups)
	rest := g.rest(req.Namespace, found.requests)
	switch {
	case g.denied(access{req.Namespace, podsOfGangs}, err):
		g.release(ctx, req.Namespace, err)
		return ctrl.Result{}, nil
	case apierrors.IsForbidden(err):
		return ctrl.Result{RequeueAfter: max(reviewPeriod, rest)}, nil
	case err != nil:
		return ctrl.Result{}, err
	}

	waits, begins := false, g.begins()
	for group, claims := range groups {
		verdicts := decide(gang{name: group, minCount: found.sizes[group],
			pods: found.pods[group], deadline: g.deadline(group, found.pods[group]), begins: begins}, time.Now())
		waits = g.tell(ctx, req.Namespace, group, claims, verdicts) || waits
	}

	if waits {
		return ctrl.Result{RequeueAfter: max(reviewPeriod, rest)}, nil
	}
	return ctrl.Result{}, nil
}

// resting returns how long a namespace is not read yet.
func (g *Gangs) resting(namespace string) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return time.Until(g.rests[namespace])
}

// rest has a namespace not read again for a time that depends on how many requests it took. It
// returns that time. So a namespace with many pods does not keep the others from being judged, nor
// the controller from its other requests. How long the requests took does not count, because a slow
// API server would make each gang wait longer.
func (g *Gangs) rest(namespace string, requests int) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()

	now, rest := time.Now(), time.Duration(requests)*requestPause
	maps.DeleteFunc(g.rests, func(_ string, until time.Time) bool { return until.Before(now) })
	g.rests[namespace] = now.Add(rest)
	return rest
}

// begins reports whether the controller has just begun to look at gangs.
func (g *Gangs) begins() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return time.Since(g.began) < lookAround
}

// waiting returns the names of the claims of a namespace that wait, by their PodGroups. It forgets
// claims that are gone, that have another allocation, or that have reported success.
func (g *Gangs) waiting(ctx context.Context, namespace string) (map[string][]string, error) {
	groups := map[string][]string{}
	for name, q := range g.heldIn(namespace) {
		key := types.NamespacedName{Namespace: namespace, Name: name}
		var c resourceapi.ResourceClaim // stays empty if the claim is gone
		if err := g.Client.Get(ctx, key, &c); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("ResourceClaim %s: %w", key, err)
		}
		if g.keep(key, q, allocationOf(&c) == q.allocation && !reported(&c)) {
			groups[q.group] = append(groups[q.group], name)
		}
	}
	return groups, nil
}

// heldIn returns the claims of a namespace that have asked. Of these questions the caller may read
// what never changes: allocation and group.
func (g *Gangs) heldIn(namespace string) map[string]*question {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.held[namespace])
}

// keep reports whether a claim waits for its verdict. A claim that has not what it has asked for any
// more is forgotten.
func (g *Gangs) keep(key types.NamespacedName, q *question, current bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()

	switch {
	case g.question(key) != q: // the claim has asked again meanwhile
		return false
	case !current:
		g.drop(key)
		return false
	}
	return q.verdict.Answer == Wait
}

// reported reports whether the claim says to the scheduler that all its devices are ready.
func reported(c *resourceapi.ResourceClaim) bool {
	devices := binding(c)
	return len(devices) > 0 && !slices.ContainsFunc(devices, func(d device) bool {
		return !meta.IsStatusConditionTrue(conditionsOf(c, d), v1alpha1.ConditionProvisioned)
	})
}

// conditionsOf returns the conditions of the claim's device.
func conditionsOf(c *resourceapi.ResourceClaim, d device) []metav1.Condition {
	for i := range c.Status.Devices {
		if s := &c.Status.Devices[i]; claim.IsOf(s, d.pool, d.name, d.share) {
			return s.Conditions
		}
	}
	return nil
}

// reading is what was read of a namespace.
type reading struct {
	sizes    map[string]int   // how many pods of a PodGroup run together
	pods     map[string][]pod // by PodGroup
	requests int              // to the API server
}

// read returns the sizes and the pods of PodGroups. The number of requests is also right with an
// error.
func (g *Gangs) read(
	ctx context.Context, namespace string, groups map[string][]string,
) (found reading, err error) {
	found.sizes, found.pods = map[string]int{}, map[string][]pod{}
	for group := range groups {
		key := client.ObjectKey{Namespace: namespace, Name: group}
		found.requests++
		if found.sizes[group], err = g.size(ctx, key); err != nil {
			return found, err
		}
	}

	err = g.readPods(ctx, namespace, groups, &found)
	return found, err
}

// size returns how many pods of a PodGroup run together. It is 0 if they need not run together, if
// there is no such PodGroup, or if the API server does not serve this version of the API: where
// nothing says how many pods there are, no claim can wait for them. It is also 0 if the scheduler
// takes back no claims of the group's pods: of a group with scheduling constraints or with a parent
// (Kubernetes 1.37, PodGroupPostFilter).
func (g *Gangs) size(ctx context.Context, key client.ObjectKey) (int, error) {
	var group schedulingapi.PodGroup
	err := g.Live.Get(ctx, key, &group)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("PodGroup %s: %w", key, err)
	}

	spec := &group.Spec
	policy := spec.SchedulingPolicy.Gang
	if policy == nil || spec.SchedulingConstraints != nil ||
		spec.ParentCompositePodGroupName != nil {
		return 0, nil
	}
	return int(policy.MinCount), nil
}

// readPods adds the pods of PodGroups of a namespace.
func (g *Gangs) readPods(
	ctx context.Context, namespace string, groups map[string][]string, found *reading,
) error {
	page := &corev1.PodList{}
	for {
		found.requests++
		err := g.Live.List(ctx, page, client.InNamespace(namespace), client.Limit(pageSize),
			client.Continue(page.Continue))
		if err != nil {
			return fmt.Errorf("list pods of namespace %s: %w", namespace, err)
		}

		for i := range page.Items {
			p := &page.Items[i]
			group := groupName(p)
			if groups[group] == nil || p.DeletionTimestamp != nil ||
				p.Status.Phase == corev1.PodFailed {
				continue
			}
			member, err := g.member(ctx, p)
			if err != nil {
				return err
			}
			found.pods[group] = append(found.pods[group], member)
		}

		if page.Continue == "" {
			return nil
		}
		page = &corev1.PodList{ListMeta: metav1.ListMeta{Continue: page.Continue}}
	}
}

// member returns what decides about a pod of a gang.
func (g *Gangs) member(ctx context.Context, p *corev1.Pod) (pod, error) {
	m := pod{name: p.Name, bound: p.Spec.NodeName != ""}
	if p.Status.Phase == corev1.PodSucceeded {
		m.bound = true // its claims may be gone
		return m, nil
	}

	names, missing := claimsOf(p)
	m.lacks = missing
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

	if len(m.claims) == 0 && m.lacks == "" {
		// Nothing of ours keeps it from being bound. It may wait for others, such as a claim for
		// extended resources that is not made yet.
		m.lacks = "it is not bound"
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
	} else if resource := resourceOfClass(p); resource != "" {
		missing = fmt.Sprintf("the ResourceClaim for its %s does not exist yet", resource)
	}
	return names, missing
}

// resourceOfClass returns an extended resource that the pod asks for and that only a DeviceClass can
// stand for, "" if there is none (KEP-5004). Such a resource is named after the class, and the kubelet
// lets no device plugin register it. The scheduler makes the claim after it has reserved the pod's
// other claims (Kubernetes 1.37, PreBind of DynamicResources). Of other names it is not known here
// whether a DeviceClass or a device plugin serves them at the pod's node.
func resourceOfClass(p *corev1.Pod) corev1.ResourceName {
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		for resource, wanted := range c.Resources.Requests {
			if strings.HasPrefix(string(resource), resourceapi.ResourceDeviceClassPrefix) &&
				!wanted.IsZero() {
				return resource
			}
		}
	}
	return ""
}

// addClaim adds what a claim says about its pod.
func (g *Gangs) addClaim(m *pod, p *corev1.Pod, c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		m.lacks = fmt.Sprintf("ResourceClaim %s is not allocated", c.Name)
		return
	}
	devices := binding(c)
	if len(devices) == 0 {
		if !resourceclaim.IsReservedForPod(p, c, true) {
			m.lacks = notReserved(c)
		}
		return
	}

	m.begun = m.begun || m.bound || isOnlyFor(c, p) && reported(c)
	of := gangClaim{key: client.ObjectKeyFromObject(c), allocation: allocationOf(c)}
	_, of.pod = podOf(c)
	if at := c.Status.Allocation.AllocationTimestamp; at != nil {
		of.allocated = at.Time
	}
	for _, d := range devices {
		failed := meta.FindStatusCondition(conditionsOf(c, d), v1alpha1.ConditionProvisionFailed)
		of.saysFailed = of.saysFailed || failed != nil
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

// notReserved says that the scheduler does not bind the pod of a claim, or not any more.
func notReserved(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("ResourceClaim %s is not reserved for it", c.Name)
}

// isOnlyFor reports whether the claim is reserved for this pod, and for no other. What a claim
// reports that others use too says nothing about the pod.
func isOnlyFor(c *resourceapi.ResourceClaim, p *corev1.Pod) bool {
	return len(c.Status.ReservedFor) == 1 && c.Status.ReservedFor[0].UID == p.UID
}

// stateOf returns what a claim lacks, and why an xPU refuses one of its Ports.
func (g *Gangs) stateOf(
	p *corev1.Pod, c *resourceapi.ResourceClaim, devices []device, of gangClaim,
) (lacks, failed string) {
	g.mu.Lock()
	defer g.mu.Unlock()

	q := g.question(of.key)
	asked := q != nil && q.isOf(c)
	switch {
	case asked && q.state == Failed && of.givenBackAt.IsZero():
		return "", fmt.Sprintf("ResourceClaim %s: %s", c.Name, q.failure)
	case of.saysFailed:
		return fmt.Sprintf("ResourceClaim %s is given back", c.Name), ""
	case !resourceclaim.IsReservedForPod(p, c, true):
		return notReserved(c), ""
	case len(c.Status.ReservedFor) > 1:
		return fmt.Sprintf("ResourceClaim %s is reserved for others too", c.Name), ""
	case asked && q.state == Up || reported(c):
		return "", ""
	}

	for _, d := range devices {
		provisioned := meta.FindStatusCondition(conditionsOf(c, d), v1alpha1.ConditionProvisioned)
		if provisioned != nil && provisioned.Status == metav1.ConditionFalse &&
			provisioned.Reason != v1alpha1.ReasonGangIncomplete {
			return fmt.Sprintf("ResourceClaim %s: %s: %s", c.Name, provisioned.Reason, provisioned.Message), ""
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
			if p.bound || c.saysFailed {
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
		if q := g.question(key); q != nil && q.since.Before(since) {
			since = q.since
		}
	}
	return since
}

// release lets the claims of a namespace report alone, because the controller may not read what
// would say how many pods belong together. Its role is older than the controller.
func (g *Gangs) release(ctx context.Context, namespace string, err error) {
	ctrl.LoggerFrom(ctx).Error(err, "pods of PodGroups are not held together: "+applyRole,
		"namespace", namespace)

	g.mu.Lock()
	defer g.mu.Unlock()
	for name, q := range g.held[namespace] {
		if q.verdict.Answer == Wait {
			q.verdict.Answer = Alone
			g.wake(0, types.NamespacedName{Namespace: namespace, Name: name})
		}
	}
}

// wake has a claim looked at after a while.
func (g *Gangs) wake(after time.Duration, key types.NamespacedName) {
	g.decided.Add(after, reconcile.Request{NamespacedName: key})
}

// tell stores the verdicts of a gang, and wakes up the claims for which they are new. claims are
// the gang's claims that waited before its pods were read. It reports whether a claim still waits.
func (g *Gangs) tell(
	ctx context.Context, namespace, group string, claims []string,
	verdicts map[types.NamespacedName]Verdict,
) (waits bool) {
	g.mu.Lock()
	defer g.mu.Unlock()

	names := sets.New(claims...)
	for key, verdict := range verdicts {
		names.Insert(key.Name)
		if verdict.Answer == GiveBack && g.question(key) == nil {
			// The claim has not asked, because its Port is not up yet.
			g.hold(key, newQuestion(verdict.allocation, verdict.pod, group))
		}
	}

	for name := range names {
		key := types.NamespacedName{Namespace: namespace, Name: name}
		if q := g.question(key); q != nil && q.group == group && q.verdict.Answer == Wait {
			verdict, judged := verdicts[key]
			waits = g.reply(ctx, key, q, verdict, judged) || waits
		}
	}
	return waits
}

// reply answers what a claim has asked, and reports whether the claim still waits. The caller holds
// mu.
func (g *Gangs) reply(
	ctx context.Context, key types.NamespacedName, q *question, verdict Verdict, judged bool,
) (waits bool) {
	switch {
	case !judged:
		// The pod for which it has asked is going or gone. Another may have the claim now. It asks
		// after a pause, because a pod may be going for long.
		g.drop(key)
		g.wake(reviewPeriod, key)
		return false
	case verdict.Answer == Wait || verdict.allocation != q.allocation:
		return true
	}

	q.verdict = verdict
	if verdict.Answer == GiveBack {
		ctrl.LoggerFrom(ctx).Info("giving back a claim of a gang", "claim", key,
			"podGroup", q.group, "why", verdict.Message)
	}
	g.wake(0, key)
	return false
}
