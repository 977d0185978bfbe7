// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	schedulingcorev1 "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	sigsyaml "sigs.k8s.io/yaml"
)

// maxReplicas bounds the pods of one workload in a file.
const maxReplicas = 10_000

// template is a pod template of a workload. It is decoded strictly, like a Pod.
type template struct{ corev1.PodTemplateSpec }

// UnmarshalJSON rejects unknown fields.
func (t *template) UnmarshalJSON(data []byte) error {
	return sigsyaml.UnmarshalStrict(data, &t.PodTemplateSpec)
}

// job is the part of a Job's spec that says how many pods it has at once.
type job struct {
	Parallelism *int32   `json:"parallelism"`
	Completions *int32   `json:"completions"`
	Template    template `json:"template"`
}

func (j job) pods() int32 {
	parallel := ptr.Deref(j.Parallelism, 1)
	if j.Completions != nil {
		parallel = min(parallel, *j.Completions)
	}
	return parallel
}

// workload has the fields of all kinds of workloads that say which pods they make. Each kind has
// some of them.
type workload struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		job
		Replicas    *int32 `json:"replicas"`
		JobTemplate struct {
			Spec job `json:"spec"`
		} `json:"jobTemplate"`
		ReplicatedJobs []struct {
			Name     string `json:"name"`
			Replicas *int32 `json:"replicas"`
			Template struct {
				Spec job `json:"spec"`
			} `json:"template"`
		} `json:"replicatedJobs"`
		MPIReplicaSpecs map[string]struct {
			Replicas *int32   `json:"replicas"`
			Template template `json:"template"`
		} `json:"mpiReplicaSpecs"`
	} `json:"spec"`
}

// replicas are pods that have a template in common.
type replicas struct {
	name     string // of the pods, without their numbers
	count    int32
	template *corev1.PodTemplateSpec
}

// workloadKinds says which pods the kinds of workloads make.
var workloadKinds = map[schema.GroupKind]func(workload) []replicas{
	{Group: "apps", Kind: "Deployment"}:  workload.replicated,
	{Group: "apps", Kind: "ReplicaSet"}:  workload.replicated,
	{Group: "apps", Kind: "StatefulSet"}: workload.replicated,
	{Group: "apps", Kind: "DaemonSet"}: func(w workload) []replicas {
		return []replicas{{w.Metadata.Name, 1, &w.Spec.Template.PodTemplateSpec}}
	},
	{Group: "batch", Kind: "Job"}: func(w workload) []replicas {
		return []replicas{{w.Metadata.Name, w.Spec.pods(), &w.Spec.Template.PodTemplateSpec}}
	},
	{Group: "batch", Kind: "CronJob"}: func(w workload) []replicas {
		j := w.Spec.JobTemplate.Spec
		return []replicas{{w.Metadata.Name, j.pods(), &j.Template.PodTemplateSpec}}
	},
	{Group: "jobset.x-k8s.io", Kind: "JobSet"}: workload.jobSet,
	{Group: "kubeflow.org", Kind: "MPIJob"}:    workload.mpiJob,
}

func (w workload) replicated() []replicas {
	return []replicas{{
		w.Metadata.Name, ptr.Deref(w.Spec.Replicas, 1), &w.Spec.Template.PodTemplateSpec,
	}}
}

func (w workload) jobSet() (list []replicas) {
	for _, j := range w.Spec.ReplicatedJobs {
		for i := range min(ptr.Deref(j.Replicas, 1), maxReplicas+1) {
			list = append(list, replicas{
				fmt.Sprintf("%s-%s-%d", w.Metadata.Name, j.Name, i), j.Template.Spec.pods(),
				&j.Template.Spec.Template.PodTemplateSpec,
			})
		}
	}
	return list
}

func (w workload) mpiJob() (list []replicas) {
	for _, role := range slices.Sorted(maps.Keys(w.Spec.MPIReplicaSpecs)) {
		of := w.Spec.MPIReplicaSpecs[role]
		list = append(list, replicas{
			w.Metadata.Name + "-" + role, ptr.Deref(of.Replicas, 1), &of.Template.PodTemplateSpec,
		})
	}
	return list
}

// isWorkload reports whether the kind makes pods from a template.
func isWorkload(kind schema.GroupVersionKind) bool {
	return workloadKinds[kind.GroupKind()] != nil
}

