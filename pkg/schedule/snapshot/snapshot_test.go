// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func reader(t testing.TB, stdin string) *Reader {
	t.Helper()
	r, err := NewReader(strings.NewReader(stdin),
		schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Ignored"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func read(t *testing.T, stdin string) *Snapshot {
	t.Helper()
	s, err := reader(t, stdin).Read("-")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	aPod = `apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  resourceClaims: [{name: nic, resourceClaimName: shared}]
  containers: [{name: c, image: i, resources: {limits: {example.com/nic: 1}}}]
`
	aSlice = `apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: slice}
spec:
  driver: nic.example.com
  nodeName: worker
  pool: {name: worker, resourceSliceCount: 1}
  devices: [{name: vf-0}]
`
	aClaim = `apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: shared}
spec:
  devices:
    requests: [{name: nic, exactly: {deviceClassName: nic, tolerations: [{key: a, effect: NoSchedule}]}}]
`
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"b.yaml":       "# only a comment\n---\n" + aPod + "---\n" + aClaim,
		"a/nodes.json": `{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker"}}]}`,
		"c.yml": aSlice + "---\n---\napiVersion: apps/v1\nkind: ControllerRevision\nmetadata: " +
			"{name: d}\n---\napiVersion: example.com/v1\nkind: Ignored\n",
		"README.md":     "not read",
		"d/config.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n",
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	r := reader(t, "")
	s, err := r.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Nodes) != 1 || len(s.Pods) != 1 || len(s.Slices) != 1 || len(s.Claims) != 1 {
		t.Fatalf("%+v", s)
	}

	pod, request := s.Pods[0], s.Claims[0].Spec.Devices.Requests[0].Exactly
	if quantity := pod.Spec.Containers[0].Resources.Requests["example.com/nic"]; pod.Namespace != "default" || quantity.Value() != 1 {
		t.Errorf("pod is not completed: %+v", pod)
	}
	if request.Count != 1 || request.AllocationMode != resourceapi.DeviceAllocationModeExactCount ||
		request.Tolerations[0].Operator != resourceapi.DeviceTolerationOpEqual {
		t.Errorf("claim is not completed: %+v", request)
	}
	if left := r.Skipped(); !strings.HasSuffix(left, ": 1 ConfigMap, 1 ControllerRevision") {
		t.Errorf("left out: %q", left)
	}
}

func TestReadOlderVersions(t *testing.T) {
	s := read(t, `apiVersion: resource.k8s.io/v1beta1
kind: ResourceSlice
metadata: {name: slice}
spec:
  driver: nic.example.com
  nodeName: worker
  pool: {name: worker, resourceSliceCount: 1}
  devices: [{name: vf-0, basic: {attributes: {index: {int: 0}}}}]
---
apiVersion: resource.k8s.io/v1beta2
kind: DeviceTaintRule
metadata: {name: rule}
spec: {deviceSelector: {pool: worker}, taint: {key: down, effect: NoSchedule}}
---
apiVersion: v1
kind: PodList
items: [{metadata: {name: web}, spec: {containers: [{name: c, image: i}]}}]
`)

	if got := s.Slices[0].Spec.Devices[0].Attributes["index"].IntValue; got == nil || *got != 0 {
		t.Errorf("ResourceSlice %+v", s.Slices[0])
	}
	if len(s.TaintRules) != 1 || *s.TaintRules[0].Spec.DeviceSelector.Pool != "worker" ||
		len(s.Pods) != 1 {
		t.Errorf("%+v", s)
	}
}

