// SPDX-License-Identifier: Apache-2.0

// Package broker copies objects between tenant clusters and the infra cluster that has their xPUs.
//
//	tenant cluster                      infra cluster
//	XPUPort      spec   ------------->  XPUPort      a.default.node1-0000-3b-02-0
//	             status <-------------
//	XPUNetwork   spec   ------------->  XPUNetwork   a.blue, in a segment of tenant a
//	             status <-------------
//	XPUNode      PFs    ------------->  XPUNode      a.node1, by which cards are found
//	XPU          all    <-------------  XPU          of tenant a, once its node is known
//
// The broker runs in the infra cluster, and a tenant has no credentials for it. A copy in the infra
// cluster is named after the tenant and the object, so that objects of two tenants never collide.
// The broker deletes a copy only after the tenant's API server has answered that the object does
// not exist. An unreachable tenant cluster deletes nothing.
//
// A reconciler may be interrupted at any point, and two brokers may run at the same time, because
// every step is idempotent.
package broker
