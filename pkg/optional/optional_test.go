// SPDX-License-Identifier: Apache-2.0

package optional_test

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/optional"
)

func TestMax(t *testing.T) {
	for _, test := range []struct{ a, b, want int32 }{
		{0, 0, 0}, {1500, 0, 0}, {0, 9000, 0}, {1500, 9000, 9000}, {9216, 9000, 9216},
	} {
		if got := optional.Max(test.a, test.b); got != test.want {
			t.Errorf("Max(%d, %d) = %d, want %d", test.a, test.b, got, test.want)
		}
	}
}

func TestMin(t *testing.T) {
	for _, test := range []struct{ a, b, want int32 }{
		{0, 0, 0}, {1500, 0, 1500}, {0, 9000, 9000}, {1500, 9000, 1500}, {9216, 9000, 9000},
	} {
		if got := optional.Min(test.a, test.b); got != test.want {
			t.Errorf("Min(%d, %d) = %d, want %d", test.a, test.b, got, test.want)
		}
	}
}
