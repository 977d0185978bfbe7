// SPDX-License-Identifier: Apache-2.0

package function

// Problem is a reason not to allocate a Function.
type Problem struct {
	Taint   string // key of the device taint
	Message string // a sentence about what happened and what to do
}
