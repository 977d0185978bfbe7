// SPDX-License-Identifier: Apache-2.0

// Package claims creates an XPUPort for every Function that is allocated to a ResourceClaim, and
// reports in the claim's status whether the xPU serves it.
package claims
