// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	k8sresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestRelevantEvents checks about which kinds a bundle has events.
func TestRelevantEvents(t *testing.T) {
	for kind, want := range map[string]bool{
		"XPU": true, "XPUPort": true, "DevicePool": true, "ResourceClaim": true, "Pod": true,
		"Node": true, "Deployment": false, "ResourceClaimTemplate": false, "": false,
	} {
		event := &unstructured.Unstructured{Object: map[string]any{
			"involvedObject": map[string]any{"kind": kind},
		}}
		if got := isRelevantEvent(event); got != want {
			t.Errorf("an event about kind %q is in the bundle: %t, want %t", kind, got, want)
		}
	}
}

// TestRelevantPods checks which pods a bundle has.
func TestRelevantPods(t *testing.T) {
	claims := func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic"}}
	}
	limits := func(resource corev1.ResourceName) []corev1.Container {
		return []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{resource: k8sresource.MustParse("1")},
		}}}
	}
	for name, test := range map[string]struct {
		namespace string
		change    func(*corev1.Pod)
		want      bool
	}{
		"with an extended resource": {
			namespace: "default", want: true,
			change: func(p *corev1.Pod) { p.Spec.Containers = limits("xpu.opiproject.org/fast") },
		},
		"with an extended resource of an init container": {
			namespace: "default", want: true,
			change: func(p *corev1.Pod) { p.Spec.InitContainers = limits("xpu.opiproject.org/fast") },
		},
		"with the resource of another plugin": {
			namespace: "default",
			change:    func(p *corev1.Pod) { p.Spec.Containers = limits("example.com/gpu") },
		},
		"the product's":          {namespace: "xpu-system", want: true},
		"without a request":      {namespace: "default"},
		"with a claim":           {namespace: "default", change: claims, want: true},
		"the product's, a claim": {namespace: "xpu-system", change: claims, want: true},
		"with a network of Multus": {
			namespace: "default", want: true, change: func(p *corev1.Pod) {
				p.Annotations = map[string]string{"k8s.v1.cni.cncf.io/networks": "blue"}
			},
		},
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: test.namespace, Name: "p"}}
		if test.change != nil {
			test.change(p)
		}

		object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p)
		must.Succeed(t, err)
		s := Sources{Namespace: "xpu-system"}
		if got := s.isRelevantPod(&unstructured.Unstructured{Object: object}); got != test.want {
			t.Errorf("a pod %s is in the bundle: %t, want %t", name, got, test.want)
		}
	}
}

// TestDocuments checks that each object is a YAML document of its own.
func TestDocuments(t *testing.T) {
	files := archived(t,
		&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "xpu-1"}},
		&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "xpu-2"}})
	documents := strings.Split(files["objects/xpu.yaml"], "---\n")
	if len(documents) != 3 || documents[0] != "" || !strings.Contains(documents[1], "xpu-1") ||
		!strings.Contains(documents[2], "xpu-2") {
		t.Errorf("the documents are %q, want one for each XPU", documents)
	}
}

// brokenReader is an API server that lists nothing.
type brokenReader struct{ client.Reader }

func (brokenReader) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return errors.New("the API server is broken")
}

// broken returns sources that fail.
func broken() Sources {
	clientset := fake.NewClientset()
	clientset.PrependReactor("list", "pods",
		func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("the API server is broken")
		})

	return Sources{
		Reader: brokenReader{}, Pods: clientset.CoreV1(),
		Nodes: func(context.Context) ([]string, error) {
			return []string{"node1", "node2"}, errors.New("some nodes are not known")
		},
		State: func(_ context.Context, node string) (*nodestate.State, error) {
			if node == "node2" {
				return &nodestate.State{Time: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, nil
			}
			return nil, errors.New("no pod of xpu-agent runs there")
		},
	}
}

// TestProblems checks that a bundle says of all data that it lacks why, and has no empty file
// instead.
func TestProblems(t *testing.T) {
	files := written(t, broken())
	for _, want := range []string{
		"objects/devicepool.yaml: the API server is broken\n",
		"objects/networkattachmentdefinition.yaml: the API server is broken\n",
		"nodes: some nodes are not known\n",
		"nodes/node1.json: no pod of xpu-agent runs there\n",
		"nodes/node2.json: json: ", // no JSON has a year of five digits
		"logs: the API server is broken\n",
	} {
		if !strings.Contains(files["errors.txt"], want) {
			t.Errorf("%q is not in errors.txt:\n%s", want, files["errors.txt"])
		}
	}

	delete(files, "errors.txt")
	delete(files, "version.txt")
	for name := range files {
		t.Errorf("the bundle has %s, want no file without data", name)
	}
}

// TestResult: the caller learns how much an archive has, and what it lacks. A kind that the cluster
// does not have is no lack.
func TestResult(t *testing.T) {
	got, err := Write(t.Context(), io.Discard, broken(), time.Unix(0, 0))
	must.Succeed(t, err)
	if got.Read != 0 || len(got.Missing) != 20 ||
		got.Missing[0] != "objects/devicepool.yaml: the API server is broken" {
		t.Errorf("%d files were read, and %d lines are missing: %q", got.Read, len(got.Missing),
			got.Missing)
	}

	absent := broken()
	absent.Reader = absentKinds{}
	got, err = Write(t.Context(), io.Discard, absent, time.Unix(0, 0))
	must.Succeed(t, err)
	if len(got.Missing) != 4 || !strings.HasPrefix(got.Missing[0], "nodes: ") {
		t.Errorf("missing: %q", got.Missing)
	}
}

// absentKinds is an API server that has no kind.
type absentKinds struct{ client.Reader }

func (absentKinds) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return &meta.NoKindMatchError{}
}

// limitedWriter fails when more bytes are written than are left.
type limitedWriter struct{ left int }

func (w *limitedWriter) Write(p []byte) (int, error) {
	if w.left -= len(p); w.left < 0 {
		return 0, io.ErrShortWrite
	}
	return len(p), nil
}

// TestUnwritten checks that an incomplete archive is an error, wherever it ends.
func TestUnwritten(t *testing.T) {
	var whole strings.Builder
	_, err := Write(t.Context(), &whole, broken(), time.Unix(0, 0))
	must.Succeed(t, err)
	for left := range whole.Len() {
		_, err := Write(t.Context(), &limitedWriter{left}, broken(), time.Unix(0, 0))
		if !errors.Is(err, io.ErrShortWrite) {
			t.Errorf("after %d of %d bytes: error %v, want %v", left, whole.Len(), err,
				io.ErrShortWrite)
		}
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Write(ctx, io.Discard, broken(), time.Unix(0, 0))
	if !errors.Is(err, ctx.Err()) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}
