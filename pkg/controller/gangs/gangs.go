// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// State is what a claim alone would report of its devices that have binding conditions.
type State int

const (
	// Pending means that a Port is not up yet.
	Pending State = iota
	// Up means that all Ports are up.
	Up
	// Failed means that an xPU refuses a Port, and that the device has its taint.
	Failed
)

// Gangs has the claims that wait for their gangs. Claims ask it before they report. It reads pods
// and PodGroups from the API server, and only in namespaces where such claims wait: watching all
// pods of a cluster would cost much for the few of them that are in gangs. Safe for concurrent use.
type Gangs struct {
	reconciling.Cluster
	timeout time.Duration

	evaluations queue.Wakeups[reconcile.Request] // by namespace
	decided     queue.Wakeups[reconcile.Request] // claims whose verdict has changed

	mu sync.Mutex
	// held are the claims that have asked, by namespace and name. It has no empty map.
	held    map[string]map[string]*question
	began   time.Time            // when the first claim asked
	rests   map[string]time.Time // until when a namespace is not read again
	denials map[access]*denial
}

// question is a claim of a gang that waits for its verdict, or has it and has not reported yet.
type question struct {
	allocation string    // see [allocationOf]
	pod        types.UID // see [podOf]
	group      string    // name of the PodGroup
	state      State
	failure    string // why an xPU refuses a Port, for Failed
	verdict    Verdict
	since      time.Time
}

const (
	// settle is the pause before a gang is judged, because the claims of its pods come together.
	settle = 100 * time.Millisecond
	// reviewPeriod is how often a gang that waits is judged without an event. No event comes when a
	// pod of the gang is created or bound that has no claim.
	reviewPeriod = 2 * time.Second
	// evaluators is how many namespaces are read at once. Objects of tenants can be large.
	evaluators = 1
)

// Setup adds to the manager what judges gangs. A gang that is not complete is given back timeout
// after the first of its claims was allocated.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, timeout time.Duration) (*Gangs, error) {
	g := newGangs(cluster, timeout)
	err := reconciling.NewController(mgr, "gang", evaluators).
		WatchesRawSource(g.evaluations.Source()).
		Complete(g.Guarded(reconcile.Func(g.evaluate)))
	return g, err
}

func newGangs(cluster reconciling.Cluster, timeout time.Duration) *Gangs {
	return &Gangs{Cluster: cluster, timeout: timeout, held: map[string]map[string]*question{},
		rests: map[string]time.Time{}, denials: map[access]*denial{}}
}

// Decided returns the source of claims whose verdict has changed.
func (g *Gangs) Decided() source.TypedSource[reconcile.Request] { return g.decided.Source() }

// Ask returns what a claim may report whose devices are in the state. failure says why an xPU
// refuses a Port. The claim must have a device that has binding conditions.
func (g *Gangs) Ask(
	ctx context.Context, c *resourceapi.ResourceClaim, state State, failure string,
) (Verdict, error) {
	group, known := g.groupKnown(c)
	if !known {
		if state == Pending { // it has nothing to report
			return Verdict{}, nil
		}
		var err error
		if group, err = g.groupOf(ctx, c); err != nil || group == "" {
			return Verdict{}, err
		}
	}
	return g.note(c, group, state, failure), nil
}

// groupKnown returns the PodGroup of a claim that has asked for the same allocation and pod before.
func (g *Gangs) groupKnown(c *resourceapi.ResourceClaim) (group string, known bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	q := g.question(client.ObjectKeyFromObject(c))
	if q == nil || !q.isOf(c) {
		return "", false
	}
	return q.group, true
}

// isOf reports whether the question is about the allocation of the claim, and about the pod that has
// it. A claim that is reserved for no pod any more is still the last one's.
func (q *question) isOf(c *resourceapi.ResourceClaim) bool {
	name, uid := podOf(c)
	return q.allocation == allocationOf(c) && (name == "" || q.pod == uid)
}

// question returns what a claim has asked, nil if it has not. The caller holds mu.
func (g *Gangs) question(key types.NamespacedName) *question {
	return g.held[key.Namespace][key.Name]
}

// hold stores what a claim has asked. The caller holds mu.
func (g *Gangs) hold(key types.NamespacedName, q *question) {
	if g.held[key.Namespace] == nil {
		g.held[key.Namespace] = map[string]*question{}
	}
	g.held[key.Namespace][key.Name] = q
	if g.began.IsZero() {
		g.began = q.since
	}
}

