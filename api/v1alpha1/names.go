// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Names that several parts of the system share.
const (
	// ConditionReady is a condition of every kind of this group, and of every device in
	// ResourceClaim.status.devices.
	ConditionReady = "Ready"

	// ConditionCard reports whether the node of an XPU has the PFs that the XPU's OPI agent serves.
	// It is missing if the agent does not report PFs and the spec names the node.
	ConditionCard = "Card"

	// ConditionFunctions is on an XPU some of whose Functions are given up
	// (spec.abandonedFunctions): False (Abandoned).
	ConditionFunctions = "Functions"

	// ConditionVerified is on an XPU whose OPI agent does not report its ports: False
	// (NotReported).
	ConditionVerified = "Verified"

	// ConditionConnected reports whether the cluster of an XPUTenant answers the broker.
	ConditionConnected = "Connected"

	// ConditionSynced reports whether the broker carries over the objects of an XPUTenant's
	// cluster.
	ConditionSynced = "Synced"

	// ConditionWithinLimits, of an XPUTenant, is False while its cluster has more objects than the
	// limits allow.
	ConditionWithinLimits = "WithinLimits"

	// ConditionAdmitted reports whether the network lets the pod of an XPUPort without a claim
	// join.
	ConditionAdmitted = "Admitted"

	// ConditionSupplied reports whether every PF that a DevicePool with numVFs or sfs names has the
	// VFs or SFs.
	ConditionSupplied = "Supplied"
	// ConditionAgentReady, of an XPUNode, reports whether the agent that wrote it runs.
	ConditionAgentReady = "AgentReady"
	// ConditionInventoryVerified, of an XPUNode, reports whether sriovnet, which reads the same
	// kernel by other code, says the same about the node's Functions as the agent's inventory.
	ConditionInventoryVerified = "InventoryVerified"

	// ConditionSupported reports whether the feature gates of Kubernetes that a DevicePool needs
	// are on.
	ConditionSupported = "Supported"

	// ConditionProvisioned is the binding condition of devices in pools with provision: BeforeBind.
	// It means that the xPU serves the Function's Port. The controller sets it in
	// ResourceClaim.status.devices (KEP-5007).
	ConditionProvisioned = GroupName + "/Provisioned"

	// ConditionProvisionFailed is the binding failure condition that belongs to
	// ConditionProvisioned. It makes the scheduler give the device back and allocate again.
	ConditionProvisionFailed = GroupName + "/ProvisionFailed"

	// FinalizerPort keeps an XPUPort until the xPU no longer serves it.
	FinalizerPort = GroupName + "/port"

	// FinalizerNetwork keeps an XPUNetwork until no XPUPort needs it.
	FinalizerNetwork = GroupName + "/network"

	// FinalizerXPU keeps an XPU until it has no XPUPorts.
	FinalizerXPU = GroupName + "/xpu"

	// FinalizerTenant keeps an XPUTenant until all of its objects in the infra cluster that its
	// deletionPolicy deletes are gone.
	FinalizerTenant = GroupName + "/tenant"

	// BrokerLease is the name of the Lease that the broker renews in a tenant cluster, in the
	// namespace of xpu-controller there.
	BrokerLease = "xpu-broker"

	// TaintLinkDown is on devices whose PF has no carrier or is administratively down (effect
	// NoSchedule, or None if the DevicePool says so).
	TaintLinkDown = GroupName + "/link-down"

	// TaintProvisionFailed is on a device for some time after the xPU refused its Port, so that the
	// scheduler tries another device (effect NoSchedule).
	TaintProvisionFailed = GroupName + "/provision-failed"

	// TaintReleasePending is on a device that cannot be allocated because its last attachment could
	// not be undone yet (effect NoSchedule).
	TaintReleasePending = GroupName + "/release-pending"

	// TaintQuarantined is on a device that its last pod did not return in its former state, so that
	// data of that pod might reach the next pod. The agent tries to reset the device from time to
	// time, and "xpuctl release" frees it (effect NoSchedule).
	TaintQuarantined = GroupName + "/quarantined"

	// TaintXPUAway is on devices whose xPU's OPI agent cannot be reached, and on devices that were
	// given up because the OPI agent cannot delete their ports (effect NoSchedule).
	TaintXPUAway = GroupName + "/xpu-away"

	// TaintInUse is on a device that a pod still has by another way of publishing: by the device
	// plugin before its pool was moved to DRA, or by another device plugin. It is also on a device
	// that the host itself uses: its netdev is a port of a bridge, bond, OVS or VRF, has an address
	// or a route, carries a VLAN, macvlan or tunnel, or has an XDP program (effect NoSchedule).
	TaintInUse = GroupName + "/in-use"

	// TaintLost is on a device that was unplugged or reset while a pod had it, and that the pod has
	// not got back (effect NoSchedule, or NoExecute after spec.evictLostAfter of the DevicePool).
	TaintLost = GroupName + "/lost"

	// TaintFault is on devices for which a health reporter of their driver (devlink-health) shows
	// an error from which the driver has not recovered. It is also on devices that no pod could use
	// as they are: without a driver, without a netdev, or with a driver for programs that their
	// pool does not ask for (effect NoSchedule).
	TaintFault = GroupName + "/fault"

	// TaintCordoned is on the devices of a PF in spec.cordons of the XPUNode (effect NoSchedule).
	TaintCordoned = GroupName + "/cordoned"
)

