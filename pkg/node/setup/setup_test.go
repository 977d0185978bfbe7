// SPDX-License-Identifier: Apache-2.0

package setup

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

var sf = function.SubfunctionID("0000:3b:00.0", 88)

// TestWish checks how the pool and the request of the pod determine the setup of a Function.
func TestWish(t *testing.T) {
	made := v1alpha1.DevicePoolSpec{SFs: &v1alpha1.SFSpec{Count: 9, FirstNumber: 80}}
	for _, test := range []struct {
		name   string
		spec   v1alpha1.DevicePoolSpec
		f      function.ID
		driver v1alpha1.FunctionDriver
		want   *journal.Setup
	}{
		{"a VF as it is", made, vf, "", nil},
		{"the last SF that is made", made,
			sf, "", &journal.Setup{SF: true, MAC: "02:00:00:00:00:01"}},
		{"an SF beyond", made, function.SubfunctionID(sf.Address, 89), "", nil},
		{"an SF before", made, function.SubfunctionID(sf.Address, 79), "", nil},
		{"an SF of a pool that makes none", v1alpha1.DevicePoolSpec{}, sf, "", nil},
		{"the pool's driver", v1alpha1.DevicePoolSpec{Driver: "vfio-pci"}, vf, "",
			&journal.Setup{Driver: "vfio-pci"}},
		{"the pod's driver", v1alpha1.DevicePoolSpec{}, vf, "vfio-pci",
			&journal.Setup{Driver: "vfio-pci"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want,
				Wanted(test.spec, test.f, test.driver, "02:00:00:00:00:01")); diff != "" {
				t.Errorf("wish (-want +got):\n%s", diff)
			}
		})
	}
}

// TestPlanOfSetup checks that a VF gets its driver, and that an SF is made.
func TestPlanOfSetup(t *testing.T) {
	runner := Runner{Drivers: newHost(t).drivers()}
	for _, test := range []struct {
		id         function.ID
		wish, want *journal.Setup
	}{
		{vf, &journal.Setup{Driver: "vfio-pci"}, &journal.Setup{
			Driver: "vfio-pci", Own: "mlx5_core", RDMA: true, RDMADevices: []string{"mlx5_2"},
			Netdev: &netdev.Snapshot{Name: "eth5"}, BootID: "boot-1",
		}},
		{sf, &journal.Setup{SF: true}, &journal.Setup{SF: true}},
		{sf, &journal.Setup{}, nil},
	} {
		got, err := runner.Plan(t.Context(),
			journal.Attachment{Function: test.id, Setup: test.wish})
		if diff := cmp.Diff(test.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v; setup (-want +got):\n%s", test.id, err, diff)
		}
	}
}

// TestNoDriverForSFs checks that an SF gets no driver, because its address is its PF's, which would
// lose its driver.
func TestNoDriverForSFs(t *testing.T) {
	for _, isMade := range []bool{false, true} {
		runner := Runner{Drivers: newHost(t).drivers()}
		_, err := runner.Plan(t.Context(), journal.Attachment{
			Function: sf, Setup: &journal.Setup{SF: isMade, Driver: "vfio-pci"},
		})
		if err == nil || !strings.Contains(err.Error(), "an SF is no PCI device") {
			t.Errorf("SF that is made %v: error %v, want one that says what an SF is", isMade, err)
		}
	}
}
