// SPDX-License-Identifier: Apache-2.0

// Package sessions keeps a session with the OPI agent of each XPU, knows whether the agent answers,
// and wakes reconcilers when that changes.
package sessions
