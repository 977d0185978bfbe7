// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/wire"
)

// Names in the objects of a test.
const (
	requestName   = "nic"   // of the pod's claim, and of the request in it
	interfaceName = "test0" // in the pods
	ordersDir     = "/xpu-test"
	// annotationNetworks and annotationStatus are what Multus reads and writes.
	annotationNetworks = "k8s.v1.cni.cncf.io/networks"
	annotationStatus   = "k8s.v1.cni.cncf.io/network-status"
)

// user is the user of the pods' program: nonroot of distroless images.
const user = 65532

// mostParallel is how many objects are written at once.
const mostParallel = 16

// steps is how many waits of Options.Timeout a test has, with some to spare. A pod ends itself
// after as many, because the test may have been killed.
const steps = 8

func definitionKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: "k8s.cni.cncf.io", Version: "v1",
		Kind: "NetworkAttachmentDefinition"}
}

func (t *Test) labels() map[string]string { return map[string]string{Label: t.run} }

// makeObjects makes the namespace and everything in it.
func (t *Test) makeObjects(ctx context.Context) error {
	var objects []client.Object
	if t.Options.Namespace == "" {
		objects = append(objects, t.namespaceObject())
	}
	for _, n := range t.networks {
		objects = append(objects, t.offer(n.Name))
	}

	for _, o := range objects {
		earlier := t.made
		t.made = true // an answer may get lost
		if err := t.create(ctx, o); err != nil {
			t.made = earlier || !isRefused(err)
			return err
		}
	}

	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(mostParallel)
	for _, p := range t.pods {
		group.Go(func() error {
			p.begin = time.Now()
			return t.create(ctx, t.podObject(p))
		})
	}
	return group.Wait()
}

// isRefused reports whether an error says that the API server has made nothing.
func isRefused(err error) bool {
	return apierrors.IsAlreadyExists(err) || apierrors.IsForbidden(err) ||
		apierrors.IsInvalid(err) || apierrors.IsNotFound(err) || meta.IsNoMatchError(err)
}

func (t *Test) create(ctx context.Context, o client.Object) error {
	o.SetLabels(t.labels())
	if namespace, isNamespace := o.(*corev1.Namespace); isNamespace {
		namespace.Labels["pod-security.kubernetes.io/enforce"] = "restricted"
	} else {
		o.SetNamespace(t.namespace)
	}

	err := t.API.Create(ctx, o)
	if apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("%w: another test runs, or was kept; \"xpuctl test --cleanup\" removes it",
			err)
	}
	if err != nil {
		return fmt.Errorf("make %s: %w", o.GetName(), err)
	}
	return nil
}

func (t *Test) namespaceObject() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: t.namespace}}
}

// offer returns the object by which pods get Functions on a network.
func (t *Test) offer(network string) client.Object {
	if t.Resource != "" {
		return t.definition(network)
	}

	parameters := fmt.Sprintf(
		`{"apiVersion": %q, "kind": "InterfaceConfig", "network": %q, "interfaceName": %q}`,
		v1alpha1.SchemeGroupVersion, network, interfaceName)
	template := &resourceapi.ResourceClaimTemplate{
		Spec: resourceapi.ResourceClaimTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: t.labels()},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{Name: requestName,
					Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: t.Class}}},
				Config: []resourceapi.DeviceClaimConfiguration{{
					DeviceConfiguration: resourceapi.DeviceConfiguration{
						Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: v1alpha1.GroupName,
							Parameters: runtime.RawExtension{Raw: []byte(parameters)}}},
				}},
			}},
		},
	}

	template.Name = offerName(network)
	return template
}

func offerName(network string) string { return "xpu-test-" + network }

// definition returns the NetworkAttachmentDefinition of a network, for Multus.
func (t *Test) definition(network string) client.Object {
	config := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "type": "xpu-cni", "network": %q, `+
		`"ipam": {"type": "xpu"}}`, offerName(network), network)
	definition := &unstructured.Unstructured{Object: map[string]any{
		"spec": map[string]any{"config": config},
	}}
	definition.SetGroupVersionKind(definitionKind())
	definition.SetName(offerName(network))
	definition.SetAnnotations(map[string]string{"k8s.v1.cni.cncf.io/resourceName": t.Resource})
	return definition
}

// podObject returns a pod that answers packets and takes orders. It has no rights at the API
// server, and on its node no more than any pod in a restricted namespace.
func (t *Test) podObject(p *pod) *corev1.Pod {
	o := &corev1.Pod{Spec: corev1.PodSpec{
		RestartPolicy:                 corev1.RestartPolicyNever,
		ActiveDeadlineSeconds:         ptr.To(int64(steps * max(t.Timeout.Seconds(), 1))),
		TerminationGracePeriodSeconds: ptr.To(int64(1)),
		AutomountServiceAccountToken:  ptr.To(false),
		EnableServiceLinks:            ptr.To(false),
		Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		Affinity:                      onNode(p.node),
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To(int64(user)),
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		Volumes:    []corev1.Volume{ordersVolume()},
		Containers: []corev1.Container{t.container(p)},
	}}
	o.Name = p.name
	for _, name := range t.PullSecrets {
		o.Spec.ImagePullSecrets = append(o.Spec.ImagePullSecrets,
			corev1.LocalObjectReference{Name: name})
	}

	if t.Resource != "" {
		selection, _ := json.Marshal([]map[string]string{ // of strings, which cannot fail
			{"name": offerName(p.network), "interface": interfaceName}})
		o.Annotations = map[string]string{annotationNetworks: string(selection)}
		return o
	}

	template := offerName(p.network)
	o.Spec.ResourceClaims = []corev1.PodResourceClaim{
		{Name: requestName, ResourceClaimTemplateName: &template}}
	return o
}

func (t *Test) container(p *pod) corev1.Container {
	c := corev1.Container{
		Name: "probe", Image: t.Image, ImagePullPolicy: corev1.PullIfNotPresent,
		Command: []string{"/xpu-agent", "probe", "--run=" + t.run, "--pod=" + p.name,
			"--network=" + p.network, "--interface=" + interfaceName, "--orders=" + ordersDir},
		VolumeMounts: []corev1.VolumeMount{
			{Name: "orders", MountPath: ordersDir, ReadOnly: true}},
		SecurityContext: &corev1.SecurityContext{
			AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
			Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		},
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("10m"),
				corev1.ResourceMemory: resource.MustParse("32Mi")},
			Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")},
		},
	}

	if t.Resource != "" {
		c.Resources.Limits[corev1.ResourceName(t.Resource)] = resource.MustParse("1")
	} else {
		c.Resources.Claims = []corev1.ResourceClaim{{Name: requestName}}
	}
	return c
}

// ordersVolume shows the annotation as a file. The kubelet updates the file when the annotation
// changes.
func ordersVolume() corev1.Volume {
	return corev1.Volume{Name: "orders", VolumeSource: corev1.VolumeSource{
		DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{
			Path: wire.OrderFile, FieldRef: &corev1.ObjectFieldSelector{
				FieldPath: "metadata.annotations['" + wire.AnnotationOrder + "']"},
		}}},
	}}
}

// onNode returns the affinity to a node by its name. Its label kubernetes.io/hostname may differ.
func onNode(node string) *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField,
					Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
			}},
		},
	}}
}