func TestReadErrors(t *testing.T) {
	for name, tt := range map[string]struct{ input, want string }{
		"no YAML": {"a: b: c", "document 1: "},
		"no kind": {"a: b", "Object 'Kind' is missing"},
		"unknown field": {
			strings.Replace(aSlice, "driver:", "drivers:", 1), `unknown field "spec.drivers"`,
		},
		"twice": {
			aSlice + "---\n" + aSlice, "document 2: ResourceSlice slice: is there twice",
		},
		"no name": {"apiVersion: v1\nkind: Node\n", "a Node has no metadata.name"},
		"in a List": {"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Node}]",
			"items[0]: a Node has no metadata.name"},
		"no containers": {
			"apiVersion: v1\nkind: Pod\nmetadata: {name: p}",
			"Pod default/p: spec.containers: must have at least one",
		},
		"no claim named": {strings.Replace(aPod, ", resourceClaimName: shared", "", 1),
			"spec.resourceClaims[0]: must name one of"},
		"slice count": {strings.Replace(aSlice, ", resourceSliceCount: 1", "", 1),
			"spec.pool.resourceSliceCount: must be greater than zero"},
		"nowhere": {strings.Replace(aSlice, "  nodeName: worker\n", "", 1),
			"spec: must have exactly one of nodeName"},
		"no device name": {
			strings.Replace(aSlice, "name: vf-0", "", 1), "spec.devices[0].name: must be set",
		},
		"no class": {
			strings.Replace(aClaim, "deviceClassName: nic, ", "", 1), "ResourceClaim " +
				"default/shared: spec.devices.requests[0].exactly.deviceClassName: must be set",
		},
		"both requests": {
			strings.Replace(aClaim, "name: nic, ",
				"name: nic, firstAvailable: [{name: a, deviceClassName: c}], ", 1),
			"requests[0]: must have one of exactly and firstAvailable",
		},
		"unknown mode": {
			strings.Replace(aClaim, "exactly: {", "exactly: {allocationMode: Some, ", 1),
			`allocationMode: is "Some"`,
		},
		"count with all": {
			strings.Replace(aClaim, "exactly: {", "exactly: {allocationMode: All, count: 2, ", 1),
			"count: must not be set with allocationMode All",
		},
		"negative count": {
			strings.Replace(aClaim, "exactly: {", "exactly: {count: -1, ", 1), "count: is -1",
		},
		"constraint of": {
			strings.TrimRight(aClaim, "\n") + "\n    constraints: [{requests: [x], " +
				"matchAttribute: a/b}]\n", `constraints[0].requests: no request is named "x"`,
		},
		"no constraint": {strings.TrimRight(aClaim, "\n") + "\n    constraints: [{}]\n",
			"constraints[0]: must have one of matchAttribute"},
		"selector": {"apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: " +
			"c}\nspec: {selectors: [{}]}\n", "spec.selectors[0].cel.expression: must be set"},
		"effect of taint": {"apiVersion: resource.k8s.io/v1\nkind: DeviceTaintRule\nmetadata: " +
			"{name: c}\nspec: {taint: {key: a, effect: Never}}\n", `spec.taint.effect: is "Never"`},
	} {
		if _, err := reader(t, tt.input).Read("-"); err == nil ||
			!strings.Contains(err.Error(), tt.want) ||
			!strings.HasPrefix(err.Error(), "standard input: document ") {
			t.Errorf("%s: error %v, want %q in it", name, err, tt.want)
		}
	}

	if _, err := reader(t, "").Read("/does/not/exist"); err == nil {
		t.Error("a file that is not there is no error")
	}
	if _, err := reader(t, "").Read(t.TempDir()); err == nil ||
		!strings.Contains(err.Error(), "has no file that ends in .yaml, .yml, .json") {
		t.Errorf("empty directory: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		aPod, aSlice, aClaim, aPod + "---\n" + aClaim,
		`{"kind":"List","apiVersion":"v1","items":[{}]}`, "\x00", "- a",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, input string) {
		s, err := reader(t, input).Read("-")
		if (s == nil) == (err == nil) {
			t.Errorf("%v, %v", s, err)
		}
	})
}

