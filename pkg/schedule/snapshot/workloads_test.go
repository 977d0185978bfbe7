// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

const podTemplate = "template: {metadata: {labels: {app: x}}, spec: {containers: [{name: c, image: i}]}}"

// TestWorkloads: a workload's pods are made from its template.
func TestWorkloads(t *testing.T) {
	for name, test := range map[string]struct {
		apiVersion, kind, spec string
		want                   string
	}{
		"one replica by default": {"apps/v1", "Deployment", podTemplate, "w-0"},
		"replicas":               {"apps/v1", "StatefulSet", "replicas: 3, " + podTemplate, "w-0 w-1 w-2"},
		"no replicas":            {"apps/v1", "ReplicaSet", "replicas: 0, " + podTemplate, ""},
		"parallel": {"batch/v1", "Job", "parallelism: 4, completions: 2, " + podTemplate,
			"w-0 w-1"},
		"by time": {"batch/v1", "CronJob", "schedule: '* * * * *', jobTemplate: {spec: {" +
			podTemplate + "}}", "w-0"},
		"jobs": {"jobset.x-k8s.io/v1alpha2", "JobSet", "replicatedJobs: [{name: a, replicas: 2, " +
			"template: {spec: {parallelism: 2, " + podTemplate + "}}}]",
			"w-a-0-0 w-a-0-1 w-a-1-0 w-a-1-1"},
		"MPI": {"kubeflow.org/v2beta1", "MPIJob", "mpiReplicaSpecs: {Launcher: {" + podTemplate +
			"}, Worker: {replicas: 2, " + podTemplate + "}}", "w-Launcher-0 w-Worker-0 w-Worker-1"},
	} {
		t.Run(name, func(t *testing.T) {
			s := read(t, manifest(test.apiVersion, test.kind, test.spec))
			var names []string
			for _, pod := range s.Pods {
				if pod.Namespace != "team" || pod.Labels["app"] != "x" ||
					pod.OwnerReferences[0].Kind != test.kind {
					t.Errorf("pod %+v", pod)
				}
				names = append(names, pod.Name)
			}
			if got := strings.Join(names, " "); got != test.want {
				t.Errorf("pods %q, want %q", got, test.want)
			}
		})
	}
}

func manifest(apiVersion, kind, spec string) string {
	return fmt.Sprintf("apiVersion: %s\nkind: %s\nmetadata: {name: w, namespace: team}\nspec: {%s}\n",
		apiVersion, kind, spec)
}

// TestDaemonSet: a DaemonSet has a pod for each node that it is for.
func TestDaemonSet(t *testing.T) {
	const nodes = `apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: a, labels: {xpu: "yes"}}}
- {apiVersion: v1, kind: Node, metadata: {name: b}}
- {apiVersion: v1, kind: Node, metadata: {name: c, labels: {xpu: "yes"}}, spec: {taints: [{key: x, effect: NoSchedule}]}}
- apiVersion: v1
  kind: Node
  metadata: {name: d, labels: {xpu: "yes"}}
  spec: {unschedulable: true, taints: [{key: node.kubernetes.io/unschedulable, effect: NoSchedule}]}
`
	forNodes := func(value string) string {
		return strings.Replace(podTemplate, "containers", "nodeSelector: {xpu: '"+value+
			"'}, containers", 1)
	}
	s := read(t, manifest("apps/v1", "DaemonSet", forNodes("yes"))+"---\n"+
		strings.ReplaceAll(manifest("batch/v1", "Job", podTemplate), "name: w,", "generateName: later-,")+
		"---\n"+nodes)
	notes, err := s.PlaceDaemonSets()
	must.Succeed(t, err)
	var names []string
	for _, pod := range s.Pods {
		names = append(names, pod.Name)
	}
	if want := []string{"w-a", "w-d", "later-0"}; !slices.Equal(names, want) || len(notes) > 0 {
		t.Errorf("pods %q, want %q; notes %q", names, want, notes)
	}

	s = read(t, manifest("apps/v1", "DaemonSet", forNodes("no"))+"---\n"+nodes)
	notes, err = s.PlaceDaemonSets()
	must.Succeed(t, err)
	if want := []string{"DaemonSet team/w is for none of the nodes"}; len(s.Pods) > 0 ||
		!slices.Equal(notes, want) {
		t.Errorf("notes %q, want %q; %d pods", notes, want, len(s.Pods))
	}
}

// TestWorkloadErrors: an error names the workload and the field.
func TestWorkloadErrors(t *testing.T) {
	for spec, want := range map[string]string{
		"replicas: 10001, " + podTemplate:                 "Deployment w: must have 0-10000 pods",
		"replicas: -1, " + podTemplate:                    "Deployment w: must have 0-10000 pods",
		"replicas: 1":                                     "Pod team/w-0: spec.containers: must have at least one",
		strings.Replace(podTemplate, "image", "imaje", 1): `unknown field "imaje"`,
	} {
		r := reader(t, manifest("apps/v1", "Deployment", spec))
		if _, err := r.Read("-"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", spec, err, want)
		}
	}
}
