// SPDX-License-Identifier: Apache-2.0

package mount

import "testing"

func TestMountedControllers(t *testing.T) {
	const header = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n"
	for given, want := range map[string]string{
		header + "cpu\t1\t47\t1\nhugetlb\t0\t18\t1\npids\t8\t47\t1\n": header +
			"cpu\t1\t47\t1\npids\t8\t47\t1",
		header + "cpu\t0\t47\t1\npids\t0\t47\t1\n": "", // version 2
		"": "",
	} {
		if got := mountedControllers(given); got != want {
			t.Errorf("of %q: %q, want %q", given, got, want)
		}
	}
}
