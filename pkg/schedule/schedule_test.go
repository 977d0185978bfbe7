// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// cluster has three nodes with two devices each, and classes. Tests add objects.
const cluster = `apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: a, labels: {zone: east}}, status: {allocatable: {cpu: "2", pods: "2", example.com/plugged: "1"}}}
- {apiVersion: v1, kind: Node, metadata: {name: b}, spec: {taints: [{key: gpu, value: "yes", effect: NoSchedule}]}}
- {apiVersion: v1, kind: Node, metadata: {name: c}, spec: {unschedulable: true}}
- {apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: nic}, spec: {extendedResourceName: example.com/nic}}
- {apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: plugged}, spec: {extendedResourceName: example.com/plugged}}
- {apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: wrong}, spec: {selectors: [{cel: {expression: 'device.attributes["x.example.com"].a == 1'}}]}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: one}, spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic}}]}}}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: wrong}, spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: wrong}}]}}}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: none}, spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: none}}]}}}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: shared}, spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic}}]}}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: going, deletionTimestamp: "2026-01-01T00:00:00Z"}, spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic}}]}}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: a}, spec: {driver: x.example.com, nodeName: a, pool: {name: a, resourceSliceCount: 1}, devices: [{name: d0}, {name: d1}]}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: b}, spec: {driver: x.example.com, nodeName: b, pool: {name: b, resourceSliceCount: 1}, devices: [{name: d0}, {name: d1}]}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: c}, spec: {driver: x.example.com, nodeName: c, pool: {name: c, resourceSliceCount: 1}, devices: [{name: d0}, {name: d1}]}}
`

// pod returns a pod with the given fields in its spec, and a container with the given resources.
func pod(name, spec, resources string) string {
	return fmt.Sprintf("- {apiVersion: v1, kind: Pod, metadata: {name: %s}, spec: {%s "+
		"containers: [{name: c, image: i, resources: {%s}}]}}\n", name, spec, resources)
}

const (
	fromTemplate = "resourceClaims: [{name: nic, resourceClaimTemplateName: %s}],"
	byName       = "resourceClaims: [{name: nic, resourceClaimName: %s}],"
)

// snapshotOf returns a snapshot of the objects.
func snapshotOf(t *testing.T, objects string) *snapshot.Snapshot {
	t.Helper()
	reader, err := snapshot.NewReader(strings.NewReader(objects))
	if err != nil {
		t.Fatal(err)
	}

	from, err := reader.Read("-")
	if err != nil {
		t.Fatal(err)
	}

	return from
}

// decide schedules the pods without a node.
func decide(t *testing.T, featureGates, objects string) []*Decision {
	t.Helper()
	from := snapshotOf(t, objects)
	features, err := NewFeatures(NewestKubernetes, featureGates)
	if err != nil {
		t.Fatal(err)
	}

	scheduler := New(t.Context(), from, features)
	var all []*Decision
	for _, pod := range from.Pods {
		if pod.Spec.NodeName != "" {
			continue
		}
		decision, err := scheduler.Schedule(t.Context(), pod)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, decision)
	}

	return all
}

// summary returns a decision in short: the node with the devices, or each node with the codes of
// its reasons.
func summary(d *Decision) string {
	var parts []string
	if d.Node != "" {
		parts = append(parts, d.Node)
	}

	for _, claim := range d.Claims {
		for _, result := range claim.Claim.Status.Allocation.Devices.Results {
			parts = append(parts, result.Request+"="+result.Device)
		}
	}

	codes := func(reasons []Reason) string {
		var all []string
		for _, r := range reasons {
			all = append(all, string(r.Code))
			for _, c := range r.Causes {
				all = append(all, string(c.Code))
			}
		}
		return strings.Join(all, "+")
	}

	if d.Reasons != nil {
		parts = append(parts, codes(d.Reasons))
	}

	for _, r := range d.Refusals {
		parts = append(parts, strings.Join(r.Nodes, ",")+":"+codes(r.Reasons))
	}

	return strings.Join(parts, " ")
}

