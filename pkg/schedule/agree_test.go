// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// TestAgreesWithAllocator compares the package with the allocator for random clusters and claims:
// the allocator must not serve what is called impossible, and every refused pod must have a reason.
func TestAgreesWithAllocator(t *testing.T) {
	refused, impossible := 0, 0
	for seed := range uint64(900) {
		chance := rand.New(rand.NewPCG(seed, 1))
		gates := []string{"", "DRAListTypeAttributes=true",
			"DRAListTypeAttributes=true,DRADerivedAttributes=true"}[seed%3]
		s := newScheduler(t, gates, randomObjects(chance, gates))
		for i := range 6 {
			pod := randomPod(chance, i)
			claims, reasons := s.podClaims(pod)
			if len(reasons) > 0 {
				t.Fatalf("seed %d: %+v", seed, reasons)
			}

			node, pending := s.nodes[0], []*resourceapi.ResourceClaim{claims[0].claim}
			fits, err := allocates(t.Context(), s, node, pending)
			if err != nil {
				continue // the allocator would take too long
			}

			if reasons := s.survey(t.Context(), node, pending).impossible(); len(reasons) > 0 {
				impossible++
				if fits {
					t.Errorf("seed %d, pod %d: has a solution, and is called impossible: %+v",
						seed, i, reasons)
				}
			}

			decision, err := s.Schedule(t.Context(), pod)
			if err != nil {
				t.Fatal(err)
			}
			if (decision.Node != "") != fits {
				t.Errorf("seed %d, pod %d: on node %q, want one: %t", seed, i, decision.Node, fits)
			}

			if !fits {
				refused++
				if len(decision.Refusals) != 1 || len(decision.Refusals[0].Reasons) == 0 ||
					decision.Refusals[0].Reasons[0].Message == "" {
					t.Errorf("seed %d, pod %d: refused without a reason: %+v", seed,
						i, decision.Refusals)
				}
			}
		}
	}

	if refused < 200 || impossible < refused*3/4 {
		t.Errorf("%d pods refused, of which %d without a search: chance tries too little", refused,
			impossible)
	}
}

func allocates(
	ctx context.Context, s *Scheduler, node *nodeState, claims []*resourceapi.ResourceClaim,
) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()

	allocator, err := structured.NewAllocator(ctx, s.features.Allocator, s.devices.allocated,
		s.classes, s.devices.slices, s.cel)
	if err != nil {
		return false, err
	}

	allocations, err := allocator.Allocate(ctx, node.Node, claims)
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		err = nil
	}

	return allocations != nil, err
}

func newScheduler(t *testing.T, featureGates string, objects *snapshot.Snapshot) *Scheduler {
	t.Helper()
	features, err := NewFeatures(NewestKubernetes, featureGates)
	if err != nil {
		t.Fatal(err)
	}
	return New(t.Context(), objects, features)
}

const testDriver = "nic.example.com"

// randomObjects returns a node with PFs of a few VFs, some of them tainted. PFs exclude their VFs
// by counters, or devices can be shared. With feature gates, attributes are lists, and claims
// derive attributes.
func randomObjects(chance *rand.Rand, gates string) *snapshot.Snapshot {
	s := &snapshot.Snapshot{}
	node := "node"
	counted, shared := chance.IntN(2) == 0, chance.IntN(3) == 0

	devices := resourceapi.ResourceSliceSpec{
		Driver: testDriver, NodeName: &node, Pool: resourceapi.ResourcePool{
			Name: node, ResourceSliceCount: 1,
		},
	}

	counters := *devices.DeepCopy()
	for pf := range 1 + chance.IntN(3) {
		set := fmt.Sprintf("pf-%d", pf)
		counters.SharedCounters = append(counters.SharedCounters,
			resourceapi.CounterSet{Name: set, Counters: counter(2)})

		for vf := range 1 + chance.IntN(4) {
			device := resourceapi.Device{
				Name: fmt.Sprintf("%s-vf-%d", set, vf),
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
					"pf": {StringValue: &set}, "odd": {BoolValue: new(vf%2 == 1)},
					"root": {IntValue: new(int64(chance.IntN(2)))},
				},
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
					"bandwidth": {Value: resource.MustParse("10G")},
				},
			}

			if gates != "" && chance.IntN(2) == 0 {
				device.Attributes["root"] = resourceapi.DeviceAttribute{
					IntValues: []int64{int64(chance.IntN(3)), int64(chance.IntN(3))},
				}
			}

			if chance.IntN(6) == 0 {
				delete(device.Attributes, "root")
			}

			if chance.IntN(6) == 0 {
				device.Taints = []resourceapi.DeviceTaint{
					{Key: "down", Effect: resourceapi.DeviceTaintEffectNoSchedule},
				}
			}

			if counted {
				device.ConsumesCounters = []resourceapi.DeviceCounterConsumption{
					{CounterSet: set, Counters: counter(1)},
				}
			}

			if shared {
				device.AllowMultipleAllocations = new(true)
			}

			devices.Devices = append(devices.Devices, device)
		}
	}

	specs := []resourceapi.ResourceSliceSpec{devices}
	if counted {
		specs = append(specs, counters)
	}

	for i := range specs {
		specs[i].Pool.ResourceSliceCount = int64(len(specs))
		slice := &resourceapi.ResourceSlice{Spec: specs[i]}
		slice.Name = fmt.Sprintf("slice-%d", i)
		must(s.Put(slice))
	}

	n := &corev1.Node{}
	n.Name = node
	must(s.Put(n))
	class := &resourceapi.DeviceClass{}
	class.Name = "nic"
	must(s.Put(class))

	for i := range 12 {
		template := &resourceapi.ResourceClaimTemplate{}
		template.Name = fmt.Sprintf("template-%d", i)
		template.Spec.Spec.Devices = randomClaim(chance, strings.Contains(gates, "Derived"))
		must(s.Put(template))
	}

	return s
}

