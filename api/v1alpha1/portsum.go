// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"math"

	"k8s.io/utils/ptr"
)

// PortSum is what XPUPorts cost together, for quotas. The zero value is no XPUPorts.
type PortSum struct {
	Ports int
	// Guaranteed and Maximum are the sums of the rates, in Mbit/s. It takes 2^32 XPUPorts with the
	// highest rate for a sum that does not fit; it is [math.MaxInt64] then. XPUPorts without a
	// maximum add nothing to Maximum.
	Guaranteed, Maximum int64
	// Unlimited is how many of the XPUPorts have no maximum.
	Unlimited int
}

// CostOf returns what one XPUPort costs.
func CostOf(port *XPUPort) PortSum {
	rate := ptr.Deref(port.Spec.Rate, PortRate{})
	sum := PortSum{
		Ports: 1, Guaranteed: int64(max(0, rate.Guaranteed)), Maximum: int64(max(0, rate.Maximum)),
	}
	if sum.Maximum == 0 {
		sum.Unlimited = 1
	}
	return sum
}

// Plus returns the sum with what others cost.
func (s PortSum) Plus(other PortSum) PortSum {
	return PortSum{
		Ports:      s.Ports + other.Ports,
		Guaranteed: saturated(s.Guaranteed, other.Guaranteed),
		Maximum:    saturated(s.Maximum, other.Maximum),
		Unlimited:  s.Unlimited + other.Unlimited,
	}
}

// Minus returns the sum without what one of its XPUPorts costs.
func (s PortSum) Minus(one PortSum) PortSum {
	return PortSum{
		Ports:      s.Ports - one.Ports,
		Guaranteed: s.Guaranteed - one.Guaranteed,
		Maximum:    s.Maximum - one.Maximum,
		Unlimited:  s.Unlimited - one.Unlimited,
	}
}

// saturated returns the sum of two numbers that are not negative, or the largest number there is.
func saturated(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
