// Package netdev takes one netdev into a pod's network namespace and brings it back as it was.
//
// It is the netlink side of an Attachment and knows neither Kubernetes nor the journal. Its life is
//
//	Plan (look, touch nothing) -> Attach (move, configure) -> Restore (bring back, undo, verify)
//
// What Plan returns is all that Restore needs, so a caller that writes it down durably before it calls Attach can
// undo an attachment that was interrupted anywhere. Restore is convergent: it may be called in any state and as often
// as needed.
package netdev
