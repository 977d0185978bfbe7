// SPDX-License-Identifier: Apache-2.0

// Package ports admits XPUPorts to their networks and has OPI agents serve them.
//
// Admission decides whether a Port may join its network and which addresses it gets. Serving has
// the agent create or delete the port. A comparison with what each agent has repairs what changed
// there, and deletes ports and networks that no object wants.
package ports