func TestRemove(t *testing.T) {
	objects := `apiVersion: v1
kind: Node
metadata: {name: worker}
---
` + aSlice + "---\n" + aClaim + `status:
  allocation: {devices: {results: [{request: nic, driver: nic.example.com, pool: worker, device: vf-0}]}}
  reservedFor: [{resource: pods, name: web, uid: "1"}]
---
` + strings.Replace(aPod, "spec:\n", "spec:\n  nodeName: worker\n", 1) + `---
apiVersion: v1
kind: Pod
metadata: {name: daemon, ownerReferences: [{apiVersion: apps/v1, kind: DaemonSet, name: d, uid: "2", controller: true}]}
spec: {nodeName: worker, containers: [{name: c, image: i}]}
`

	s := read(t, objects)
	if err := s.Remove("node/worker"); err != nil {
		t.Fatal(err)
	}
	if len(s.Nodes) != 0 || len(s.Slices) != 0 || len(s.Pods) != 1 ||
		s.Pods[0].Spec.NodeName != "" || s.Claims[0].Status.Allocation != nil {
		t.Errorf("after the node is gone: %+v", s)
	}

	for _, reference := range []string{"pod/web", "ResourceClaim/default/shared"} {
		if err := s.Remove(reference); err != nil {
			t.Error(err)
		}
	}

	if len(s.Pods) != 0 || len(s.Claims) != 0 {
		t.Errorf("after pod and claim are gone: %+v", s)
	}

	for reference, want := range map[string]string{
		"node/worker": "there is none of that name", "deployment/d": "the kind must be one of",
		"pod":               "there is none",
		"devicetaintrule/x": "there is none", "deviceclass/x": "there is none",
		"resourceslice/x": "there is none", "resourceclaimtemplate/a/x": "there is none",
	} {
		if err := s.Remove(reference); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", reference, err, want)
		}
	}
}

func TestTaint(t *testing.T) {
	s := read(t, "apiVersion: v1\nkind: Node\nmetadata: {name: worker}\n---\n"+aSlice)
	s.Slices[0].Spec.Pool.Name = "a/b"
	for _, taint := range []string{
		"node=worker:gone=soon:NoExecute",
		"driver=nic.example.com,pool=a/b,device=vf-0:down:NoSchedule",
	} {
		if err := s.Taint(taint); err != nil {
			t.Error(err)
		}
	}

	if got := s.Nodes[0].Spec.Taints; len(got) != 1 ||
		got[0] != (corev1.Taint{Key: "gone", Value: "soon", Effect: corev1.TaintEffectNoExecute}) {
		t.Errorf("node: %+v", got)
	}

	if got := s.TaintRules[0].Spec; *got.DeviceSelector.Driver != testDriver ||
		*got.DeviceSelector.Pool != "a/b" || *got.DeviceSelector.Device != "vf-0" ||
		got.Taint.Key != "down" || got.Taint.Effect != resourceapi.DeviceTaintEffectNoSchedule {
		t.Errorf("devices: %+v", got)
	}

	for taint, want := range map[string]string{
		"node=worker": "must be PLACE:KEY", "node=other:a:NoSchedule": "there is no Node other",
		"node=worker:a:Never":       `effect: is "Never"`,
		"node=worker:=x:NoSchedule": "has no key", "rack=1:a:NoSchedule": `place "rack=1"`,
		"pool=a/b,device=vf-9:a:NoSchedule": "no ResourceSlice has such a device",
		"pool=:a:NoSchedule":                `place "pool="`, "pool=a:b:Never": `effect: is "Never"`,
	} {
		if err := s.Taint(taint); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", taint, err, want)
		}
	}
}

const testDriver = "nic.example.com"

func TestReadInto(t *testing.T) {
	s := read(t, aSlice+"---\n"+aPod)
	if err := reader(t, strings.Replace(aSlice, "vf-0", "vf-1", 1)+"---\n"+
		strings.Replace(aPod, "web", "more", 1)).ReadInto(s, "-"); err != nil {
		t.Fatal(err)
	}
	if len(s.Slices) != 1 || s.Slices[0].Spec.Devices[0].Name != "vf-1" || len(s.Pods) != 2 ||
		s.Pods[1].Name != "more" {
		t.Errorf("%+v", s)
	}
}