// Reasons of conditions. Each comes with a message that says what to do.
const (
	ReasonUp              = "Up"
	ReasonProvisioning    = "Provisioning"
	ReasonInvalidConfig   = "InvalidConfig"
	ReasonNetworkNotFound = "NetworkNotFound"
	ReasonNetworkNotReady = "NetworkNotReady"
	ReasonNoXPU           = "NoXPU"
	ReasonXPUUnavailable  = "XPUUnavailable"
	ReasonAbandoned       = "Abandoned"
	ReasonConflict        = "Conflict"
	ReasonFailed          = "Failed"
	// the OPI agent has a port, or may have one, and does not report its owner or network
	ReasonUnknown = "Unknown"
	// the network is routed, and the XPU's OPI agent has no gateways
	ReasonNoGateways       = "NoGateways"
	ReasonNoTrunks         = "NoTrunks" // the OPI agent has no ports with tagged networks
	ReasonFunctionBusy     = "FunctionBusy"
	ReasonStandby          = "Standby" // the virtual machine of the XPUPort is being migrated
	ReasonNoFreeAddress    = "NoFreeAddress"
	ReasonForbidden        = "Forbidden"
	ReasonReleasing        = "Releasing"
	ReasonInUse            = "InUse"
	ReasonNoPortNeeded     = "NoPortNeeded"
	ReasonGangIncomplete   = "GangIncomplete" // the claim's Ports are up, others of its gang are not
	ReasonGangFailed       = "GangFailed"     // the claim is given back with its gang
	ReasonSiblingFailed    = "SiblingFailed"  // the claim is given back with another one of its pod
	ReasonAttached         = "Attached"
	ReasonLost             = "Lost"
	ReasonPublished        = "Published"
	ReasonNoFunctions      = "NoFunctions"
	ReasonOverlap          = "Overlap"
	ReasonUnhealthy        = "Unhealthy"
	ReasonRunning          = "Running"   // a pod of the node's agent is ready
	ReasonAgentAway        = "AgentAway" // no agent runs on the node, or on any node of the pool
	ReasonConnected        = "Connected"
	ReasonInvalidTLSSecret = "InvalidTLSSecret"

	// Reasons of the condition Card, which may also have Conflict.

	ReasonFound         = "Found"
	ReasonCardNotFound  = "CardNotFound"  // no node reports the PFs
	ReasonContradiction = "Contradiction" // between spec and cards, or between nodes
	ReasonNotTold       = "NotTold"       // the OPI agent reports no PFs; no spec.nodeName

	// ReasonNotReported is the reason of the condition Verified.
	ReasonNotReported = "NotReported"

	// Reasons for objects of tenant clusters. XPUTenants also have Connected and Conflict.

	ReasonAdmitted   = "Admitted"
	ReasonBrokerAway = "BrokerAway" // no broker of an infra cluster serves this cluster
	// the XPUTenant's maxPorts, maxNodes or range of segments is exhausted
	ReasonQuotaExceeded  = "QuotaExceeded"
	ReasonMemberNotFound = "MemberNotFound" // there are no credentials for the tenant's cluster
	ReasonUnreachable    = "Unreachable"    // the tenant's cluster does not answer
	ReasonUnauthorized   = "Unauthorized"   // the tenant's cluster refuses the credentials
	// the tenant's cluster gives answers that no API server gives
	ReasonInvalidAnswer = "InvalidAnswer"
	// the tenant has more objects, or larger ones, than the limits allow
	ReasonLimitExceeded = "LimitExceeded"
	ReasonWithinLimits  = "WithinLimits" // no object of the tenant waits because of a limit
	ReasonSynced        = "Synced"       // all objects of the tenant's cluster were carried over
	ReasonSyncing       = "Syncing"      // the objects are carried over for the first time
	ReasonFrozen        = "Frozen"       // nothing changes until the tenant's cluster answers
	ReasonLeaving       = "Leaving"      // the XPUTenant is being deleted

	// Reasons of the condition Supplied. All but AllMade and NoPF are also reasons of a Shortage.

	ReasonAllMade    = "AllMade"
	ReasonMaking     = "Making"     // the PF is being changed
	ReasonNoPF       = "NoPF"       // no node has a PF that a selector names
	ReasonOutOfRange = "OutOfRange" // the PF supports fewer
	ReasonBusy       = "Busy"       // EBUSY: another program changes the PF
	ReasonRefused    = "Refused"    // the driver refused
	// the card is in error, and is left alone until its driver has recovered
	ReasonFault        = "Fault"
	ReasonNoDriver     = "NoDriver"     // the VFs have no driver
	ReasonNoNetdev     = "NoNetdev"     // the VFs have a driver, but no netdevs
	ReasonNotSupported = "NotSupported" // no SR-IOV, no SFs, or not in this eswitch mode
)

