// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// metadataFields are shown of every object.
const metadataFields = `
	apiVersion kind
	metadata: name namespace uid resourceVersion generation creationTimestamp deletionTimestamp
	metadata: finalizers[] labels=labels annotations=annotations
	metadata.ownerReferences[]: apiVersion kind name uid controller
`

// conditionFields are shown of the project's own conditions, whose messages the project writes.
const conditionFields = `
	status.conditions[]: type status reason message observedGeneration lastTransitionTime
`

// Fields of each kind. They omit texts that other programs write, and fields that only other
// programs use.
const (
	devicePoolFields = conditionFields + `
	spec: allow[] deviceType driver maxAllocated model network nodeSelector.* numVFs portsAhead
	spec: priority provision publish sfs.count sfs.firstNumber
	spec.attributes[]: bool int name string
	spec.devicePlugin: excludeTopology needVhostNet preferredAllocation provisionAt
	spec.devicePlugin: resourceName resourcePrefix
	spec.selectors[]: acpiIndexes[] auxTypes[] ddpProfiles[] devices[] drivers[] isRdma linkTypes[]
	spec.selectors[]: pKeys[] pciAddresses[] pfNames[] rootDevices[] vdpaType vendors[]
	status: functions healthy nodeCount
`

	xpuFields = conditionFields + `
	spec: abandon dialect endpoint insecure nodeName pfs[] tls.secretName tls.serverName
	status: endpoint nodeName serial foreign.examples[] foreign.networks foreign.ports
	status.pfs[]: address name totalVFs vfOffset vfStride
`

	xpuNetworkFields = conditionFields + `
	spec: gateways[] mtu reserved[] sourceFilter subnets[] vlan vni allowedNamespaces.from routed.vrf
	spec.allowedNamespaces.selector: matchLabels.*
	spec.allowedNamespaces.selector.matchExpressions[]: key operator values[]
	status: readyXPUs xpus failures[].message failures[].xpu
`

	xpuNodeFields = conditionFields + `
	status: functions
	status.pfs[]: address board device driver mac name serial totalVFs vendor
	status.pfs[]: vfOffset vfStride vfs
	status.pools[]: error functions healthy name observedGeneration overlapping[]
	status.pools[]: fallbacks[].feature fallbacks[].message
	status.pools[]: problems[].functions problems[].message problems[].taint
	status.pools[]: shortages[].message shortages[].pf shortages[].reason
`

	xpuPortFields = conditionFields + `
	spec: addresses[] ahead assignAddresses mac mtu network nodeName xpu
	spec: claim.name claim.pod claim.request claim.uid pod.name pod.namespace pod.uid
	spec: function.pciAddress function.subfunction
	status: addresses[] bridgePort mtu pod predecessor
`

	xpuTenantFields = conditionFields + `
	spec: deletionPolicy maxPorts member.clusterProfile member.secretName
	spec: vlans.first vlans.last vnis.first vnis.last xpus.names[] xpus.selector.matchLabels.*
	spec.xpus.selector.matchExpressions[]: key operator values[]
	status.networks[]: name vlan vni
`

	deviceClassFields = `
	spec: extendedResourceName selectors[].cel.expression config[].opaque=opaque
`

	claimFields = requestFields + `
	status.allocation: allocationTimestamp
	status.allocation.nodeSelector.nodeSelectorTerms[].matchFields[]: key operator values[]
	status.allocation.devices.config[]: source requests[] opaque=opaque
	status.allocation.devices.results[]: request driver pool device adminAccess shareID
	status.allocation.devices.results[]: consumedCapacity.* skipNodeOperations[]
	status.allocation.devices.results[]: bindingConditions[] bindingFailureConditions[]
	status.allocation.devices.results[].tolerations[]: key operator value effect tolerationSeconds
	status.reservedFor[]: apiGroup resource name uid
	status.devices[]=device
`

	// requestFields are shown of a ResourceClaim's spec.
	requestFields = `
	spec.devices.constraints[]: requests[] matchAttribute distinctAttribute
	spec.devices.config[]: requests[] opaque=opaque
	spec.devices.requests[]: name
	spec.devices.requests[].exactly: deviceClassName allocationMode count adminAccess
	spec.devices.requests[].exactly: selectors[].cel.expression capacity.requests.*
	spec.devices.requests[].exactly.tolerations[]: key operator value effect tolerationSeconds
	spec.devices.requests[].firstAvailable[]: name deviceClassName allocationMode count
	spec.devices.requests[].firstAvailable[]: selectors[].cel.expression capacity.requests.*
	spec.devices.requests[].firstAvailable[].tolerations[]: key operator value effect
	spec.devices.requests[].firstAvailable[].tolerations[]: tolerationSeconds
`

	// sliceFields are shown of this driver's ResourceSlices. Other drivers' are not collected.
	sliceFields = `
	spec: driver nodeName allNodes perDeviceNodeSelection
	spec: pool.name pool.generation pool.resourceSliceCount
	spec.sharedCounters[]: name counters.*.value
	spec.devices[]: name nodeName allNodes bindsToNode allowMultipleAllocations
	spec.devices[]: bindingConditions[] bindingFailureConditions[]
	spec.devices[].attributes.*: bool int string version bools[] ints[] strings[] versions[]
	spec.devices[].capacity.*: value requestPolicy.default requestPolicy.validValues[]
	spec.devices[].capacity.*.requestPolicy.validRange: min max step
	spec.devices[].consumesCounters[]: counterSet counters.*.value
	spec.devices[].taints[]: key value effect timeAdded
`

	nodeFields = `
	spec: unschedulable taints[].key taints[].effect
	status: allocatable.* capacity.*
	status.conditions[]: type status reason lastHeartbeatTime lastTransitionTime
	status.addresses[]: type address
	status.nodeInfo: architecture bootID containerRuntimeVersion kernelVersion kubeletVersion
	status.nodeInfo: operatingSystem osImage
`

	eventFields = `
	count type reason message=message action firstTimestamp lastTimestamp eventTime series.count
	series.lastObservedTime reportingComponent reportingInstance source.component source.host
	involvedObject: apiVersion kind namespace name uid fieldPath
	related: apiVersion kind namespace name uid
`

	podFields = `
	spec: nodeName schedulerName hostNetwork runtimeClassName serviceAccountName
	spec.resourceClaims[]: name resourceClaimName resourceClaimTemplateName
	spec: containers[]=container initContainers[]=container schedulingGates[].name
	status: phase reason podIP podIPs[].ip hostIP startTime qosClass
	status.conditions[]: type status reason lastTransitionTime
	status.resourceClaimStatuses[]: name resourceClaimName
	status.extendedResourceClaimStatus: resourceClaimName
	status.extendedResourceClaimStatus.requestMappings[]: containerName resourceName requestName
	status: containerStatuses[]=status initContainerStatuses[]=status
`

	networkFields = `
	spec: config=network
`
)