// podsOf returns the pods that a workload makes, or one pod for each DaemonSet, in a list.
func podsOf(document []byte, kind schema.GroupVersionKind) (runtime.Object, error) {
	var w workload
	if err := sigsyaml.Unmarshal(document, &w); err != nil {
		return nil, fmt.Errorf("%s: %w", kind.Kind, err)
	}
	w.Metadata.Name = cmp.Or(w.Metadata.Name, strings.TrimSuffix(w.Metadata.GenerateName, "-"))
	if w.Metadata.Name == "" {
		return nil, fmt.Errorf("a %s has no metadata.name", kind.Kind)
	}

	all := &corev1.PodList{}
	for _, of := range workloadKinds[kind.GroupKind()](w) {
		if of.count < 0 || len(all.Items)+int(of.count) > maxReplicas {
			return nil, fmt.Errorf("%s %s: must have 0-%d pods", kind.Kind, w.Metadata.Name,
				maxReplicas)
		}
		for i := range of.count {
			all.Items = append(all.Items, w.pod(kind, of, i))
		}
	}

	return all, nil
}

// pod returns a pod of a workload. Its name has a number, and not the suffix by chance that the
// workload's controller would add.
func (w workload) pod(kind schema.GroupVersionKind, of replicas, number int32) corev1.Pod {
	pod := corev1.Pod{ObjectMeta: of.template.ObjectMeta, Spec: *of.template.Spec.DeepCopy()}
	pod.Namespace = cmp.Or(w.Metadata.Namespace, metav1.NamespaceDefault)
	pod.Name = fmt.Sprintf("%s-%d", of.name, number)
	pod.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Name: w.Metadata.Name,
		Controller: new(true),
	}}
	return pod
}

// PlaceDaemonSets replaces each pod of a DaemonSet that was read from a file by one pod for each
// node that the DaemonSet's controller would make a pod for.
//
// The pods keep the place of the DaemonSet among all pods. notes names the DaemonSets that are for no
// node.
func (s *Snapshot) PlaceDaemonSets() (notes []string, err error) {
	var errs []error
	var order []*corev1.Pod
	for _, pod := range slices.Clone(s.Pods) {
		isTemplate := ofDaemonSet(pod) && pod.Spec.NodeName == "" && pod.UID == ""
		if !isTemplate {
			order = append(order, pod)
			continue
		}

		s.removePod(pod.Namespace, pod.Name)
		placed, err := s.daemonPods(pod)
		errs = append(errs, err)
		for _, one := range placed {
			errs = append(errs, s.Put(one))
		}
		order = append(order, placed...)
		if len(placed) == 0 {
			notes = append(notes, fmt.Sprintf("DaemonSet %s/%s is for none of the nodes", pod.Namespace,
				metav1.GetControllerOf(pod).Name))
		}
	}

	s.Pods = order
	return notes, errors.Join(errs...)
}

// daemonPods returns the pods of a DaemonSet, one for each node that it is for.
func (s *Snapshot) daemonPods(template *corev1.Pod) (pods []*corev1.Pod, err error) {
	template.Spec.Tolerations = append(template.Spec.Tolerations, daemonTolerations()...)
	for _, node := range s.Nodes {
		should, err := shouldRun(template, node)
		if err != nil {
			return nil, fmt.Errorf("pod %s/%s: %w", template.Namespace, template.Name, err)
		}
		if should {
			pods = append(pods, onNode(template, node.Name))
		}
	}
	return pods, nil
}

// shouldRun reports whether the DaemonSet's controller would make a pod for the node.
func shouldRun(pod *corev1.Pod, node *corev1.Node) (bool, error) {
	fits, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	if !fits || err != nil {
		return false, err
	}

	keepsAway := func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }
	_, away := schedulingcorev1.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints,
		pod.Spec.Tolerations, keepsAway, true)
	return !away, nil
}

// onNode returns the DaemonSet's pod for a node, which no other node can take.
func onNode(pod *corev1.Pod, node string) *corev1.Pod {
	pod = pod.DeepCopy()
	controller := metav1.GetControllerOf(pod)
	pod.Name = controller.Name + "-" + node

	only := corev1.NodeSelectorRequirement{
		Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
	}
	required := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{only},
	}}}
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = required

	return pod
}

// daemonTolerations returns what the DaemonSet's controller adds to its pods
// (AddOrUpdateDaemonPodTolerations of k8s.io/kubernetes/pkg/controller/daemon/util).
func daemonTolerations() (list []corev1.Toleration) {
	for key, effect := range map[string]corev1.TaintEffect{
		corev1.TaintNodeNotReady:       corev1.TaintEffectNoExecute,
		corev1.TaintNodeUnreachable:    corev1.TaintEffectNoExecute,
		corev1.TaintNodeDiskPressure:   corev1.TaintEffectNoSchedule,
		corev1.TaintNodeMemoryPressure: corev1.TaintEffectNoSchedule,
		corev1.TaintNodePIDPressure:    corev1.TaintEffectNoSchedule,
		corev1.TaintNodeUnschedulable:  corev1.TaintEffectNoSchedule,
	} {
		list = append(list, corev1.Toleration{
			Key: key, Operator: corev1.TolerationOpExists, Effect: effect,
		})
	}
	return list
}
