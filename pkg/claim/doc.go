// Package claim reads what a ResourceClaim got from this driver: which Functions were allocated to it, where they
// are, and what interface the pod wants on each. The controller and the node agents read claims with the same
// code, so they cannot disagree. So it is with what both must choose alike: names, MACs, and the XPU of a Function.
package claim
