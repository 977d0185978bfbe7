// SPDX-License-Identifier: Apache-2.0

// Package controller provisions xPUs for allocated Functions. Its reconcilers create XPUPorts for
// ResourceClaims, create XPUPorts and XPUNetworks on OPI agents, and delete all of these when they
// are no longer wanted. A reconciler may be interrupted at any point, as it converges from whatever
// it finds. It is woken by changes of objects and of connections.
//
// The node's agent creates and deletes XPUPorts without a claim; this package serves them like the
// others.
//
// An XPUPort that was never up is refused while its Ready condition has reason Conflict or Failed.
// It is retried all the same, but with BeforeBind the node's agent taints the device, and then the
// claim is told that the device failed.
package controller
