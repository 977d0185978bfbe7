// SPDX-License-Identifier: Apache-2.0

// Package schedule answers where Kubernetes would place pods that claim devices, which devices they
// would get, and why nodes cannot take a pod. It uses the allocator of the Kubernetes scheduler
// (k8s.io/dynamic-resource-allocation/structured), and works for any DRA driver.
//
// A [Scheduler] works on a snapshot. Like the Kubernetes scheduler, it places one pod after the
// other and remembers what it allocated. It reproduces the scheduler's checks of node names,
// unschedulable nodes, taints, node selectors, node affinity and requested resources. It ignores
// volumes, host ports, affinity between pods, topology spread and preemption.
package schedule

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

const (
	// searchTimeout bounds the allocator's search on one node, like
	// DynamicResourcesArgs.filterTimeout in the scheduler's configuration.
	searchTimeout = 10 * time.Second
	// searchPatience is how long the allocator searches before it is checked whether there can be a
	// solution at all.
	searchPatience = 5 * time.Millisecond
	// celCacheSize is how many compiled selectors are cached.
	celCacheSize = 1000
)

// Scheduler places pods. It is not safe for concurrent use.
type Scheduler struct {
	features  Features
	nodes     []*nodeState // by name
	devices   *devices
	classes   classes
	extended  *extendedresourcecache.ExtendedResourceCache
	claims    map[objectName]*resourceapi.ResourceClaim
	templates map[objectName]*resourceapi.ResourceClaimTemplate
	cel       *cel.Cache
}

// objectName is the name of an object in a namespace.
type objectName struct{ namespace, name string }

func (n objectName) String() string { return n.namespace + "/" + n.name }

// New returns a Scheduler that starts with the objects of the snapshot. It does not change the
// snapshot, which must not change while the Scheduler is in use.
func New(ctx context.Context, from *snapshot.Snapshot, features Features) *Scheduler {
	s := &Scheduler{
		features:  features,
		classes:   classes{},
		extended:  extendedresourcecache.NewExtendedResourceCache(klog.FromContext(ctx)),
		claims:    map[objectName]*resourceapi.ResourceClaim{},
		templates: map[objectName]*resourceapi.ResourceClaimTemplate{},
		cel: cel.NewCache(celCacheSize, cel.Features{
			EnableConsumableCapacity: features.Allocator.ConsumableCapacity,
			EnableListTypeAttributes: features.Allocator.ListTypeAttributes,
		}),
	}

	s.nodes = newNodeStates(from)
	for _, class := range from.Classes {
		s.classes[class.Name] = class
		s.extended.OnAdd(class, true)
	}

	for _, template := range from.Templates {
		s.templates[objectName{template.Namespace, template.Name}] = template
	}

	rules := from.TaintRules
	if !features.TaintRules {
		rules = nil
	}

	s.devices = newDevices(from.Slices, rules)
	for _, claim := range from.Claims {
		s.claims[objectName{claim.Namespace, claim.Name}] = claim
		s.devices.markAllocated(claim)
	}

	return s
}

// Schedule places a pod and allocates the devices of its claims. A pod that cannot be placed gets
// nothing. Schedule returns an error only if ctx has ended.
func (s *Scheduler) Schedule(ctx context.Context, pod *corev1.Pod) (*Decision, error) {
	decision := &Decision{Pod: pod}
	if len(pod.Spec.SchedulingGates) > 0 {
		decision.Reasons = append(decision.Reasons, gated(pod))
		return decision, nil
	}

	claims, reasons := s.podClaims(pod)
	if len(reasons) > 0 {
		decision.Reasons = reasons
		return decision, nil
	}

	answers, err := s.ask(ctx, pod, claims)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(answers, func(a answer) bool { return a.fatal != nil }); i >= 0 {
		decision.Reasons = append(decision.Reasons, broken(s.nodes[i], answers[i].fatal))
		return decision, nil
	}

	best := -1
	for i, a := range answers {
		if !a.fits() {
			continue
		}
		decision.Fits++
		if best < 0 || a.score > answers[best].score {
			best = i
		}
	}

	decision.Refusals = refusals(s.nodes, answers)
	if best >= 0 {
		s.assume(decision, s.nodes[best], answers[best])
	}

	return decision, nil
}

// answer is the result of trying a pod on one node.
type answer struct {
	reasons []Reason // why the node cannot take the pod; none if it can
	fatal   error    // why no node can take the pod
	claims  []*podClaim
	// for the claims that are not allocated yet, in their order
	allocations []resourceapi.AllocationResult
	score       int64
}

func (a answer) fits() bool { return a.fatal == nil && len(a.reasons) == 0 }

// ask tries the pod on all nodes, several in parallel.
func (s *Scheduler) ask(
	ctx context.Context, pod *corev1.Pod, claims []*podClaim,
) ([]answer, error) {
	allocator, err := structured.NewAllocator(ctx, s.features.Allocator, s.devices.allocated,
		s.classes, s.devices.slices, s.cel)
	if err != nil {
		return nil, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}

	a := &attempt{
		scheduler: s, pod: pod, claims: claims, allocator: allocator,
		requirements: nodeRequirementsOf(pod),
	}
	answers := make([]answer, len(s.nodes))
	workqueue.ParallelizeUntil(ctx, runtime.GOMAXPROCS(0), len(s.nodes), func(i int) {
		answers[i] = a.ask(ctx, s.nodes[i])
	})

	return answers, ctx.Err()
}