// drop forgets what a claim has asked. The caller holds mu.
func (g *Gangs) drop(key types.NamespacedName) {
	delete(g.held[key.Namespace], key.Name)
	if len(g.held[key.Namespace]) == 0 {
		delete(g.held, key.Namespace)
	}
}

// note remembers the claim, and has its gang judged if the claim reports something new.
func (g *Gangs) note(
	c *resourceapi.ResourceClaim, group string, state State, failure string,
) Verdict {
	g.mu.Lock()
	defer g.mu.Unlock()

	key := client.ObjectKeyFromObject(c)
	q := g.question(key)
	if q == nil || !q.isOf(c) {
		_, pod := podOf(c)
		q = newQuestion(allocationOf(c), pod, group)
		g.hold(key, q)
	} else if q.state == state && q.failure == failure {
		return q.verdict
	}

	q.state, q.failure = state, failure
	g.evaluations.Add(settle, namespaceRequest(c.Namespace))
	return q.verdict
}

// newQuestion returns a claim that has just asked.
func newQuestion(allocation string, pod types.UID, group string) *question {
	return &question{allocation: allocation, pod: pod, group: group, since: time.Now(),
		verdict: Verdict{Answer: Wait, Group: group}}
}

// Forget lets go of a claim that has no more to ask.
func (g *Gangs) Forget(key types.NamespacedName) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.drop(key)
}

// namespaceRequest is the request to judge the gangs of a namespace.
func namespaceRequest(namespace string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace}}
}

// groupOf returns the name of the PodGroup of the claim's pod, "" if the pod is in none, or if there
// is no such pod any more. The field is immutable. A controller that may not read pods for long
// knows no groups, so that claims of other pods can report.
func (g *Gangs) groupOf(ctx context.Context, c *resourceapi.ResourceClaim) (string, error) {
	name, uid := podOf(c)
	if name == "" {
		return "", nil
	}

	var p corev1.Pod
	err := g.Live.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: name}, &p)
	if g.denied(access{c.Namespace, podOfClaim}, err) {
		ctrl.LoggerFrom(ctx).Error(err, "the claim is not held for a PodGroup: "+applyRole)
		return "", nil
	}
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("pod %s/%s: %w", c.Namespace, name, err)
	}
	if err != nil || p.UID != uid {
		return "", nil
	}
	return groupName(&p), nil
}

// groupName returns the name of the pod's PodGroup, "" if it has none.
func groupName(p *corev1.Pod) string {
	if p.Spec.SchedulingGroup == nil {
		return ""
	}
	return ptr.Deref(p.Spec.SchedulingGroup.PodGroupName, "")
}

// podOf returns the pod for which the claim is reserved or, if it is reserved for none, the pod for
// which it was made. The name is "" if there is neither.
func podOf(c *resourceapi.ResourceClaim) (name string, uid types.UID) {
	for _, consumer := range c.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			return consumer.Name, consumer.UID
		}
	}
	if owner := metav1.GetControllerOf(c); owner != nil && owner.APIVersion == "v1" &&
		owner.Kind == "Pod" {
		return owner.Name, owner.UID
	}
	return "", ""
}

// allocationOf identifies one allocation of one claim.
func allocationOf(c *resourceapi.ResourceClaim) string {
	if c.Status.Allocation == nil {
		return ""
	}

	parts := []string{string(c.UID)}
	if at := c.Status.Allocation.AllocationTimestamp; at != nil {
		parts = append(parts, at.UTC().Format(time.RFC3339))
	}
	for _, result := range c.Status.Allocation.Devices.Results {
		if result.Driver == v1alpha1.GroupName {
			parts = append(parts, result.Pool, result.Device)
		}
	}
	return strings.Join(parts, " ")
}

// device identifies a device of this driver in a claim.
type device struct {
	pool, name string
	share      types.UID
}

// binding returns the claim's devices for whose binding conditions the scheduler waits.
func binding(c *resourceapi.ResourceClaim) (devices []device) {
	if c.Status.Allocation == nil {
		return nil
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver == v1alpha1.GroupName && !ptr.Deref(r.AdminAccess, false) &&
			slices.Contains(r.BindingConditions, v1alpha1.ConditionProvisioned) {
			devices = append(devices, device{r.Pool, r.Device, ptr.Deref(r.ShareID, "")})
		}
	}
	return devices
}
