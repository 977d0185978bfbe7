// SPDX-License-Identifier: Apache-2.0

package function

import "testing"

// TestPassthrough checks that a driver is classified by what the kernel shows, or else by its name
// in all spellings.
func TestPassthrough(t *testing.T) {
	for _, test := range []struct {
		f    Function
		want Passthrough
	}{
		{Function{Driver: "vfio-pci"}, VFIO},
		{Function{Driver: "mlx5_vfio_pci"}, VFIO},
		{Function{Driver: "mlx5-vfio-pci"}, VFIO},
		{Function{Driver: "pds_vfio_pci"}, VFIO},
		{Function{Driver: "virtio_vfio_pci"}, VFIO},
		{Function{Driver: "vendors_own", Passthrough: VFIO}, VFIO},
		{Function{Driver: "uio_pci_generic"}, UIO},
		{Function{Driver: "igb_uio"}, UIO},
		{Function{Driver: "igbvf"}, ""},
		{Function{Driver: "mlx5_core"}, ""},
		{Function{Driver: "iavf"}, ""},
		{Function{}, ""},
	} {
		if got := test.f.HandedBy(); got != test.want {
			t.Errorf("driver %q (%q): handed by %q, want %q", test.f.Driver, test.f.Passthrough,
				got, test.want)
		}
		if got := test.f.Userspace(); got != (test.want != "") {
			t.Errorf("driver %q: userspace %t", test.f.Driver, got)
		}

		if got := test.f.HasDriver("vfio-pci"); got != (test.want == VFIO) {
			t.Errorf("driver %q counts as vfio-pci: %t", test.f.Driver, got)
		}
		if !test.f.HasDriver(test.f.Driver) || test.f.HasDriver("another_vfio_pci") {
			t.Errorf("driver %q: has another driver than its own", test.f.Driver)
		}

		test.f.Netdev = "eth5"
		if test.f.Userspace() {
			t.Errorf("driver %q: a Function with a netdev is for programs", test.f.Driver)
		}
	}
}
