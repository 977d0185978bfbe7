// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/generate"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// scheduleBenchmarks compare xpuctl schedule with the allocator of the Kubernetes scheduler alone.
func scheduleBenchmarks() []benchmark {
	return []benchmark{{"schedule", measureSchedule}, {"impossible", measureImpossible}}
}

// question is a claim for which a cluster is asked.
type question struct {
	what      string
	allocated float64 // share of allocated VFs
	claim     resourceapi.DeviceClaim
}

func questions() []question {
	const pf, root = v1alpha1.GroupName + "/pf", "resource.kubernetes.io/pcieRoot"
	var all []question
	for _, allocated := range []float64{0, 0.9} {
		all = append(all,
			question{"1 VF", allocated, vfs(1, nil, nil)},
			question{"2 VFs of different PFs", allocated,
				vfs(2, nil, new(resourceapi.FullyQualifiedName(pf)))},
			question{"2 VFs below one PCIe root", allocated,
				vfs(2, new(resourceapi.FullyQualifiedName(root)), nil)},
			question{"8 VFs below one PCIe root", allocated,
				vfs(8, new(resourceapi.FullyQualifiedName(root)), nil)},
		)
	}

	return all
}

// vfs returns a claim for VFs.
func vfs(count int64, match, distinct *resourceapi.FullyQualifiedName) resourceapi.DeviceClaim {
	claim := resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "vfs",
		Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: v1alpha1.GroupName,
			AllocationMode:  resourceapi.DeviceAllocationModeExactCount, Count: count,
		}}}}

	if match != nil || distinct != nil {
		claim.Constraints = []resourceapi.DeviceConstraint{
			{MatchAttribute: match, DistinctAttribute: distinct},
		}
	}

	return claim
}

// measureSchedule finds out where a pod can run in clusters of several sizes. Every node is tried,
// because every node is reported.
func measureSchedule(ctx context.Context, b *bench) ([]Measurement, error) {
	var rows []Measurement
	for _, nodes := range b.sizes() {
		for _, allocated := range []float64{0, 0.9} {
			some, err := b.askCluster(ctx, nodes, allocated)
			if err != nil {
				return rows, fmt.Errorf("%d nodes: %w", nodes, err)
			}
			rows = append(rows, some...)
		}
	}

	return rows, nil
}

func (b *bench) sizes() []int {
	if b.quick {
		return []int{10}
	}
	return []int{10, 100, 1000, 5000}
}

// hosts writes a cluster of hosts with two PFs of 64 VFs each, or the given numbers.
func (b *bench) hosts(nodes, pfs, vfs int, allocated float64) (path string, err error) {
	shape, err := generate.Find("sriov")
	if err != nil {
		return "", err
	}

	cluster, err := generate.Generate(shape,
		generate.Options{Nodes: nodes, PFs: pfs, VFs: vfs, Allocated: allocated})
	if err != nil {
		return "", err
	}

	path = filepath.Join(b.dir, "cluster.json")
	content, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "List", "items": cluster.Objects(),
	})
	if err != nil {
		return "", err
	}

	return path, os.WriteFile(path, content, 0o600)
}

func (b *bench) askCluster(
	ctx context.Context, nodes int, allocated float64,
) ([]Measurement, error) {
	path, err := b.hosts(nodes, 2, 64, allocated)
	if err != nil {
		return nil, err
	}

	var asked []question
	var rows []Measurement
	for _, q := range questions() {
		if q.allocated == allocated {
			asked = append(asked, q)
			rows = append(rows, Measurement{
				What: fmt.Sprintf("xpuctl schedule, %s, %d nodes x 128 VFs, %.0f %% taken",
					q.what, nodes, 100*allocated), Unit: Seconds,
				Reference: "the allocator alone", Goal: atMostTimes(1.1),
			})
		}
	}

	for round := range b.runs(3) + b.warmUp() {
		ours, err := answersOf(ctx, path, asked, readOwn)
		if err != nil {
			return nil, err
		}

		reference, err := answersOf(ctx, path, asked, readBare)
		if err != nil {
			return nil, err
		}

		for i := range rows {
			if ours[i].fits != reference[i].fits {
				return nil, fmt.Errorf("%s fits on %d nodes, and the allocator says %d",
					rows[i].What, ours[i].fits, reference[i].fits)
			}
			if round < b.warmUp() {
				continue
			}

			rows[i].Samples = append(rows[i].Samples, ours[i].seconds())
			rows[i].ReferenceSamples = append(rows[i].ReferenceSamples, reference[i].seconds())
			rows[i].Details = []string{fmt.Sprintf("read in %s and answered in %s; the "+
				"allocator: %s and %s; fits on %d nodes",
				Seconds(ours[i].read.Seconds()), Seconds(ours[i].answered.Seconds()),
				Seconds(reference[i].read.Seconds()), Seconds(reference[i].answered.Seconds()),
				ours[i].fits)}
		}
	}

	return rows, nil
}

// reading is a cluster that has been read, and can be asked.
type reading interface {
	ask(context.Context, resourceapi.DeviceClaim) (took time.Duration, fits int, err error)
}

// answered is the result of a question.
type answered struct {
	read, answered time.Duration
	fits           int
}

func (a answered) seconds() float64 { return (a.read + a.answered).Seconds() }

// answersOf reads the cluster and asks it each question. It keeps no reference to the cluster,
// because memory suffices for only one of the largest.
func answersOf[R reading](
	ctx context.Context, path string, questions []question, read func(string) (R, error),
) ([]answered, error) {
	defer debug.FreeOSMemory()
	begin := time.Now()
	cluster, err := read(path)
	if err != nil {
		return nil, err
	}

	took := time.Since(begin)
	all := make([]answered, len(questions))
	for i, q := range questions {
		all[i].read = took
		if all[i].answered, all[i].fits, err = cluster.ask(ctx, q.claim); err != nil {
			return nil, err
		}
	}

	return all, nil
}

