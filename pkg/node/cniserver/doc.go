// Package cniserver is the agent's side of the CNI plugin: it takes the requests that the shim passes on over a unix
// socket, or left in the spool while the agent was away, and has Functions provisioned, attached, checked and released
// as they ask.
//
// The journal is the only memory. A request that was interrupted anywhere is made good by the next: a second ADD of the
// same container and interface goes on or returns the first result, a DEL cleans whatever there is.
package cniserver
