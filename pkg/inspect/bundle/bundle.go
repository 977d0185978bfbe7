// SPDX-License-Identifier: Apache-2.0

// Package bundle collects data for a bug report in an archive. Of each kind of objects it includes
// only the fields that help the project, which are listed in kinds.go.
package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// Sources are the sources of the data.
type Sources struct {
	Reader    client.Reader
	Pods      typedcorev1.PodsGetter
	Namespace string // of xpu-agent and xpu-controller
	// Nodes returns the nodes with an agent, and State the state that the agent of a node reports.
	Nodes func(ctx context.Context) ([]string, error)
	State func(ctx context.Context, node string) (*nodestate.State, error)
	// LogLines is how many of the last lines of each log are included.
	LogLines int64
	// Step is called after each step of the collection. It may be nil.
	Step func()
}

// kind is a kind of objects to collect.
type kind struct {
	schema.GroupVersionKind
	// namespace restricts the objects; "" means all namespaces, or a cluster-scoped kind.
	namespace string
	// selects chooses objects; nil means all.
	selects func(*unstructured.Unstructured) bool
}

func (s Sources) kinds() []kind {
	ours := func(name string) kind {
		return kind{GroupVersionKind: v1alpha1.SchemeGroupVersion.WithKind(name)}
	}
	dra := func(name string) schema.GroupVersionKind {
		return schema.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: name}
	}
	core := func(name string) schema.GroupVersionKind {
		return corev1.SchemeGroupVersion.WithKind(name)
	}
	apps := func(name string) schema.GroupVersionKind {
		return schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: name}
	}

	return []kind{
		ours("DevicePool"), ours("XPU"), ours("XPUNetwork"), ours("XPUNode"), ours("XPUPort"),
		ours("XPUTenant"),
		{GroupVersionKind: dra("DeviceClass")}, {GroupVersionKind: dra("ResourceClaim")},
		{GroupVersionKind: dra("ResourceClaimTemplate")},
		{GroupVersionKind: dra("ResourceSlice"), selects: isOurSlice},
		{GroupVersionKind: core("Node")}, {GroupVersionKind: core("Event"),
			selects: isRelevantEvent},
		{GroupVersionKind: core("Pod"), selects: s.isRelevantPod},
		{GroupVersionKind: apps("DaemonSet"), namespace: s.Namespace},
		{GroupVersionKind: apps("Deployment"), namespace: s.Namespace},
		{GroupVersionKind: schema.GroupVersionKind{
			Group: "k8s.cni.cncf.io", Version: "v1", Kind: "NetworkAttachmentDefinition",
		}},
	}
}

// isOurSlice reports whether a ResourceSlice is this driver's.
func isOurSlice(o *unstructured.Unstructured) bool {
	driver, _, _ := unstructured.NestedString(o.Object, "spec", "driver")
	return driver == v1alpha1.GroupName
}

// isRelevantEvent reports whether an event is about a kind that is related to Functions.
func isRelevantEvent(o *unstructured.Unstructured) bool {
	about, _, _ := unstructured.NestedString(o.Object, "involvedObject", "kind")
	return strings.HasPrefix(about, "XPU") || about == "DevicePool" || about == "ResourceClaim" ||
		about == "Pod" || about == "Node"
}

// isRelevantPod reports whether a pod is the product's, or requests claims, networks of Multus, or
// an extended resource with the product's prefix. Resources with another prefix are in no bundle
// unless the pod also names a network, as pods that get their interface by CNI do.
func (s Sources) isRelevantPod(o *unstructured.Unstructured) bool {
	claims, _, _ := unstructured.NestedSlice(o.Object, "spec", "resourceClaims")
	if o.GetNamespace() == s.Namespace || len(claims) > 0 {
		return true
	}
	_, networks := o.GetAnnotations()["k8s.v1.cni.cncf.io/networks"]
	return networks || limitsExtendedResource(o, "containers") ||
		limitsExtendedResource(o, "initContainers")
}

// limitsExtendedResource reports whether a container in this field of a pod's spec has a limit of
// an extended resource with the product's prefix. A request for an extended resource needs a limit.
func limitsExtendedResource(pod *unstructured.Unstructured, field string) bool {
	containers, _, _ := unstructured.NestedSlice(pod.Object, "spec", field)
	for _, container := range containers {
		object, _ := container.(map[string]any)
		limits, _, _ := unstructured.NestedMap(object, "resources", "limits")
		for resource := range limits {
			if strings.HasPrefix(resource, v1alpha1.GroupName+"/") {
				return true
			}
		}
	}
	return false
}

// Result says how much of the data is in an archive.
type Result struct {
	// Read is how many files have data of the cluster.
	Read int
	// Missing are the lines of errors.txt, each about data that could not be read.
	Missing []string
}

