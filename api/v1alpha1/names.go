// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Names that more than one part of the system must agree on.
const (
	// ConditionReady is the one condition that every kind of this group, and every device in
	// ResourceClaim.status.devices, carries.
	ConditionReady = "Ready"

	// ConditionCard says of an XPU whose OPI agent tells which PFs it serves whether its node has
	// them.
	ConditionCard = "Card"

	// ConditionFunctions is on an XPU of which some Functions are given up
	// (spec.abandonedFunctions): False (Abandoned).
	ConditionFunctions = "Functions"

	// ConditionConnected says of an XPUTenant whether its cluster answers the broker.
	ConditionConnected = "Connected"

	// ConditionSynced says of an XPUTenant whether the broker carries over what its cluster has.
	ConditionSynced = "Synced"

	// ConditionWithinLimits, of an XPUTenant, is False while its cluster has more objects than the
	// limits allow.
	ConditionWithinLimits = "WithinLimits"

	// ConditionAdmitted says of an XPUPort without a claim in a tenant cluster whether the network
	// lets its pod join.
	ConditionAdmitted = "Admitted"

	// ConditionSupplied says of a DevicePool with numVFs or sfs whether every PF that it names has
	// them.
	ConditionSupplied = "Supplied"
	// ConditionSupported says of a DevicePool that needs feature gates of Kubernetes whether they
	// are on.
	ConditionSupported = "Supported"

	// ConditionProvisioned is the binding condition of devices in pools that provision BeforeBind:
	// the xPU serves the Function's Port. The controller sets it in ResourceClaim.status.devices
	// (KEP-5007).
	ConditionProvisioned = GroupName + "/Provisioned"

	// ConditionProvisionFailed is the binding failure condition beside ConditionProvisioned: the
	// scheduler gives the device back and allocates again.
	ConditionProvisionFailed = GroupName + "/ProvisionFailed"

	// FinalizerPort keeps an XPUPort until the xPU no longer serves it.
	FinalizerPort = GroupName + "/port"

	// FinalizerNetwork keeps an XPUNetwork until no XPUPort needs it.
	FinalizerNetwork = GroupName + "/network"

	// FinalizerXPU keeps an XPU until it has no XPUPorts.
	FinalizerXPU = GroupName + "/xpu"

	// FinalizerTenant keeps an XPUTenant until the infra cluster has nothing of it that its
	// deletionPolicy has deleted.
	FinalizerTenant = GroupName + "/tenant"

	// BrokerLease is the name of the Lease that the broker renews in a tenant cluster, in the
	// namespace of xpu-controller there.
	BrokerLease = "xpu-broker"

	// TaintLinkDown is on devices whose PF has no carrier or is administratively down (effect
	// NoSchedule).
	TaintLinkDown = GroupName + "/link-down"

	// TaintProvisionFailed is on a device whose Port the xPU refused, for a while, so that the
	// scheduler tries another one (effect NoSchedule).
	TaintProvisionFailed = GroupName + "/provision-failed"

	// TaintReleasePending is on a device that cannot be handed out because its last Attachment
	// could not be taken back yet (effect NoSchedule).
	TaintReleasePending = GroupName + "/release-pending"

	// TaintQuarantined is on a device that did not come back from its last pod as it was, so that
	// something of that pod might reach the next one. The device is tried again now and then, and
	// "xpuctl release" frees it (effect NoSchedule).
	TaintQuarantined = GroupName + "/quarantined"

	// TaintXPUAway is on devices whose xPU's OPI agent cannot be reached, and on those that are
	// given up because it cannot delete their ports (effect NoSchedule).
	TaintXPUAway = GroupName + "/xpu-away"

	// TaintInUse is on a device that a pod still has by another way of publishing: the device
	// plugin before its pool was moved to DRA, or another device plugin; and on a device that the
	// host itself uses: its netdev is a port of a bridge, bond, OVS or VRF, has an address or a
	// route, carries a VLAN, macvlan or tunnel, or has an XDP program (effect NoSchedule).
	TaintInUse = GroupName + "/in-use"

	// TaintLost is on a device that was unplugged or reset while a pod had it, and that the pod has
	// not got back (effect NoSchedule).
	TaintLost = GroupName + "/lost"

	// TaintFault is on devices of which a health reporter of their driver tells an error that is
	// not recovered (devlink-health), and on devices that no pod could use as they are: without a
	// driver, without a netdev, or with a driver for programs that their pool does not ask for
	// (effect NoSchedule).
	TaintFault = GroupName + "/fault"
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
	// the OPI agent has a port, or may have one, and does not tell whose or what it is
	ReasonUnknown          = "Unknown"
	ReasonFunctionBusy     = "FunctionBusy"
	ReasonStandby          = "Standby" // of an XPUPort of a virtual machine that is being migrated
	ReasonNoFreeAddress    = "NoFreeAddress"
	ReasonForbidden        = "Forbidden"
	ReasonReleasing        = "Releasing"
	ReasonInUse            = "InUse"
	ReasonNoPortNeeded     = "NoPortNeeded"
	ReasonAttached         = "Attached"
	ReasonLost             = "Lost"
	ReasonPublished        = "Published"
	ReasonNoFunctions      = "NoFunctions"
	ReasonOverlap          = "Overlap"
	ReasonUnhealthy        = "Unhealthy"
	ReasonConnected        = "Connected"
	ReasonInvalidTLSSecret = "InvalidTLSSecret"

	// Of the condition Card; also Conflict.

	ReasonFound         = "Found"
	ReasonCardNotFound  = "CardNotFound"  // no node has told of the PFs
	ReasonContradiction = "Contradiction" // between spec and cards, or between nodes
	ReasonNotTold       = "NotTold"       // by the OPI agent, nor by the spec

	// Of objects of tenant clusters; Connected and Conflict also of XPUTenants.

	ReasonAdmitted   = "Admitted"
	ReasonBrokerAway = "BrokerAway" // no broker of an infra cluster asks this cluster
	// of the XPUTenant: its maxPorts or maxNodes, or its range of segments
	ReasonQuotaExceeded  = "QuotaExceeded"
	ReasonMemberNotFound = "MemberNotFound" // there are no credentials for the tenant's cluster
	ReasonUnreachable    = "Unreachable"    // the tenant's cluster does not answer
	ReasonUnauthorized   = "Unauthorized"   // the tenant's cluster refuses the credentials
	// the tenant's cluster does not answer as an API server does
	ReasonInvalidAnswer = "InvalidAnswer"
	// the tenant has more, or larger objects, than it may have
	ReasonLimitExceeded = "LimitExceeded"
	ReasonWithinLimits  = "WithinLimits" // nothing of the tenant waits because of a limit
	ReasonSynced        = "Synced"       // all that the tenant's cluster had was carried over
	ReasonSyncing       = "Syncing"      // it is being carried over for the first time
	ReasonFrozen        = "Frozen"       // all stays as it is until the tenant's cluster answers
	ReasonLeaving       = "Leaving"      // the XPUTenant is being deleted

	// Of the condition Supplied, and, all but AllMade and NoPF, of a Shortage.

	ReasonAllMade    = "AllMade"
	ReasonMaking     = "Making"     // the PF is being changed
	ReasonNoPF       = "NoPF"       // no node has a PF that a selector names
	ReasonOutOfRange = "OutOfRange" // the PF can have fewer
	ReasonBusy       = "Busy"       // EBUSY: somebody else changes it
	ReasonRefused    = "Refused"    // by the driver
	// the card is in error, and is left alone until its driver has recovered
	ReasonFault        = "Fault"
	ReasonNoDriver     = "NoDriver"     // VFs are there, but without a driver
	ReasonNoNetdev     = "NoNetdev"     // VFs are there with a driver, but without netdevs
	ReasonNotSupported = "NotSupported" // no SR-IOV, no subfunctions, or not in this eswitch mode
)

// Reasons of the condition Supported.
const (
	ReasonSupported      = "Supported"
	ReasonFeatureMissing = "FeatureMissing" // also of Ready, where nothing is offered
)

// Feature gates of Kubernetes without which an API server drops parts of ResourceSlices. From
// Kubernetes 1.36 on they are on by default.
const (
	FeatureTaints            = "DRADeviceTaints"
	FeatureBindingConditions = "DRADeviceBindingConditions"
	FeatureCounters          = "DRAPartitionableDevices"
	FeatureSharedCapacity    = "DRAConsumableCapacity"
)

// ReadyOf returns the condition Ready, its zero value if there is none.
func ReadyOf(conditions []metav1.Condition) metav1.Condition {
	if ready := meta.FindStatusCondition(conditions, ConditionReady); ready != nil {
		return *ready
	}
	return metav1.Condition{}
}

// Refused says whether a Ready condition with this reason refuses the Port itself. Other reasons
// concern all Ports of the xPU.
func Refused(reason string) bool {
	switch reason {
	case ReasonConflict, ReasonFailed, ReasonUnknown, ReasonAbandoned:
		return true
	}
	return false
}
