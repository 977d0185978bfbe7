// SPDX-License-Identifier: Apache-2.0

// Package adversary attacks the control plane from outside, as deployed: an API server with the
// roles and admission policies of deploy/, controllers with the rights of their own ServiceAccount,
// and OPI agents in memory. There is a file for each adversary: another installation at the same
// agent, a hostile agent, a hostile node, and a hostile tenant. Attacks on single packages are
// tested with them.
package adversary