func counter(value int64) map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{
		"functions": {Value: *resource.NewQuantity(value, resource.DecimalSI)},
	}
}

// randomClaim returns a claim with some requests, and constraints on all of them or on the first.
func randomClaim(chance *rand.Rand, derive bool) resourceapi.DeviceClaim {
	var claim resourceapi.DeviceClaim
	var derived []resourceapi.DeviceDerivedAttribute
	if derive {
		derived = []resourceapi.DeviceDerivedAttribute{{Name: "derived/even",
			Expression: `!device.attributes["nic.example.com"].odd`}}
	}

	for i := range 1 + chance.IntN(2) {
		request := resourceapi.DeviceRequest{Name: fmt.Sprintf("request-%d", i)}
		exactly := resourceapi.ExactDeviceRequest{
			DeviceClassName: "nic", Count: int64(1 + chance.IntN(3)), DerivedAttributes: derived,
		}
		if chance.IntN(3) == 0 {
			exactly.Selectors = expressions(`device.attributes["nic.example.com"].odd`)
		}

		if chance.IntN(3) == 0 {
			exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
				"bandwidth": resource.MustParse(fmt.Sprintf("%dG", 1+chance.IntN(12))),
			}}
		}

		if chance.IntN(5) == 0 {
			exactly.AllocationMode, exactly.Count = resourceapi.DeviceAllocationModeAll, 0
			exactly.AdminAccess = new(chance.IntN(2) == 0)
		}

		if chance.IntN(4) == 0 && exactly.Count > 0 {
			request.FirstAvailable = []resourceapi.DeviceSubRequest{
				{Name: "many", DeviceClassName: "nic", Count: 4, DerivedAttributes: derived},
				{Name: "few", DeviceClassName: "nic", Count: exactly.Count,
					Selectors: exactly.Selectors, DerivedAttributes: derived},
			}
		} else {
			request.Exactly = &exactly
		}

		claim.Requests = append(claim.Requests, request)
	}

	for range chance.IntN(3) {
		constraint := resourceapi.DeviceConstraint{}
		if chance.IntN(2) == 0 {
			constraint.Requests = []string{"request-0"}
		}

		attribute := new(resourceapi.FullyQualifiedName(testDriver + "/" +
			[]string{"pf", "root", "odd"}[chance.IntN(3)]))
		if derive && chance.IntN(3) == 0 {
			*attribute = "derived/even"
		}

		if chance.IntN(2) == 0 {
			constraint.MatchAttribute = attribute
		} else {
			constraint.DistinctAttribute = attribute
		}

		claim.Constraints = append(claim.Constraints, constraint)
	}

	return claim
}

func expressions(expression string) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{
		{CEL: &resourceapi.CELDeviceSelector{Expression: expression}},
	}
}

func randomPod(chance *rand.Rand, i int) *corev1.Pod {
	pod := &corev1.Pod{}
	pod.Namespace, pod.Name = "default", fmt.Sprintf("pod-%d", i)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{
		{Name: "nic", ResourceClaimTemplateName: new(fmt.Sprintf("template-%d", chance.IntN(12)))},
	}
	return pod
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
