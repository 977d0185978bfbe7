// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"context"
	"fmt"
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
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
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

	mu   sync.Mutex
	held map[types.NamespacedName]*question
}

// question is a claim of a gang that waits for its verdict, or has it and has not reported yet.
type question struct {
	allocation string // see [allocationOf]
	group      string // name of the PodGroup
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
	// evaluators is how many namespaces are read at once.
	evaluators = 4
)

// Setup adds to the manager what judges gangs. A gang that is not complete is given back timeout
// after the first of its claims was allocated.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, timeout time.Duration) (*Gangs, error) {
	g := &Gangs{Cluster: cluster, timeout: timeout,
		held: map[types.NamespacedName]*question{}}
	err := reconciling.NewController(mgr, "gang", evaluators).
		WatchesRawSource(g.evaluations.Source()).
		Complete(g.Guarded(reconcile.Func(g.evaluate)))
	return g, err
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

// groupKnown returns the PodGroup of a claim that has asked for the same allocation before.
func (g *Gangs) groupKnown(c *resourceapi.ResourceClaim) (group string, known bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	q := g.held[client.ObjectKeyFromObject(c)]
	if q == nil || q.allocation != allocationOf(c) {
		return "", false
	}
	return q.group, true
}

// note remembers the claim, and has its gang judged if the claim reports something new.
func (g *Gangs) note(
	c *resourceapi.ResourceClaim, group string, state State, failure string,
) Verdict {
	g.mu.Lock()
	defer g.mu.Unlock()

	key, allocation := client.ObjectKeyFromObject(c), allocationOf(c)
	q := g.held[key]
	if q == nil || q.allocation != allocation {
		q = newQuestion(allocation, group)
		g.held[key] = q
	} else if q.state == state && q.failure == failure {
		return q.verdict
	}

	q.state, q.failure = state, failure
	g.evaluations.Add(settle, namespaceRequest(c.Namespace))
	return q.verdict
}

// newQuestion returns a claim that has just asked.
func newQuestion(allocation, group string) *question {
	return &question{allocation: allocation, group: group, since: time.Now(),
		verdict: Verdict{Answer: Wait, Group: group}}
}

// Forget lets go of a claim that has no more to ask.
func (g *Gangs) Forget(key types.NamespacedName) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.held, key)
}

// namespaceRequest is the request to judge the gangs of a namespace.
func namespaceRequest(namespace string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace}}
}

// groupOf returns the name of the PodGroup of the claim's pod, "" if the pod is in none, or if there
// is no such pod any more. The field is immutable.
func (g *Gangs) groupOf(ctx context.Context, c *resourceapi.ResourceClaim) (string, error) {
	name, uid := podOf(c)
	if name == "" {
		return "", nil
	}

	var p corev1.Pod
	err := g.Live.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: name}, &p)
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

// binding returns the claim's devices for whose binding conditions the scheduler waits.
func binding(c *resourceapi.ResourceClaim) ([]claim.Device, error) {
	devices, err := claim.Devices(c)
	if err != nil {
		return nil, err
	}

	var found []claim.Device
	for _, d := range devices {
		if d.BeforeBind && !d.Admin {
			found = append(found, d)
		}
	}
	return found, nil
}
