// SPDX-License-Identifier: Apache-2.0

// Package queue extends the work queue of a controller: requests can be added from sources other
// than an API server, and can be limited per key.
package queue
