// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestRoutedNetworks: the VRFs of two tenants are not one, whatever the tenants call them, and the
// copies have what the gateway needs.
func TestRoutedNetworks(t *testing.T) {
	w := newWorld(t)
	w.joins(w.a, nil)
	w.joins(w.b, nil)

	vrfs := map[string]string{}
	for name, s := range map[string]*testCluster{"a": w.a, "b": w.b} {
		for network, vrf := range map[string]string{"plain": "blue", "foreign": "b.blue"} {
			n := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: network}}
			n.Spec.AllowedNamespaces.From = v1alpha1.NamespacesFromAll
			n.Spec.Subnets, n.Spec.Gateways = []string{"10.1.0.0/24"}, []string{"10.1.0.254"}
			n.Spec.Routed = &v1alpha1.RoutedNetwork{VRF: vrf}
			s.create(n)

			copied := &v1alpha1.XPUNetwork{}
			copied.Name = scopedNetwork(name, network)
			w.infra.eventually("network "+copied.Name+" is copied", func() error {
				return w.infra.get(copied)
			})

			spec := copied.Spec
			if spec.Routed == nil || !slices.Equal(spec.Subnets, n.Spec.Subnets) ||
				!slices.Equal(spec.Gateways, n.Spec.Gateways) {
				t.Fatalf("network %s of tenant %s is copied as %+v", network, name, spec)
			}
			if want := name + "." + vrf; spec.Routed.VRF != want {
				t.Errorf("VRF %s, want %s", spec.Routed.VRF, want)
			}
			if other, is := vrfs[spec.Routed.VRF]; is {
				t.Errorf("tenants %s and %s have VRF %s", other, name, spec.Routed.VRF)
			}
			vrfs[spec.Routed.VRF] = name
		}
	}

	w.a.eventually("another gateway is carried over", func() error {
		n := &v1alpha1.XPUNetwork{}
		n.Name = "plain"
		if err := w.a.get(n); err != nil {
			return err
		}
		n.Spec.Gateways = []string{"10.1.0.1"}
		if err := w.a.Update(t.Context(), n); err != nil {
			return err
		}
		copied := &v1alpha1.XPUNetwork{}
		copied.Name = scopedNetwork("a", "plain")
		if err := w.infra.get(copied); err != nil {
			return err
		}
		if !slices.Equal(copied.Spec.Gateways, n.Spec.Gateways) {
			return fmt.Errorf("the copy has gateways %q", copied.Spec.Gateways)
		}
		return nil
	})
}