// measureImpossible asks for VFs of more PFs than a host has. The allocator must try all
// combinations to find that out.
func measureImpossible(ctx context.Context, b *bench) ([]Measurement, error) {
	path, err := b.hosts(1, 4, 32, 0)
	if err != nil {
		return nil, err
	}

	const pf = v1alpha1.GroupName + "/pf"
	claim := vfs(5, nil, new(resourceapi.FullyQualifiedName(pf)))

	row := Measurement{
		What: "xpuctl schedule, 5 VFs of different PFs, where there are 4 with 32 VFs, 1 node",
		Unit: Seconds, Goal: lessThan(0.1),
	}

	for range b.runs(5) {
		answers, err := answersOf(ctx, path, []question{{claim: claim}}, readOwn)
		if err != nil {
			return nil, err
		}
		if answers[0].fits != 0 {
			return nil, fmt.Errorf("fits on %d nodes", answers[0].fits)
		}
		row.Samples = append(row.Samples, answers[0].seconds())
	}

	patience := 30 * time.Second
	if b.quick {
		patience = 100 * time.Millisecond
	}

	bare, err := readBare(path)
	if err != nil {
		return nil, err
	}

	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()

	switch took, _, err := bare.ask(ctx, claim); {
	case errors.Is(err, context.DeadlineExceeded):
		row.Details = []string{fmt.Sprintf("the allocator alone has no answer after %s", patience)}
	case err != nil:
		return nil, err
	default:
		row.Reference, row.ReferenceSamples = "the allocator alone, once", []float64{took.Seconds()}
	}

	return []Measurement{row}, nil
}

// ownReading uses the packages of xpuctl schedule.
type ownReading struct{ objects *snapshot.Snapshot }

func readOwn(path string) (*ownReading, error) {
	reader, err := snapshot.NewReader(nil)
	if err != nil {
		return nil, err
	}
	objects, err := reader.Read(path)
	return &ownReading{objects}, err
}

func (r *ownReading) ask(
	ctx context.Context, claim resourceapi.DeviceClaim,
) (took time.Duration, fits int, err error) {
	features, err := schedule.NewFeatures(schedule.NewestKubernetes, "")
	if err != nil {
		return 0, 0, err
	}

	pod := &corev1.Pod{}
	pod.Namespace, pod.Name = "default", "asked"
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{
		{Name: "vfs", ResourceClaimName: new("asked")},
	}
	asked := &resourceapi.ResourceClaim{}
	asked.Name, asked.Spec.Devices = "asked", *claim.DeepCopy()
	if err := r.objects.Put(asked); err != nil {
		return 0, 0, err
	}

	begin := time.Now()
	decision, err := schedule.New(ctx, r.objects, features).Schedule(ctx, pod)
	if err != nil {
		return 0, 0, err
	}

	return time.Since(begin), decision.Fits, nil
}

// bareReading decodes the same file and uses only the allocator.
type bareReading struct {
	nodes   []*corev1.Node
	slices  []*resourceapi.ResourceSlice
	classes bareClasses
	state   structured.AllocatedState
}

type bareClasses []*resourceapi.DeviceClass

func (c bareClasses) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c bareClasses) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name)
}

func readBare(path string) (*bareReading, error) {
	scheme := kruntime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), resourceapi.AddToScheme(scheme)); err != nil {
		return nil, err
	}

	decoder := serializer.NewCodecFactory(scheme).UniversalDeserializer()
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}

	var list corev1.List
	if err := json.Unmarshal(content, &list); err != nil {
		return nil, err
	}

	r := &bareReading{state: structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}}

	for _, item := range list.Items {
		object, _, err := decoder.Decode(item.Raw, nil, nil)
		if err != nil {
			return nil, err
		}
		r.add(object)
	}

	return r, nil
}

func (r *bareReading) add(object kruntime.Object) {
	switch o := object.(type) {
	case *corev1.Node:
		r.nodes = append(r.nodes, o)
	case *resourceapi.ResourceSlice:
		r.slices = append(r.slices, o)
	case *resourceapi.DeviceClass:
		r.classes = append(r.classes, o)
	case *resourceapi.ResourceClaim:
		for _, result := range o.Status.Allocation.Devices.Results {
			r.state.AllocatedDevices.Insert(structured.MakeDeviceID(result.Driver, result.Pool,
				result.Device))
		}
	}
}

// ask allocates the claim on each node, several in parallel.
func (r *bareReading) ask(
	ctx context.Context, claim resourceapi.DeviceClaim,
) (took time.Duration, fits int, err error) {
	features, err := schedule.NewFeatures(schedule.NewestKubernetes, "")
	if err != nil {
		return 0, 0, err
	}

	asked := []*resourceapi.ResourceClaim{{Spec: resourceapi.ResourceClaimSpec{Devices: claim}}}
	begin := time.Now()
	allocator, err := structured.NewAllocator(ctx, features.Allocator, r.state, r.classes, r.slices,
		cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
	if err != nil {
		return 0, 0, err
	}

	var fit atomic.Int64
	failures := make([]error, len(r.nodes))
	workqueue.ParallelizeUntil(ctx, runtime.GOMAXPROCS(0), len(r.nodes), func(i int) {
		allocations, err := allocator.Allocate(ctx, r.nodes[i], asked)
		if failures[i] = err; allocations != nil {
			fit.Add(1)
		}
	})

	return time.Since(begin), int(fit.Load()), errors.Join(failures...)
}
