package journal

import "k8s.io/apimachinery/pkg/types"

// What follows tells whether an attachment belongs to somebody, for a release that must not touch what came after.

// ClaimIs is true for what is allocated to the claim.
func ClaimIs(uid types.UID) func(Attachment) bool {
	return func(a Attachment) bool { return uid != "" && a.Claim.UID == uid }
}

// ContainerIs is true for what the container's CNI request attached, or wanted to attach, as the interface.
func ContainerIs(containerID, ifName string) func(Attachment) bool {
	return func(a Attachment) bool {
		return a.CNI != nil && a.CNI.ContainerID == containerID && a.CNI.IfName == ifName
	}
}
