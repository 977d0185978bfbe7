// SPDX-License-Identifier: Apache-2.0

// Package controller provisions xPUs for allocated Functions. Its reconcilers create XPUPorts for
// ResourceClaims, create XPUPorts and XPUNetworks on OPI agents, and delete all of these when they
// are no longer wanted. A reconciler may be interrupted at any point, because it converges from any
// state. Changes of objects and of connections wake it.
//
// This package has the options, the metrics and the wiring. The reconcilers are in packages below
// it, by what they reconcile. What they share is in the package reconciling.
//
// The node's agent creates and deletes XPUPorts without a claim. The controller admits them to
// their networks and serves them like the others.
//
// An XPUPort that was never up is refused while its Ready condition has reason Conflict or Failed.
// The controller still retries, but with BeforeBind the node's agent taints the device, and then
// the claim gets the condition that the device failed.
package controller
