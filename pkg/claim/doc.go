// SPDX-License-Identifier: Apache-2.0

// Package claim reads from a ResourceClaim which Functions of this driver are allocated to it, and
// how the pod wants each interface. It also has the choices that controller and agents must make
// alike: names, MAC addresses, and the XPU of a Function.
package claim