const othersRefuse = " b:NodeTainted c:NodeUnschedulable"

func TestSchedule(t *testing.T) {
	one := fmt.Sprintf(fromTemplate, "one")
	for name, tt := range map[string]struct {
		pods, gates string
		want        []string
	}{
		"one device": {pods: pod("p", one, ""), want: []string{"a nic=d0" + othersRefuse}},
		"toleration": {
			pods: pod("p", one+"tolerations: [{operator: Exists}], nodeSelector: {zone: none},",
				""), want: []string{"a,b,c:NodeSelector"},
		},
		"in turn": {pods: pod("p", one, "") + pod("q", one, "") + pod("r", one, ""),
			want: []string{"a nic=d0" + othersRefuse, "a nic=d1" + othersRefuse, "a:NodeResources" +
				othersRefuse}},
		"too few devices": {pods: pod("p", one, "") +
			pod("q", "resourceClaims: [{name: first, resourceClaimTemplateName: one}, {name: "+
				"second, resourceClaimTemplateName: one}],", ""),
			want: []string{"a nic=d0" + othersRefuse, "a:Conflict" + othersRefuse}},
		"unschedulable is tolerated": {pods: pod("p", one+"tolerations: [{key: "+
			"node.kubernetes.io/unschedulable, operator: Exists}], nodeSelector: {},",
			"requests: {cpu: 3}"),
			want: []string{"c nic=d0 a:NodeResources b:NodeTainted"}},
		"taint is tolerated": {pods: pod("p", one+"tolerations: [{key: gpu, operator: Exists}],",
			"requests: {cpu: 3}"),
			want: []string{"b nic=d0 a:NodeResources c:NodeUnschedulable"}},
		"what runs counts": {pods: pod("x", "nodeName: a,", "requests: {cpu: 1500m}") +
			pod("p", one, "requests: {cpu: 1}"),
			want: []string{"a:NodeResources" + othersRefuse}},
		"gated": {
			pods: pod("p", one+"schedulingGates: [{name: wait}],", ""), want: []string{"PodGated"},
		},
		"no claim": {
			pods: pod("p", fmt.Sprintf(byName, "none"), ""), want: []string{"ClaimMissing"},
		},
		"claim in deletion": {
			pods: pod("p", fmt.Sprintf(byName, "going"), ""), want: []string{"ClaimDeleted"},
		},
		"no template": {pods: pod("p", fmt.Sprintf(fromTemplate, "other"), ""),
			want: []string{"TemplateMissing"}},
		"no class": {
			pods: pod("p", fmt.Sprintf(fromTemplate, "none"), ""), want: []string{"ClassMissing"},
		},
		"selector fails": {
			pods: pod("p", fmt.Sprintf(fromTemplate, "wrong"), ""), want: []string{"Broken"},
		},
		"shared claim": {pods: pod("p", fmt.Sprintf(byName, "shared"), "") +
			pod("q", fmt.Sprintf(byName, "shared"), "") +
			pod("r", fmt.Sprintf(byName, "shared")+
				"nodeSelector: {},tolerations: [{operator: Exists}],", ""),
			want: []string{
				"a nic=d0" + othersRefuse, "a nic=d0" + othersRefuse,
				"a:NodeResources b,c:ClaimElsewhere",
			}},
		"extended resource": {
			pods: pod("p", "", "limits: {example.com/nic: 2}"),
			want: []string{"a container-0-request-0=d0 container-0-request-0=d1" + othersRefuse},
		},
		"extended resource by class": {
			pods: pod("p", "", "limits: {deviceclass.resource.kubernetes.io/nic: 1}"),
			want: []string{"a container-0-request-0=d0" + othersRefuse},
		},
		"extended resource of nobody": {
			pods: pod("p", "", "limits: {example.com/other: 1}"),
			want: []string{
				"a:NodeResources b:NodeTainted+NodeResources c:NodeUnschedulable+NodeResources",
			},
		},
		"extended resource of a plugin": {
			pods: pod("p", "", "limits: {example.com/plugged: 1}"),
			want: []string{"a" + othersRefuse},
		},
		"extended resource, feature off": {
			pods: pod("p", "", "limits: {example.com/nic: 1}"), gates: "AllAlpha=false",
			want: []string{"a container-0-request-0=d0" + othersRefuse},
		},
		"init containers use what is there": {
			pods: "- {apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {initContainers: " +
				"[{name: i, image: i, resources: {limits: {example.com/nic: 2}}}], containers: " +
				"[{name: c, image: i, resources: {limits: {example.com/nic: 1}}}]}}\n",
			want: []string{"a container-1-request-0=d0 container-0-request-0=d1" + othersRefuse}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, d := range decide(t, tt.gates, cluster+tt.pods) {
				got = append(got, summary(d))
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"),
					strings.Join(tt.want, "\n\t"))
			}
		})
	}
}

