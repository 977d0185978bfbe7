// SPDX-License-Identifier: Apache-2.0

// Package queue has what reconcilers need beside the work queue of their controller: to be woken by
// what is no event of an API server, and to take turns.
package queue
