// SPDX-License-Identifier: Apache-2.0

// Package claim reads from a ResourceClaim which Functions of this driver were allocated to it, and
// what interface the pod wants on each. It has what the controller and the nodes' agents must
// choose alike: names, MACs, and the XPU of a Function.
package claim