// Write writes the archive as a gzipped tar. Data that cannot be read is reported in the file
// errors.txt of the archive and in the result, except for kinds that the cluster does not have, which
// errors.txt alone names. Write returns only errors of writing and of ctx.
func Write(ctx context.Context, to io.Writer, s Sources, now time.Time) (Result, error) {
	if s.Step == nil {
		s.Step = func() {}
	}

	compressed := gzip.NewWriter(to)
	a := &archive{
		Writer: tar.NewWriter(compressed), dir: "xpu-" + now.UTC().Format("20060102-150405"),
		time: now,
	}

	a.add("version.txt", []byte("xpuctl "+version.String()+"\n"))
	for _, collect := range []func(context.Context, *archive){s.objects, s.nodes, s.logs} {
		collect(ctx, a)
		if ctx.Err() != nil {
			return Result{}, ctx.Err()
		}
	}

	a.add("errors.txt", a.problems.Bytes())
	if a.err == nil {
		a.err = a.Close()
	}

	if a.err == nil {
		a.err = compressed.Close()
	}

	return a.result, a.err
}

// archive writes a tar. It keeps the first error.
type archive struct {
	*tar.Writer
	dir      string
	time     time.Time
	problems bytes.Buffer
	result   Result
	err      error
}

func (a *archive) add(name string, content []byte) {
	if a.err != nil {
		return
	}

	header := &tar.Header{
		Name: path.Join(a.dir, name), Mode: 0o600, Size: int64(len(content)), ModTime: a.time,
	}
	if a.err = a.WriteHeader(header); a.err == nil {
		_, a.err = a.Writer.Write(content)
	}
}

// addRead adds data of the cluster.
func (a *archive) addRead(name string, content []byte) {
	a.add(name, content)
	a.result.Read++
}

// problem notes what could not be read.
func (a *archive) problem(what string, err error) {
	line := fmt.Sprintf("%s: %v", what, err)
	fmt.Fprintln(&a.problems, line)
	if !meta.IsNoMatchError(err) {
		a.result.Missing = append(a.result.Missing, line)
	}
}

func (s Sources) objects(ctx context.Context, a *archive) {
	for _, k := range s.kinds() {
		name := "objects/" + strings.ToLower(k.Kind) + ".yaml"
		var all unstructured.UnstructuredList
		all.SetGroupVersionKind(k.GroupVersion().WithKind(k.Kind + "List"))
		if err := s.Reader.List(ctx, &all, client.InNamespace(k.namespace)); err != nil {
			a.problem(name, err)
			continue
		}

		var out bytes.Buffer
		for i := range all.Items {
			o := &all.Items[i]
			if k.selects != nil && !k.selects(o) {
				continue
			}

			text, err := yaml.Marshal(redact(k.Kind, o, s.Namespace))
			if err != nil {
				a.problem(name, err)
				continue
			}

			out.WriteString("---\n")
			out.Write(text)
		}

		a.addRead(name, out.Bytes())
		s.Step()
	}
}

func (s Sources) nodes(ctx context.Context, a *archive) {
	nodes, err := s.Nodes(ctx)
	if err != nil {
		a.problem("nodes", err)
	}

	for _, node := range nodes {
		name := "nodes/" + node + ".json"
		state, err := s.State(ctx, node)
		if err != nil {
			a.problem(name, err)
			continue
		}

		text, err := json.MarshalIndent(redactState(state), "", "  ")
		if err != nil {
			a.problem(name, err)
			continue
		}

		a.addRead(name, text)
		s.Step()
	}
}

// logs adds the logs of the project's running containers and of their previous runs. It omits other
// containers in the same pods.
func (s Sources) logs(ctx context.Context, a *archive) {
	api := s.Pods.Pods(s.Namespace)
	pods, err := api.List(ctx, metav1.ListOptions{LabelSelector: partOf + "=xpu-device-plugin"})
	if err != nil {
		a.problem("logs", err)
		return
	}

	for _, pod := range pods.Items {
		if !isOurPod(&pod, pod.Spec.ServiceAccountName, s.Namespace) {
			continue
		}

		for _, status := range pod.Status.ContainerStatuses {
			if !isOurContainer(status.Name) {
				continue
			}
			s.log(ctx, a, pod.Name, status.Name, false)
			if status.RestartCount > 0 {
				s.log(ctx, a, pod.Name, status.Name, true)
			}
		}

		s.Step()
	}
}

func (s Sources) log(ctx context.Context, a *archive, pod, container string, previous bool) {
	name := "logs/" + pod + "-" + container + ".log"
	if previous {
		name = "logs/" + pod + "-" + container + "-previous.log"
	}

	text, err := s.Pods.Pods(s.Namespace).GetLogs(pod, &corev1.PodLogOptions{
		Container: container, Previous: previous, TailLines: &s.LogLines, Timestamps: true,
	}).DoRaw(ctx)
	if err != nil {
		a.problem(name, err)
		return
	}

	a.addRead(name, redactLog(text))
}
