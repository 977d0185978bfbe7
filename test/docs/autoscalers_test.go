// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/generate"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// autoscalersPage says what Kueue and autoscalers need.
const autoscalersPage = "docs/how-to/use-with-autoscalers.md"

// TestCopyOfNode: a pod of an example goes to a node that is a copy, as an autoscaler makes it, if
// and only if it goes to the original, and gets the same devices. The pools of the copy have other
// names, so no class or claim that we ship depends on these.
func TestCopyOfNode(t *testing.T) {
	for _, shape := range []string{"sriov", "sriov-counters", "sriov-ports"} {
		placed := 0
		for _, file := range shippedClaims(t) {
			original := oneNode(t, shape, file)
			node := original.Nodes[0].Name
			copied := oneNode(t, shape, file)
			must.Succeed(t, copied.AddLike(node))
			must.Succeed(t, copied.Remove("node/"+node))

			for i, pod := range slices.Clone(original.Pods) {
				want, got := devicesOf(t, original, pod), devicesOf(t, copied, copied.Pods[i])
				if !slices.Equal(got, want) {
					t.Errorf("%s on %s: pod %s gets %q of a copy, and %q of the original", file, shape,
						pod.Name, got, want)
				}
				placed += len(want)
			}
		}
		if placed < 5 {
			t.Errorf("%s: the examples get %d devices", shape, placed)
		}
	}
}

// shippedClaims returns the examples that have claims.
func shippedClaims(t testing.TB) []string {
	return files(t, func(path string) bool {
		return strings.HasPrefix(path, "examples/") && strings.HasSuffix(path, ".yaml") &&
			strings.Contains(read(t, path), "ResourceClaimTemplate")
	})
}

// oneNode is a cluster of one node, with the pods of a file. Its classes are those of deploy/samples,
// and select the Functions of the node.
func oneNode(t testing.TB, shape, file string) *snapshot.Snapshot {
	t.Helper()
	of, err := generate.Find(shape)
	must.Succeed(t, err)
	cluster, err := generate.Generate(of, generate.Options{Nodes: 1, PFs: 4, VFs: 4})
	must.Succeed(t, err)

	reader, err := snapshot.NewReader(strings.NewReader(""))
	must.Succeed(t, err)
	all, err := reader.Read(filepath.Join(root, "deploy/samples/classes.yaml"),
		filepath.Join(root, file))
	must.Succeed(t, err)
	for _, class := range all.Classes {
		for i := range class.Spec.Selectors {
			cel := class.Spec.Selectors[i].CEL
			cel.Expression = poolOfClass.ReplaceAllString(cel.Expression, `.pool == "fast"`)
		}
	}
	for _, object := range cluster.Objects() {
		must.Succeed(t, all.Put(object))
	}
	return all
}

// poolOfClass matches which DevicePool a class selects.
var poolOfClass = regexp.MustCompile(`\.pool == "[a-z]+"`)

// devicesOf returns the devices that a pod would get, or none if it would stay pending.
func devicesOf(t testing.TB, from *snapshot.Snapshot, pod *corev1.Pod) (devices []string) {
	t.Helper()
	features, err := schedule.NewFeatures(schedule.NewestKubernetes, "")
	must.Succeed(t, err)
	decision, err := schedule.New(t.Context(), from, features).Schedule(t.Context(), pod)
	must.Succeed(t, err)
	for _, c := range decision.Claims {
		if c.Claim.Status.Allocation == nil {
			continue
		}
		for _, result := range c.Claim.Status.Allocation.Devices.Results {
			devices = append(devices, result.Device)
		}
	}
	return devices
}

// TestKueueCounts: the page says of each example whether the oldest Kueue with claims can count it,
// and what it shows itself it can count.
func TestKueueCounts(t *testing.T) {
	page := read(t, autoscalersPage)
	for _, file := range shippedClaims(t) {
		reader, err := snapshot.NewReader(strings.NewReader(""))
		must.Succeed(t, err)
		all, err := reader.Read(filepath.Join(root, file))
		must.Succeed(t, err)

		answer := "yes"
		for _, template := range all.Templates {
			if why := uncounted(template.Spec.Spec.Devices); why != "" {
				answer = "no: " + why
			}
		}
		row := "| [" + filepath.Base(file) + "](../../" + file + ") | " + answer + " |"
		if !strings.Contains(page, row+"\n") {
			t.Errorf("%s lacks the row %s", autoscalersPage, row)
		}
	}
}

// uncounted says what of a claim Kueue 0.14 to 0.17 cannot count: countDevicesPerClass in its
// pkg/dra/claims.go.
func uncounted(devices resourceapi.DeviceClaim) string {
	if len(devices.Constraints) > 0 {
		return "constraints"
	}
	if len(devices.Config) > 0 {
		return "config"
	}
	for _, request := range devices.Requests {
		switch exactly := request.Exactly; {
		case exactly == nil:
			return "firstAvailable"
		case len(exactly.Selectors) > 0:
			return "selectors"
		case exactly.AllocationMode == resourceapi.DeviceAllocationModeAll:
			return "allocationMode All"
		}
	}
	return ""
}
