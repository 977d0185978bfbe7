// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
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