// Reasons of the condition InventoryVerified.
const (
	ReasonVerified    = "Verified"
	ReasonDifferent   = "Different"   // at least one property of a Function
	ReasonNotVerified = "NotVerified" // nothing could be compared, or not in time
)

// Reasons of the condition Supported.
const (
	ReasonSupported      = "Supported"
	ReasonFeatureMissing = "FeatureMissing" // also a reason of Ready, if nothing is offered
)

// Feature gates of Kubernetes. If one is off, the API server drops parts of ResourceSlices. From
// Kubernetes 1.36 on they are on by default, except FeatureLists.
const (
	FeatureTaints            = "DRADeviceTaints"
	FeatureBindingConditions = "DRADeviceBindingConditions"
	FeatureCounters          = "DRAPartitionableDevices"
	FeatureSharedCapacity    = "DRAConsumableCapacity"
	FeatureLists             = "DRAListTypeAttributes" // off by default in all releases until 1.37
)

// FeatureTaintEffectNone stands for the effect None of device taints, which has no feature gate:
// Kubernetes 1.35 and later take it.
const FeatureTaintEffectNone = "DeviceTaintEffectNone"

// ReadyOf returns the condition Ready, or its zero value if it is missing.
func ReadyOf(conditions []metav1.Condition) metav1.Condition {
	if ready := meta.FindStatusCondition(conditions, ConditionReady); ready != nil {
		return *ready
	}
	return metav1.Condition{}
}

// Refused reports whether a Ready condition with this reason refuses the Port itself. Other reasons
// concern all Ports of the xPU.
func Refused(reason string) bool {
	switch reason {
	case ReasonConflict, ReasonFailed, ReasonUnknown, ReasonAbandoned, ReasonNoGateways,
		ReasonNoTrunks:
		return true
	}
	return false
}
