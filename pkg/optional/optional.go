// SPDX-License-Identifier: Apache-2.0

// Package optional computes with numbers of which 0 means that there is no number, such as an MTU
// that is not set.
package optional

// Min returns the smaller of two numbers that are not negative. It returns 0 only if both are 0.
func Min[T ~int | ~int32 | ~int64](a, b T) T {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// Max returns the larger of two numbers that are not negative. It returns 0 if one of them is 0,
// because the number that is missing may be larger.
func Max[T ~int | ~int32 | ~int64](a, b T) T {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}
