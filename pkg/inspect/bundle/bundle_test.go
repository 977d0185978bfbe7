// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"path"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/controller-runtime/pkg/client"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// secret is put wherever a secret could be.
const secret = "hunter2"

func pod(namespace, name string, change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
		Annotations: map[string]string{
			corev1.LastAppliedConfigAnnotation: secret, "example.com/token": secret,
			"k8s.v1.cni.cncf.io/networks": "blue",
		}}}

	p.Spec.Containers = []corev1.Container{{
		Name: "main", Command: []string{"serve", secret}, Args: []string{"--password=" + secret},
		Env: []corev1.EnvVar{{Name: "PASSWORD", Value: secret}},
		LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{
			HTTPGet: &corev1.HTTPGetAction{
				HTTPHeaders: []corev1.HTTPHeader{{Name: "Authorization", Value: secret}},
			},
		}},
		ReadinessProbe: &corev1.Probe{
			ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{secret}}},
		},
	}}

	if change != nil {
		change(p)
	}

	return p
}

// archived writes an archive of the objects and returns its files.
func archived(t *testing.T, objects ...client.Object) map[string]string {
	t.Helper()
	scheme := runtime.NewScheme()
	builder := runtime.NewSchemeBuilder(corev1.AddToScheme, resourceapi.AddToScheme,
		v1alpha1.AddToScheme)
	if err := builder.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}

	for _, gvk := range []schema.GroupVersionKind{
		{Group: "apps", Version: "v1", Kind: "DaemonSet"},
		{Group: "apps", Version: "v1", Kind: "Deployment"},
	} {
		scheme.AddKnownTypeWithName(gvk.GroupVersion().WithKind(gvk.Kind+"List"),
			&unstructured.UnstructuredList{})
	}

	agent := pod("xpu-system", "xpu-agent-1", func(p *corev1.Pod) {
		own(p, "xpu-agent")
		p.Status.ContainerStatuses = []corev1.ContainerStatus{
			{Name: "xpu-agent", RestartCount: 1}, {Name: "istio-proxy"},
		}
	})

	return written(t, Sources{
		Reader:    fakeclient.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build(),
		Pods:      fake.NewClientset(agent).CoreV1(),
		Namespace: "xpu-system",
		Nodes: func(context.Context) ([]string, error) {
			return []string{
				"node1", "node2",
			}, nil
		},
		State: func(_ context.Context, node string) (*nodestate.State, error) {
			if node == "node2" {
				return nil, errors.New("no pod of xpu-agent runs there")
			}
			return &nodestate.State{Node: node}, nil
		},
		LogLines: 10,
	})
}

// written writes an archive of the sources and returns its files.
func written(t *testing.T, s Sources) map[string]string {
	t.Helper()
	var out bytes.Buffer
	if _, err := Write(t.Context(), &out, s, time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}

	compressed, err := gzip.NewReader(&out)
	if err != nil {
		t.Fatal(err)
	}

	files := map[string]string{}
	for reader := tar.NewReader(compressed); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}

		content, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		if dir := path.Dir(header.Name); !strings.HasPrefix(dir, "xpu-19700101-000000") {
			t.Errorf("%s is not below the archive's own directory", header.Name)
		}

		_, name, _ := strings.Cut(header.Name, "/")
		files[name] = string(content)
	}
}

func TestBundle(t *testing.T) {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"},
	}
	for _, driver := range []string{v1alpha1.GroupName, "gpu.example.com"} {
		claim.Spec.Devices.Config = append(claim.Spec.Devices.Config,
			resourceapi.DeviceClaimConfiguration{
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: driver,
					Parameters: runtime.RawExtension{
						Raw: []byte(`{"of": "` + driver + `", "network": "` + map[bool]string{
							true: "blue", false: secret,
						}[driver == v1alpha1.GroupName] + `"}`),
					},
				}},
			})
	}

	slice := func(driver string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: driver},
			Spec:       resourceapi.ResourceSliceSpec{Driver: driver},
		}
	}

	files := archived(t,
		pod("default", "web", nil),
		pod("default", "unconcerned", func(p *corev1.Pod) { p.Annotations = nil }),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "xpu-system", Name: "opi-client"},
			StringData: map[string]string{"tls.key": secret}},
		&v1alpha1.XPU{
			ObjectMeta: metav1.ObjectMeta{Name: "xpu-1"},
			Spec:       v1alpha1.XPUSpec{Endpoint: "10.0.0.1:50151"},
		},
		claim, slice(v1alpha1.GroupName), slice("gpu.example.com"),
	)

	for name, text := range files {
		if strings.Contains(text, secret) {
			t.Errorf("%s has a secret:\n%s", name, text)
		}
	}

	for name, want := range map[string]string{
		"version.txt": "xpuctl ", "objects/xpu.yaml": "10.0.0.1:50151",
		"objects/pod.yaml":                        "k8s.v1.cni.cncf.io/networks: blue",
		"objects/resourceclaim.yaml":              "network: blue",
		"objects/resourceslice.yaml":              "driver: xpu.opiproject.org",
		"nodes/node1.json":                        `"node": "node1"`,
		"errors.txt":                              "nodes/node2.json: no pod of xpu-agent runs there",
		"logs/xpu-agent-1-xpu-agent.log":          "fake logs",
		"logs/xpu-agent-1-xpu-agent-previous.log": "fake logs",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s is %q, want %q in it", name, files[name], want)
		}
	}

	for name, not := range map[string]string{
		"objects/pod.yaml": "unconcerned", "objects/resourceslice.yaml": "gpu.example.com",
	} {
		if strings.Contains(files[name], not) {
			t.Errorf("%s has %s", name, not)
		}
	}

	if _, has := files["logs/xpu-agent-1-istio-proxy.log"]; has {
		t.Error("the log of a container of others is in the archive")
	}
	if !strings.Contains(files["errors.txt"], "networkattachmentdefinition") &&
		files["objects/networkattachmentdefinition.yaml"] != "" {
		t.Errorf("errors.txt is %q", files["errors.txt"])
	}
}

// own makes a pod one of the project's.
func own(p *corev1.Pod, part string) {
	p.Labels = map[string]string{
		"app.kubernetes.io/part-of": "xpu-device-plugin", "app.kubernetes.io/name": part,
	}
	p.Spec.ServiceAccountName = part
	p.OwnerReferences = []metav1.OwnerReference{
		{Kind: "DaemonSet", Name: part, Controller: new(true)},
	}
}
