// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"math"
	"testing"
)

// TestPortSum: a sum of rates does not overflow, and a rate that is not known is no rate of 0.
func TestPortSum(t *testing.T) {
	cost := func(rate *PortRate) PortSum {
		return CostOf(&XPUPort{Spec: XPUPortSpec{Rate: rate}})
	}
	for _, test := range []struct {
		a, b, want PortSum
	}{
		{cost(nil), PortSum{}, PortSum{Ports: 1, Unlimited: 1}},
		{cost(&PortRate{Guaranteed: 5}), cost(&PortRate{Guaranteed: 1, Maximum: 7}),
			PortSum{Ports: 2, Guaranteed: 6, Maximum: 7, Unlimited: 1}},
		{cost(&PortRate{Guaranteed: -5, Maximum: -1}), PortSum{}, PortSum{Ports: 1, Unlimited: 1}},
		{PortSum{Maximum: math.MaxInt64 - 1, Guaranteed: math.MaxInt64},
			cost(&PortRate{Guaranteed: 1, Maximum: math.MaxInt32}),
			PortSum{Ports: 1, Maximum: math.MaxInt64, Guaranteed: math.MaxInt64}},
	} {
		if got := test.a.Plus(test.b); got != test.want {
			t.Errorf("%+v + %+v = %+v, want %+v", test.a, test.b, got, test.want)
		}
		if got := test.b.Plus(test.a); got != test.want {
			t.Errorf("%+v + %+v = %+v, want %+v", test.b, test.a, got, test.want)
		}
	}
}