// statusFields are shown of a container's status. They omit the termination message, because the
// program writes it.
const statusFields = `
	name ready restartCount started containerID
	state.running: startedAt
	state.waiting: reason
	state.terminated: exitCode signal reason startedAt finishedAt
	lastState.terminated: exitCode signal reason startedAt finishedAt
	allocatedResourcesStatus[]: name resources[].resourceID resources[].health
`

// containerFields are shown of containers of other programs.
const containerFields = `
	name
	resources: limits.* requests.* claims[].name claims[].request
`

// ourContainerFields are shown of the project's containers, and ourPodFields of its pods.
const (
	ourContainerFields = containerFields + `
	image imagePullPolicy args=arguments workingDir env[].name env[].valueFrom.fieldRef.fieldPath
	ports[]: name containerPort hostPort protocol
	volumeMounts[]: name mountPath readOnly mountPropagation
	securityContext: allowPrivilegeEscalation privileged readOnlyRootFilesystem
	securityContext: runAsUser runAsGroup runAsNonRoot procMount
	securityContext: capabilities.add[] capabilities.drop[] seccompProfile.type appArmorProfile.type
`

	ourPodFields = podFields + `
	spec: hostPID priorityClassName terminationGracePeriodSeconds automountServiceAccountToken
	spec: dnsPolicy nodeSelector.* tolerations[].key tolerations[].operator tolerations[].effect
	spec.volumes[]: name hostPath.path hostPath.type secret.secretName configMap.name emptyDir.medium
`
)

