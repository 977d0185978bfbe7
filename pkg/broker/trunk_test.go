// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestTrunk: tagged networks of a tenant have the tenant's names in its cluster, and the tags of the
// infra cluster.
func TestTrunk(t *testing.T) {
	w := newWorld(t)
	w.a.node("node1", "MT-a")
	w.a.network("blue", 10, "10.1.0.0/24")
	w.a.network("red", 20, "10.2.0.0/24")
	w.a.pool("fast", "")
	_, agent := w.xpu("card-a", "a", "MT-a")
	tenant := w.joins(w.a, nil)
	w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonSynced)

	const parameters = `{"apiVersion":%q,"kind":"InterfaceConfig","networks":[{"name":"red"},{"name":"blue"}]}`
	_, port := w.a.claim("nic", "node1", "fast", vf(3), resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: v1alpha1.GroupName, Parameters: runtime.RawExtension{
				Raw: fmt.Appendf(nil, parameters, v1alpha1.SchemeGroupVersion),
			},
		}},
	})
	w.a.portIs(port, v1alpha1.ReasonUp)

	copied := w.copied("a", port)
	if err := w.infra.get(copied); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"red", "blue"} {
		if got, want := copied.Spec.Networks[i].Name, scopedNetwork("a", name); got != want {
			t.Errorf("the copy is in network %s, want %s", got, want)
		}
	}

	tags := map[string]int32{}
	for _, network := range copied.Status.Networks {
		tags[network.Name] = network.VLAN
	}
	want := []v1alpha1.XPUPortNetworkStatus{
		{Name: "red", VLAN: tags[scopedNetwork("a", "red")], Addresses: []string{"10.2.0.2/24"}},
		{Name: "blue", VLAN: tags[scopedNetwork("a", "blue")], Addresses: []string{"10.1.0.2/24"}},
	}
	if diff := cmp.Diff(want, port.Status.Networks); diff != "" || tags[scopedNetwork("a", "red")] < 1000 {
		t.Errorf("tags %v at infra; status.networks (-want +got):\n%s", tags, diff)
	}
	if got := agent.Networks(); len(got) != 2 {
		t.Errorf("the agent has the networks %v", got)
	}
}
