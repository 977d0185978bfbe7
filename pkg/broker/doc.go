// SPDX-License-Identifier: Apache-2.0

// Package broker carries what tenant clusters want of xPUs to the infra cluster that has them, and
// what becomes of it back.
//
//	tenant cluster                      infra cluster
//	XPUPort      spec   ------------->  XPUPort      a.default.node1-0000-3b-02-0
//	             status <-------------
//	XPUNetwork   spec   ------------->  XPUNetwork   a.blue, in a segment of tenant a
//	             status <-------------
//	XPUNode      PFs    ------------->  XPUNode      a.node1, by which cards are found
//	XPU          all    <-------------  XPU          of tenant a, once its node is known
//
// The broker runs in the infra cluster, and a tenant has no credentials for it. An object of the
// infra cluster that stands for one of a tenant has the tenant's name before its own, so that
// tenants cannot meet whatever they call their objects. Nothing in the infra cluster is deleted
// because a tenant's cluster cannot be reached: only after it has said that it has no such object.
//
// A reconciler may be interrupted at any point, and two brokers may work at the same time: each
// step is the same whoever does it.
package broker