// workloadFields are shown of DaemonSets and Deployments. They omit the pod template.
const workloadFields = `
	spec: replicas minReadySeconds revisionHistoryLimit paused selector.matchLabels=labels
	spec.updateStrategy: type rollingUpdate.maxSurge rollingUpdate.maxUnavailable
	spec.strategy: type rollingUpdate.maxSurge rollingUpdate.maxUnavailable
	status: observedGeneration replicas updatedReplicas readyReplicas availableReplicas
	status: unavailableReplicas currentNumberScheduled desiredNumberScheduled numberAvailable
	status: numberMisscheduled numberReady numberUnavailable updatedNumberScheduled
	status.conditions[]: type status reason lastTransitionTime lastUpdateTime
`

// shownFields returns the fields that are shown of an object, or nil if nothing is shown of its
// kind.
func shownFields(kind string, o *unstructured.Unstructured, namespace string) *fields {
	account := func(path ...string) string {
		name, _, _ := unstructured.NestedString(o.Object, append(path, "serviceAccountName")...)
		return name
	}
	if kind == "Pod" && isOurPod(o, account("spec"), namespace) {
		return parse(metadataFields+ourPodFields, ourViews())
	}

	if (kind == "DaemonSet" || kind == "Deployment") &&
		isOurWorkload(o, account("spec", "template", "spec"), namespace) {
		return parse(metadataFields+workloadFields+"spec.template: metadata.labels=labels\n"+
			prefixed("spec.template", ourPodFields), ourViews())
	}

	list, isShown := map[string]string{
		"DevicePool": devicePoolFields, "XPU": xpuFields, "XPUNetwork": xpuNetworkFields,
		"XPUNode": xpuNodeFields, "XPUPort": xpuPortFields, "XPUTenant": xpuTenantFields,
		"DeviceClass": deviceClassFields, "ResourceClaim": claimFields,
		"ResourceClaimTemplate": prefixed("spec", requestFields), "ResourceSlice": sliceFields,
		"Node": nodeFields, "Event": eventFields, "Pod": podFields,
		"DaemonSet": workloadFields, "Deployment": workloadFields,
		"NetworkAttachmentDefinition": networkFields,
	}[kind]

	if !isShown {
		return nil
	}

	known := views()
	known["message"] = func(any) any { return eventMessage(o) }
	return parse(metadataFields+list, known)
}

// prefixed puts a list of fields below a path.
func prefixed(path, list string) string {
	var out strings.Builder
	for line := range strings.Lines(list) {
		switch line = strings.TrimSpace(line); {
		case line == "":
		case strings.Contains(line, ":"):
			out.WriteString(path + "." + line + "\n")
		default:
			out.WriteString(path + ": " + line + "\n")
		}
	}

	return out.String()
}

// shownLabels returns labels that the project, its chart and Kubernetes set.
func shownLabels() []string {
	return []string{
		v1alpha1.LabelTenant, v1alpha1.LabelPool, v1alpha1.LabelNetwork, v1alpha1.LabelAgents,
		v1alpha1.GroupName + "/opi-bridge", "app.kubernetes.io/name", "app.kubernetes.io/part-of",
		"app.kubernetes.io/version", "helm.sh/chart", "controller-revision-hash",
		"pod-template-generation", "pod-template-hash", "kubernetes.io/hostname",
		"kubernetes.io/arch", "kubernetes.io/os", "topology.kubernetes.io/region",
		"topology.kubernetes.io/zone",
	}
}

// shownAnnotations returns annotations that the project, its broker and Kubernetes set. The
// annotations of Multus are shown in part, by [networksAnnotation] and [statusAnnotation].
func shownAnnotations() []string {
	return []string{
		v1alpha1.AnnotationOrigin, v1alpha1.AnnotationOriginUID, v1alpha1.AnnotationTLSSecret,
		v1alpha1.AnnotationServerName, v1alpha1.AnnotationInsecure,
		"k8s.v1.cni.cncf.io/resourceName", "resource.kubernetes.io/pod-claim-name",
		"deprecated.daemonset.template.generation", "deployment.kubernetes.io/revision",
	}
}
