// SPDX-License-Identifier: Apache-2.0

// Package model holds the XPUPorts that the controller's reconcilers work with.
//
// There is one copy of them, [Ports], which one handler of the cache's events updates. Whatever is
// derived from XPUPorts is updated by the same handler, before any reconciler hears of the change.
// A reconciler that is woken by a change therefore finds all that follows from it.
package model
