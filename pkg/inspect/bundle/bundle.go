// SPDX-License-Identifier: Apache-2.0

// Package bundle collects what a bug report needs in an archive: of each kind of objects the
// fields that the project needs to help, listed in kinds.go, and no others.
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// Sources are what is collected from.
type Sources struct {
	Reader    client.Reader
	Clientset kubernetes.Interface
	Namespace string // of xpu-agent and xpu-controller
	// Nodes are those with an agent, and State asks the agent of one.
	Nodes func(ctx context.Context) ([]string, error)
	State func(ctx context.Context, node string) (*nodestate.State, error)
	// LogLines is how many lines of each log are taken, from its end.
	LogLines int64
	// Step is called after each part of the work. It may be nil.
	Step func()
}

// kind is a kind of objects to collect.
type kind struct {
	schema.GroupVersionKind
	// of says which namespaces: "" for all, or no namespaces.
	of string
	// only selects objects; nil takes all.
	only func(*unstructured.Unstructured) bool
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
		{GroupVersionKind: dra("ResourceSlice"), only: ofDriver},
		{GroupVersionKind: core("Node")}, {GroupVersionKind: core("Event"), only: aboutUs},
		{GroupVersionKind: core("Pod"), only: s.concerned},
		{GroupVersionKind: apps("DaemonSet"), of: s.Namespace},
		{GroupVersionKind: apps("Deployment"), of: s.Namespace},
		{GroupVersionKind: schema.GroupVersionKind{
			Group: "k8s.cni.cncf.io", Version: "v1", Kind: "NetworkAttachmentDefinition",
		}},
	}
}

// ofDriver says whether a ResourceSlice is this driver's.
func ofDriver(o *unstructured.Unstructured) bool {
	driver, _, _ := unstructured.NestedString(o.Object, "spec", "driver")
	return driver == v1alpha1.GroupName
}

// aboutUs says whether an event is about a kind that has to do with Functions.
func aboutUs(o *unstructured.Unstructured) bool {
	about, _, _ := unstructured.NestedString(o.Object, "involvedObject", "kind")
	return strings.HasPrefix(about, "XPU") || about == "DevicePool" || about == "ResourceClaim" ||
		about == "Pod" || about == "Node"
}

// concerned says whether a pod is of the product, or asks for claims or one of its resources.
func (s Sources) concerned(o *unstructured.Unstructured) bool {
	claims, _, _ := unstructured.NestedSlice(o.Object, "spec", "resourceClaims")
	if o.GetNamespace() == s.Namespace || len(claims) > 0 {
		return true
	}
	_, networks := o.GetAnnotations()["k8s.v1.cni.cncf.io/networks"]
	return networks
}

// Write writes the archive, a tar in gzip. What cannot be read is told in its file errors.txt; the
// error is about the writing, or of ctx.
func Write(ctx context.Context, to io.Writer, s Sources, now time.Time) error {
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
			return ctx.Err()
		}
	}

	a.add("errors.txt", a.problems.Bytes())
	if a.err == nil {
		a.err = a.Close()
	}

	if a.err == nil {
		a.err = compressed.Close()
	}

	return a.err
}

// archive is a tar that is written. It keeps the first error.
type archive struct {
	*tar.Writer
	dir      string
	time     time.Time
	problems bytes.Buffer
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

func (a *archive) problem(what string, err error) {
	fmt.Fprintf(&a.problems, "%s: %v\n", what, err)
}

func (s Sources) objects(ctx context.Context, a *archive) {
	for _, k := range s.kinds() {
		name := "objects/" + strings.ToLower(k.Kind) + ".yaml"
		var all unstructured.UnstructuredList
		all.SetGroupVersionKind(k.GroupVersion().WithKind(k.Kind + "List"))
		if err := s.Reader.List(ctx, &all, client.InNamespace(k.of)); err != nil {
			a.problem(name, err)
			continue
		}

		var out bytes.Buffer
		for i := range all.Items {
			o := &all.Items[i]
			if k.only != nil && !k.only(o) {
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

		a.add(name, out.Bytes())
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

		a.add(name, text)
		s.Step()
	}
}

// logs are those of the project's containers that run and of those that ran before. Other
// containers in the same pods are not read.
func (s Sources) logs(ctx context.Context, a *archive) {
	api := s.Clientset.CoreV1().Pods(s.Namespace)
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

	text, err := s.Clientset.CoreV1().Pods(s.Namespace).GetLogs(pod, &corev1.PodLogOptions{
		Container: container, Previous: previous, TailLines: &s.LogLines, Timestamps: true,
	}).DoRaw(ctx)
	if err != nil {
		a.problem(name, err)
		return
	}

	a.add(name, redactLog(text))
}
