// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestMTU: an interface has no larger MTU than the network carries.
func TestMTU(t *testing.T) {
	for _, test := range []struct{ asked, carried, want int }{
		{0, 0, 0}, {1400, 0, 1400}, {0, 1450, 1450}, {1400, 1450, 1400}, {1500, 1450, 1450},
	} {
		port := &v1alpha1.XPUPort{
			Spec:   v1alpha1.XPUPortSpec{MAC: "02:00:00:00:00:01", MTU: int32(test.asked)},
			Status: v1alpha1.XPUPortStatus{MTU: int32(test.carried)},
		}
		for userspace, want := range map[bool]int{false: test.want, true: 0} {
			if got, err := wantedInterface(claim.Device{}, userspace, port); err != nil ||
				got.MTU != want {
				t.Errorf("%+v, userspace %t: MTU %d, %v; want %d", test, userspace,
					got.MTU, err, want)
			}
		}
	}
}

// TestVLANsOfNetworks checks that a pod's VLAN interfaces have what the networks have at the xPU.
func TestVLANsOfNetworks(t *testing.T) {
	device := claim.Device{Networks: []claim.Network{
		{Name: "blue", InterfaceName: "data0"}, {Name: "red"}, {Name: "green", InterfaceName: "data1"},
	}}
	port := &v1alpha1.XPUPort{
		Spec: v1alpha1.XPUPortSpec{MAC: "02:00:00:00:00:01", MTU: 1400},
		Status: v1alpha1.XPUPortStatus{Networks: []v1alpha1.XPUPortNetworkStatus{
			{Name: "red", VLAN: 20},
			{Name: "green", VLAN: 30, MTU: 1300, Addresses: []string{"10.30.0.2/24"}},
			{Name: "blue", VLAN: 10, MTU: 1500},
		}},
	}

	got, err := wantedInterface(device, false, port)
	must.Succeed(t, err)
	want := []function.VLAN{
		{Name: "data0", Tag: 10, MTU: 1400},
		{Name: "data1", Tag: 30, MTU: 1300,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.30.0.2/24")}},
	}
	comparer := cmpopts.EquateComparable(netip.Prefix{})
	if diff := cmp.Diff(want, got.VLANs, comparer); diff != "" {
		t.Errorf("VLANs (-want +got):\n%s", diff)
	}

	if _, err := wantedInterface(device, true, port); err == nil ||
		!strings.Contains(err.Error(), "interfaceName must be absent with a driver") {
		t.Errorf("for a program: error %v", err)
	}

	port.Status.Networks = port.Status.Networks[:2]
	if _, err := wantedInterface(device, false, port); err == nil ||
		!strings.Contains(err.Error(), "does not have the tag of network blue yet") {
		t.Errorf("without a tag: error %v", err)
	}
}
