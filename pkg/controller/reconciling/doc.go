// SPDX-License-Identifier: Apache-2.0

// Package reconciling is what reconcilers share: how they read, write and report, when they try
// again, and how they refuse what an object asks for.
package reconciling
