// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// agents creates a Service of OPI agents.
func (c *cluster) agents(name string, annotations map[string]string) {
	c.Helper()
	c.create(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.namespace, Name: name, Labels: map[string]string{v1alpha1.LabelAgents: ""},
			Annotations: annotations,
		},
		Spec: corev1.ServiceSpec{
			ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 50151}},
		},
	})
}

// endpoint is what Kubernetes makes of a pod of the Service on a node.
func (c *cluster) endpoint(service, node, address string, ready bool) *discoveryv1.EndpointSlice {
	c.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.namespace, GenerateName: service + "-",
			Labels: map[string]string{
				discoveryv1.LabelServiceName: service, v1alpha1.LabelAgents: "",
			},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Port: ptr.To[int32](50151)}},
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{address}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		}},
	}

	c.create(slice)
	return slice
}

// registeredAt waits until there is an XPU with this endpoint.
func (c *cluster) registeredAt(name, endpoint string) *v1alpha1.XPU {
	c.Helper()
	xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: name}}
	c.eventually(fmt.Sprintf("XPU %s is at %s", name, endpoint), func() error {
		if err := c.get(xpu); err != nil {
			return err
		}
		if xpu.Spec.Endpoint != endpoint {
			return fmt.Errorf("it is at %s", xpu.Spec.Endpoint)
		}
		return nil
	})

	return xpu
}

// TestRegistration: nobody types the XPUs of agents that are pods. The API server takes no loopback
// addresses for endpoints, so that none of these answers.
func TestRegistration(t *testing.T) {
	c := newCluster(t, nil)
	c.agents("dpus", map[string]string{v1alpha1.AnnotationInsecure: "true"})
	slice := c.endpoint("dpus", "dpu-1", "192.0.2.1", true)
	xpu := c.registeredAt("dpu-1", "192.0.2.1:50151")
	if !xpu.Spec.Insecure || xpu.Spec.TLS != nil || xpu.Spec.NodeName != "" {
		t.Errorf("spec %+v", xpu.Spec)
	}

	t.Run("another address", func(t *testing.T) {
		c.endpoint("dpus", "dpu-1", "192.0.2.9", false) // it is not ready
		c.endpoint("dpus", "dpu-1", "192.0.2.2", true)
		c.delete(slice)
		c.registeredAt("dpu-1", "192.0.2.2:50151")
	})

	t.Run("changed by hand", func(t *testing.T) {
		xpu := c.registeredAt("dpu-1", "192.0.2.2:50151")
		before := xpu.DeepCopy()
		xpu.Spec.Endpoint = "10.0.0.1:50151"
		if err := c.Patch(t.Context(), xpu, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
		c.registeredAt("dpu-1", "192.0.2.2:50151")
	})

	t.Run("written by hand", func(t *testing.T) {
		c.xpuOn("elsewhere", "dpu-2", "10.0.0.2:50151")
		c.endpoint("dpus", "dpu-2", "192.0.2.3", true)
		c.endpoint("dpus", "dpu-3", "192.0.2.4", true)
		c.registeredAt("dpu-3", "192.0.2.4:50151") // which comes after it
		c.registeredAt("dpu-2", "10.0.0.2:50151")
	})

	t.Run("with TLS", func(t *testing.T) {
		c.agents("careful", map[string]string{
			v1alpha1.AnnotationTLSSecret: "keys", v1alpha1.AnnotationServerName: "opi-bridge",
		})
		c.endpoint("careful", "dpu-4", "192.0.2.5", true)
		xpu := c.registeredAt("dpu-4", "192.0.2.5:50151")
		if want := (v1alpha1.XPUTLS{
			SecretName: "keys", ServerName: "opi-bridge",
		}); xpu.Spec.TLS == nil || *xpu.Spec.TLS != want {
			t.Errorf("spec %+v", xpu.Spec)
		}
	})

	t.Run("an address that another node's agent has now", func(t *testing.T) {
		gone := c.endpoint("dpus", "dpu-5", "192.0.2.6", true)
		c.registeredAt("dpu-5", "192.0.2.6:50151")
		c.delete(gone)
		c.endpoint("dpus", "dpu-6", "192.0.2.6", true)
		c.registeredAt("dpu-6", "192.0.2.6:50151")
		former := c.registeredAt("dpu-5", "") // it would be connected with the other card
		c.xpuReason(former, v1alpha1.ReasonXPUUnavailable, "another node's agent has its address")
		c.endpoint("dpus", "dpu-5", "192.0.2.7", true)
		c.registeredAt("dpu-5", "192.0.2.7:50151")
	})
}