// TestPools covers pools that the allocator rejects.
func TestPools(t *testing.T) {
	slice := func(name, pool string, generation, count int, rest string) string {
		return fmt.Sprintf("- {apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: "+
			"{name: %s}, spec: {driver: x.example.com, %s pool: {name: %s, generation: %d, "+
			"resourceSliceCount: %d}}}\n",
			name, rest, pool, generation, count)
	}

	base := `apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: a, labels: {rack: one}}}
- {apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: nic}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: one}, spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic}}]}}}}
` + pod("p", fmt.Sprintf(fromTemplate, "one"), "")

	for name, tt := range map[string]struct{ slices, want string }{
		"none": {"", "a:NoDevices"},
		"of other nodes": {
			slice("s", "b", 1, 1, "nodeName: b, devices: [{name: d}],"), "a:NoDevices",
		},
		"incomplete": {slice("s", "a", 1, 2, "nodeName: a, devices: [{name: d}],"),
			"a:TooFewDevices+PoolIncomplete"},
		"older generation is passed over": {slice("s", "a", 1,
			1, "nodeName: a, devices: [{name: old}],") +
			slice("t", "a", 2, 1, "nodeName: a, devices: [{name: new}],"),
			"a nic=new"},
		"device twice": {slice("s", "a", 1, 2, "nodeName: a, devices: [{name: d}],") +
			slice("t", "a", 1, 2, "nodeName: a, devices: [{name: d}],"),
			"a:TooFewDevices+PoolInvalid"},
		"counter that is not there": {slice("s", "a", 1, 1, "nodeName: a, devices: [{name: d, "+
			"consumesCounters: [{counterSet: x, counters: {y: {value: 1}}}]}],"),
			"a:TooFewDevices+PoolInvalid"},
		"for all nodes": {
			slice("s", "fabric", 1, 1, "allNodes: true, devices: [{name: d}],"), "a nic=d",
		},
		"for nodes of a rack": {
			slice("s", "rack", 1, 1, "nodeSelector: {nodeSelectorTerms: [{matchExpressions: "+
				"[{key: rack, operator: In, values: [one]}]}]}, devices: [{name: d}],"), "a nic=d",
		},
		"for all nodes, incomplete": {
			slice("s", "fabric", 1, 2, "allNodes: true, devices: [{name: d}],"),
			"a:TooFewDevices+PoolIncomplete",
		},
		"for nodes of a rack, incomplete": {
			slice("s", "rack", 1, 2, "nodeSelector: {nodeSelectorTerms: [{matchExpressions: "+
				"[{key: rack, operator: In, values: [one]}]}]}, devices: [{name: d}],"),
			"a:TooFewDevices+PoolIncomplete",
		},
		"for nodes of another rack": {
			slice("s", "rack", 1, 1, "nodeSelector: {nodeSelectorTerms: [{matchExpressions: "+
				"[{key: rack, operator: In, values: [two]}]}]}, devices: [{name: d}],"),
			"a:NoDevices",
		},
		"for each device another node": {slice("s", "fabric", 1, 1, "perDeviceNodeSelection: "+
			"true, devices: [{name: d, nodeName: b}, {name: e, nodeName: a}],"),
			"a nic=e"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := summary(decide(t, "", base+tt.slices)[0]); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

// TestImpossibleWithLists checks what is proved about attributes with several values before the
// allocator searches (KEP-5491).
func TestImpossibleWithLists(t *testing.T) {
	const lists = "DRAListTypeAttributes=true"
	device := func(name, value string) string {
		return fmt.Sprintf("{name: %s, attributes: {example.com/root: %s}}", name, value)
	}
	for name, tt := range map[string]struct {
		gates, devices, constraint, want string
	}{
		"a value of two lists": {
			lists, device("a", "{strings: [r1, r2]}") +
				"," + device("b", "{strings: [r3, r2]}"),
			"matchAttribute: example.com/root", "",
		},
		"a value and a list": {
			lists, device("a", "{int: 1}") +
				"," + device("b", "{ints: [0, 1]}"),
			"matchAttribute: example.com/root", "",
		},
		"no common value": {
			lists, device("a", "{strings: [r1, r2]}") +
				"," + device("b", "{strings: [r3]}"),
			"matchAttribute: example.com/root",
			`needs 2 devices with the same value, and can have at most 1, with "r1"`,
		},
		"another type": {
			lists, device("a", "{strings: [1.0.0]}") +
				"," + device("b", "{versions: [1.0.0]}"),
			"matchAttribute: example.com/root",
			`needs 2 devices with the same value, and can have at most 1, with "1.0.0"`,
		},
		"lists without a common value": {
			lists, device("a", "{bools: [true]}") +
				"," + device("b", "{bools: [false]}"),
			"distinctAttribute: example.com/root", "",
		},
		"two values that are the same": {
			lists, device("a", "{ints: [1, 1]}") +
				"," + device("b", "{int: 1}"),
			"distinctAttribute: example.com/root",
			"needs 2 devices with different values, and can have 1; the values are 1",
		},
		// The allocator ignores the lists then.
		"lists, which the scheduler does not know": {
			"", device("a", "{strings: [r1]}") +
				"," + device("b", "{strings: [r1]}"),
			"matchAttribute: example.com/root",
			"needs 2 devices with the same value, and can have at most 1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			objects := `apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: a}}
- {apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: nic}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c, namespace: default}, spec: {devices: {constraints: [{` + tt.constraint + `}], requests: [{name: nic, exactly: {deviceClassName: nic, count: 2, allocationMode: ExactCount}}]}}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: a}, spec: {driver: x.example.com, nodeName: a, pool: {name: a, resourceSliceCount: 1}, devices: [` + tt.devices + `]}}
`
			s := newScheduler(t, tt.gates, snapshotOf(t, objects))
			claims := []*resourceapi.ResourceClaim{s.claims[objectName{"default", "c"}]}
			reasons := s.survey(t.Context(), s.nodes[0], claims).impossible()
			if len(reasons) == 0 != (tt.want == "") {
				t.Fatalf("got %+v, want %q", reasons, tt.want)
			}
			if tt.want != "" && !strings.Contains(reasons[0].Message, tt.want) {
				t.Errorf("got %q, want %q", reasons[0].Message, tt.want)
			}

			d := decide(t, tt.gates, objects+pod("p", fmt.Sprintf(byName, "c"), ""))[0]
			if (d.Node != "") != (tt.want == "") {
				t.Errorf("the pod is on node %q", d.Node)
			}
		})
	}
}

func TestScheduleStops(t *testing.T) {
	s := newScheduler(t, "", &snapshot.Snapshot{Nodes: []*corev1.Node{{}}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Schedule(ctx, &corev1.Pod{}); err == nil {
		t.Error("no error, though the context has ended")
	}
}

func TestFeatures(t *testing.T) {
	for _, tt := range []struct {
		version, gates string
		want           string
	}{
		{"1.34", "", "DRAAdminAccess DRAPrioritizedList"},
		{"v1.36.3", "", "DRAAdminAccess DRAConsumableCapacity " +
			"DRADeviceBindingConditions+DRAResourceClaimDeviceStatus DRADeviceTaints " +
			"DRAPartitionableDevices DRAPrioritizedList extended"},
		{"1.37", "DRAConsumableCapacity=false", "DRAAdminAccess " +
			"DRADeviceBindingConditions+DRAResourceClaimDeviceStatus DRADeviceTaints " +
			"DRAPartitionableDevices DRAPrioritizedList extended rules"},
		{"1.40", "DRAListTypeAttributes=true", "DRAAdminAccess DRAConsumableCapacity " +
			"DRADeviceBindingConditions+DRAResourceClaimDeviceStatus DRADeviceTaints " +
			"DRAListTypeAttributes DRAPartitionableDevices DRAPrioritizedList extended rules"},
		{"v1.38.0-beta.0", "", "DRAAdminAccess DRAConsumableCapacity " +
			"DRADeviceBindingConditions+DRAResourceClaimDeviceStatus DRADeviceTaints " +
			"DRAPartitionableDevices DRAPrioritizedList extended rules"},
		{"1.34", "DRADeviceTaints=true", "DRAAdminAccess DRADeviceTaints DRAPrioritizedList rules"},
	} {
		features, err := NewFeatures(tt.version, tt.gates)
		if err != nil {
			t.Errorf("%s %s: %v", tt.version, tt.gates, err)
			continue
		}

		got := slices.Sorted(slices.Values(features.Allocator.Set().UnsortedList()))
		if features.ExtendedResources {
			got = append(got, "extended")
		}

		if features.TaintRules {
			got = append(got, "rules")
		}
		unknown := tt.version == "1.40" || tt.version == "v1.38.0-beta.0"
		if unknown != (features.Unknown == tt.version) ||
			unknown != strings.Contains(features.Note(), "Kubernetes "+tt.version+" is newer") {
			t.Errorf("%s: unknown %q, note %q", tt.version, features.Unknown, features.Note())
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s %s:\ngot  %s\nwant %s", tt.version, tt.gates,
				strings.Join(got, " "), tt.want)
		}
	}
	for _, tt := range []struct{ version, gates, want string }{
		{"1.33", "", "the oldest is 1.34"}, {"new", "", "must be like 1.37"},
		{"1.37", "Other=true", "unrecognized feature gate: Other; those that change"},
		{"1.37", "DRADeviceTaints", "missing bool value"},
	} {
		if _, err := NewFeatures(tt.version, tt.gates); err == nil ||
			!strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %s: %v, want %q", tt.version, tt.gates, err, tt.want)
		}
	}
}

func TestReads(t *testing.T) {
	for expression, want := range map[string]string{
		`device.driver == "a"`:          "[]",
		`device.attributes["d"].a == 1`: "[the attribute d/a]",
		`has(device.attributes["d"].a)`: "[the attribute d/a]",
		`device.attributes["d"]["a"] && device.attributes["d"].?b.orValue(false)`: "[the attribute d/a the attribute d/b]",
		`device.capacity["d"].c.compareTo(quantity("1")) > 0`:                     "[the capacity d/c]",
		`"a" in device.attributes["d"]`:                                           "[]",
		`other.attributes["d"].a`:                                                 "[]",
		`no ( expression`:                                                         "[]",
	} {
		if got := fmt.Sprint(reads(expression)); got != want {
			t.Errorf("%s: %s, want %s", expression, got, want)
		}
	}
}

// TestRefusals checks that only nodes that refuse for equal reasons are grouped.
func TestRefusals(t *testing.T) {
	base := Reason{
		Code: TooFewDevices, Claim: "c", Request: "nic", Message: "there are too few devices",
		Causes: []Cause{{Code: InUse, Devices: 2, Message: "are in use"}},
	}
	for name, test := range map[string]struct {
		change func(*Reason)
		same   bool
	}{
		"equal":           {func(*Reason) {}, true},
		"another code":    {func(r *Reason) { r.Code = NoDevices }, false},
		"another claim":   {func(r *Reason) { r.Claim = "d" }, false},
		"another request": {func(r *Reason) { r.Request = "second" }, false},
		"another message": {func(r *Reason) { r.Message = "there are no devices" }, false},
		"another cause": {func(r *Reason) {
			r.Causes = []Cause{{Code: InUse, Devices: 3, Message: "are in use"}}
		}, false},
		"no cause": {func(r *Reason) { r.Causes = nil }, false},
	} {
		other := base
		test.change(&other)
		var nodes []*nodeState
		for _, name := range []string{"a", "b", "c"} {
			nodes = append(nodes, &nodeState{Node: &corev1.Node{}})
			nodes[len(nodes)-1].Name = name
		}

		var got []string
		for _, r := range refusals(nodes, []answer{
			{reasons: []Reason{base}}, {}, {reasons: []Reason{other}},
		}) {
			got = append(got, strings.Join(r.Nodes, ","))
		}
		want := []string{"a", "c"}
		if test.same {
			want = []string{"a,c"}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: the nodes are grouped as %q, want %q", name, got, want)
		}
	}
}

// slowAllocator finds its result only if it may search as long as it takes.
type slowAllocator struct {
	takes  time.Duration
	result []resourceapi.AllocationResult
}

func (a slowAllocator) Allocate(
	ctx context.Context, _ *corev1.Node, _ []*resourceapi.ResourceClaim,
) ([]resourceapi.AllocationResult, error) {
	select {
	case <-ctx.Done():
		return nil, fmt.Errorf("allocate: %w", ctx.Err())
	case <-time.After(a.takes):
		return a.result, nil
	}
}

// TestLongSearch checks that a node is not refused because the first, short search has ended.
func TestLongSearch(t *testing.T) {
	found := []resourceapi.AllocationResult{{}}
	for name, test := range map[string]struct {
		allocator slowAllocator
		devices   string // of the node
		want      string // codes of the reasons; "" if the result is returned
		takes     time.Duration
	}{
		"found at once": {slowAllocator{0, found}, "[{name: d}]", "", 0},
		"found in the long search": {
			slowAllocator{time.Second, found}, "[{name: d}]", "", searchPatience + time.Second,
		},
		"not found within the time": {
			slowAllocator{time.Hour, found}, "[{name: d}]", "SearchEnded",
			searchPatience + searchTimeout,
		},
		"impossible": {
			slowAllocator{time.Hour, found}, "[]", "TooFewDevices", searchPatience,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, "", snapshotOf(t, `apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: a}}
- {apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: nic}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic, count: 1, allocationMode: ExactCount}}]}}}
- {apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: a}, spec: {driver: x.example.com, nodeName: a, pool: {name: a, resourceSliceCount: 1}, devices: `+test.devices+`}}
`))
			var claims []*resourceapi.ResourceClaim
			for _, claim := range s.claims {
				claims = append(claims, claim)
			}

			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				a := &attempt{scheduler: s, allocator: test.allocator}
				got, reasons, err := a.allocate(t.Context(), s.nodes[0], claims)
				if err != nil || (len(got) == 1) != (test.want == "") {
					t.Errorf("%d allocations, error %v", len(got), err)
				}
				if took := time.Since(begin); took != test.takes {
					t.Errorf("took %s, want %s", took, test.takes)
				}

				var codes []string
				for _, r := range reasons {
					codes = append(codes, string(r.Code))
				}
				if strings.Join(codes, "+") != test.want {
					t.Errorf("refused for %q, want %q", codes, test.want)
				}
			})
		})
	}
}