// attempt is the attempt to place one pod.
type attempt struct {
	scheduler    *Scheduler
	pod          *corev1.Pod
	claims       []*podClaim
	allocator    structured.Allocator
	requirements nodeRequirements
	surveyFirst  atomic.Bool // on some node the quick search timed out although no solution exists
}

// ask tries the pod on one node. Safe for concurrent use.
func (a *attempt) ask(ctx context.Context, node *nodeState) answer {
	claims := a.scheduler.onNode(a.pod, a.claims, node)
	if reasons := node.rejectReasons(a.requirements, func(name corev1.ResourceName) bool {
		return a.scheduler.isServed(name, node)
	}); len(reasons) > 0 {
		return answer{reasons: reasons}
	}

	var pending []*resourceapi.ResourceClaim
	for _, c := range claims {
		if allocation := c.claim.Status.Allocation; allocation == nil {
			pending = append(pending, c.claim)
		} else if reason, elsewhere := isElsewhere(c.claim, node); elsewhere {
			return answer{reasons: []Reason{reason}}
		}
	}

	result := answer{claims: claims}
	if len(pending) > 0 {
		result.allocations, result.reasons, result.fatal = a.allocate(ctx, node, pending)
	}

	if result.fits() {
		result.score = score(claims, result.allocations)
	}

	return result
}

// allocate asks the allocator for devices of the node, and returns the allocations or reasons why
// there are none.
//
// The allocator tries all combinations of devices, which can take hours where none fits. So its
// search is first limited to searchPatience, then impossible claims are sorted out, and only then
// it may take up to searchTimeout.
func (a *attempt) allocate(
	ctx context.Context, node *nodeState, claims []*resourceapi.ResourceClaim,
) ([]resourceapi.AllocationResult, []Reason, error) {
	if !a.surveyFirst.Load() {
		allocations, err := a.search(ctx, node, claims, searchPatience)
		switch {
		case errors.Is(err, context.DeadlineExceeded):
		case err != nil:
			return nil, nil, err
		case allocations != nil:
			return allocations, nil, nil
		default:
			return nil, a.scheduler.explain(ctx, node, claims), nil
		}
	}

	survey := a.scheduler.survey(ctx, node, claims)
	if reasons := survey.impossible(); len(reasons) > 0 {
		a.surveyFirst.Store(true)
		return nil, reasons, nil
	}

	allocations, err := a.search(ctx, node, claims, searchTimeout)
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		return nil, []Reason{searchEnded()}, nil
	case err != nil:
		return nil, nil, err
	case allocations != nil:
		return allocations, nil, nil
	}

	return nil, a.scheduler.explain(ctx, node, claims), nil
}

// search asks the allocator. It returns neither allocations nor an error if there is no solution.
func (a *attempt) search(
	ctx context.Context, node *nodeState, claims []*resourceapi.ResourceClaim,
	timeout time.Duration,
) ([]resourceapi.AllocationResult, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	allocations, err := a.allocator.Allocate(ctx, node.Node, claims)
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		return nil, nil
	}
	return allocations, err
}

// score rates how well a node serves requests with alternatives: the earlier the chosen
// alternatives, the higher. It equals computeScore of the scheduler's plugin DynamicResources.
func score(claims []*podClaim, allocations []resourceapi.AllocationResult) int64 {
	var score int64
	for _, c := range claims {
		allocation := c.claim.Status.Allocation
		if allocation == nil {
			allocation, allocations = &allocations[0], allocations[1:]
		}

		for _, request := range c.claim.Spec.Devices.Requests {
			for i, sub := range request.FirstAvailable {
				reference := resourceclaim.CreateSubRequestRef(request.Name, sub.Name)
				if slices.ContainsFunc(allocation.Devices.Results,
					func(r resourceapi.DeviceRequestAllocationResult) bool {
						return r.Request == reference
					}) {
					score += int64(resourceapi.FirstAvailableDeviceRequestMaxSize - i)
				}
			}
		}
	}

	return score
}

// assume assigns the pod to the node, and the devices to its claims.
func (s *Scheduler) assume(decision *Decision, node *nodeState, chosen answer) {
	decision.Node, decision.Score = node.Name, chosen.score
	node.add(decision.Pod)
	allocations := chosen.allocations
	for _, c := range chosen.claims {
		given := c.claim.DeepCopy()
		isNew := given.Status.Allocation == nil
		if isNew {
			given.Status.Allocation, allocations = &allocations[0], allocations[1:]
			s.devices.markAllocated(given)
		}

		given.Status.ReservedFor = append(given.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{
				Resource: "pods", Name: decision.Pod.Name, UID: decision.Pod.UID,
			})

		s.claims[objectName{given.Namespace, given.Name}] = given
		decision.Claims = append(decision.Claims, ClaimDecision{
			PodClaim: c.name, Template: c.template, Claim: given, New: isNew,
			Uses: s.devices.uses(given),
		})
	}
}

// classes are DeviceClasses by name. They implement the allocator's interface.
type classes map[string]*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	return slices.SortedFunc(maps.Values(c), func(a, b *resourceapi.DeviceClass) int {
		return cmp.Compare(a.Name, b.Name)
	}), nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, has := c[name]; has {
		return class, nil
	}
	return nil, fmt.Errorf("there is no DeviceClass %s", name)
}
