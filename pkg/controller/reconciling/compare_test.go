// SPDX-License-Identifier: Apache-2.0

package reconciling

import "testing"

func TestSmaller(t *testing.T) {
	for _, test := range []struct{ a, b, want int32 }{
		{0, 0, 0}, {1500, 0, 1500}, {0, 9000, 9000}, {1500, 9000, 1500}, {9216, 9000, 9000},
	} {
		if got := Smaller(test.a, test.b); got != test.want {
			t.Errorf("Smaller(%d, %d) = %d, want %d", test.a, test.b, got, test.want)
		}
	}
}
