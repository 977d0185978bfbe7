// Package controller has the xPUs ready for allocated Functions: its reconcilers turn ResourceClaims into XPUPorts,
// and XPUPorts and XPUNetworks into what OPI agents serve, and take everything back when it is no longer wanted.
//
// Each reconciler converges from whatever it finds, so that any of them may be interrupted at any point. What one
// waits for arrives as an event: a change of an object, or a connection to an OPI agent that came or went.
//
// An XPUPort without a claim is that of a node's agent, which makes and deletes it. It is served as the others are.
//
// An XPUPort is refused for good when it was never up and its Ready condition is False with reason Conflict or
// Failed. It is tried again all the same, but with BeforeBind the node's agent taints the device on seeing that, and
// the claim is then told that the device failed.
package controller
