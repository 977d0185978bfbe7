// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// LabelTenant is on every object of an infra cluster that represents an object of a tenant cluster.
// Its value is the name of the XPUTenant.
const LabelTenant = GroupName + "/tenant"

// Annotations of objects of an infra cluster that represent an object of a tenant cluster.
const (
	// AnnotationOrigin is the name of the tenant's object, "namespace/name" or "name".
	AnnotationOrigin = GroupName + "/origin"
	// AnnotationOriginUID is the UID of the tenant's object.
	AnnotationOriginUID = GroupName + "/origin-uid"
)

// TenantMember says how the broker reaches the tenant's cluster.
// +kubebuilder:validation:XValidation:rule="has(self.secretName) != has(self.clusterProfile)",message="set secretName or clusterProfile"
type TenantMember struct {
	// SecretName names a Secret in the broker's namespace. The Secret has a kubeconfig in its key
	// kubeconfig, and the label sigs.k8s.io/multicluster-runtime-kubeconfig: "true".
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	SecretName string `json:"secretName,omitempty"`

	// ClusterProfile names a ClusterProfile (multicluster.x-k8s.io/v1alpha1, KEP-4322) in the
	// broker's namespace.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ClusterProfile string `json:"clusterProfile,omitempty"`
}

// TenantXPUs selects the XPUs of the infra cluster that serve the tenant: the named XPUs, and the
// XPUs that the selector matches. If two XPUTenants select the same XPU, the older XPUTenant gets
// it.
type TenantXPUs struct {
	// Names are the names of XPUs.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`

	// Selector matches labels of XPUs. An empty selector matches all XPUs, an absent one matches no
	// XPU.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// VLANRange is a range of VLAN ids, both ends included.
// +kubebuilder:validation:XValidation:rule="self.first <= self.last",message="first must not be more than last"
type VLANRange struct {
	// First and Last are VLAN ids, 1-4094 (IEEE 802.1Q).
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4094
	First int32 `json:"first"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4094
	Last int32 `json:"last"`
}

// VNIRange is a range of VXLAN network identifiers, both ends included.
// +kubebuilder:validation:XValidation:rule="self.first <= self.last",message="first must not be more than last"
type VNIRange struct {
	// First and Last are VNIs, 1-16777215 (RFC 7348).
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16777215
	First int32 `json:"first"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16777215
	Last int32 `json:"last"`
}

// DeletionPolicy is what happens to a tenant's objects in the infra cluster when the tenant leaves.
// +kubebuilder:validation:Enum=Delete;Retain
type DeletionPolicy string

const (
	// DeletionDelete deletes the tenant's ports and networks from the xPUs, so that its pods lose
	// them.
	DeletionDelete DeletionPolicy = "Delete"
	// DeletionRetain leaves the ports and networks in service until an XPUTenant of the same name
	// takes them over or a person deletes them.
	DeletionRetain DeletionPolicy = "Retain"
)

// XPUTenantSpec describes the tenant's cluster and the tenant's limits.
type XPUTenantSpec struct {
	// Member is the tenant's cluster.
	Member TenantMember `json:"member"`

	// XPUs are the XPUs that serve the tenant's nodes.
	XPUs TenantXPUs `json:"xpus"`

	// VLANs is the range for the tenant's networks. Each network gets one VLAN. The ranges of two
	// XPUTenants must not overlap.
	VLANs VLANRange `json:"vlans"`

	// VNIs is the range of VNIs for the tenant's networks, whose segments then join all of the
	// tenant's xPUs. Without it, each segment ends at its xPU. The ranges of two XPUTenants must
	// not overlap.
	// +optional
	VNIs *VNIRange `json:"vnis,omitempty"`

	// MaxPorts is how many XPUPorts the tenant may have at a time. If it is absent, the broker's
	// --tenant-ports applies.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxPorts *int32 `json:"maxPorts,omitempty"`

	// MaxBandwidth is the most that the rates of the tenant's XPUPorts may be together at a time, in
	// Mbit/s: the sum of their spec.rate.maximum. An XPUPort without such a rate has no limit, so
	// that it does not fit, and while there is one from before, no other fits. Absent means any sum.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxBandwidth *int64 `json:"maxBandwidth,omitempty"`

	// MaxGuaranteedBandwidth is the most that may be guaranteed to the tenant's XPUPorts together, in
	// Mbit/s: the sum of their spec.rate.guaranteed. An XPUPort without such a rate counts 0. Absent
	// means any sum.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxGuaranteedBandwidth *int64 `json:"maxGuaranteedBandwidth,omitempty"`

	// MaxNodes is how many XPUNodes the tenant may have in the infra cluster at a time. If it is
	// absent, the broker's --tenant-nodes applies. The cards of further nodes are not found.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxNodes *int32 `json:"maxNodes,omitempty"`

	// DeletionPolicy is what happens to the tenant's objects in the infra cluster when the
	// XPUTenant is deleted: Delete or Retain.
	DeletionPolicy DeletionPolicy `json:"deletionPolicy"`
}

// TenantNetwork is the segment that a network of the tenant has got.
type TenantNetwork struct {
	// Name is the name of the XPUNetwork in the tenant's cluster.
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`

	// VLAN is a VLAN of the tenant's range.
	VLAN int32 `json:"vlan"`

	// VNI is a VNI of the tenant's range, if the tenant has such a range.
	// +optional
	VNI *int32 `json:"vni,omitempty"`
}

// MaxTenantNetworks bounds XPUTenantStatus.Networks.
const MaxTenantNetworks = 512

// XPUTenantStatus is what the broker knows about the tenant.
type XPUTenantStatus struct {
	// Networks are the tenant's networks and their segments, at most 512. A segment becomes free
	// when the network is gone from the infra cluster.
	// +optional
	// +kubebuilder:validation:MaxItems=512
	// +listType=map
	// +listMapKey=name
	Networks []TenantNetwork `json:"networks,omitempty"`

	// Conditions has Connected, Synced and WithinLimits. Connected is True while the tenant's
	// cluster answers the broker. Synced is True once all existing objects of the tenant have been
	// carried over. WithinLimits is True while no object of the tenant waits because of a limit.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// XPUTenant is a cluster whose nodes have cards that this cluster, an infra cluster, serves. The
// broker carries the tenant's XPUPorts and XPUNetworks to the infra cluster, and their status back.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:printcolumn:name="Connected",type=string,JSONPath=`.status.conditions[?(@.type=="Connected")].status`
// +kubebuilder:printcolumn:name="Synced",type=string,JSONPath=`.status.conditions[?(@.type=="Synced")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Synced")].reason`
// +kubebuilder:printcolumn:name="Policy",type=string,JSONPath=`.spec.deletionPolicy`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= 32",message="the name of an XPUTenant may have at most 32 characters of a-z, 0-9 and '-', as names of its objects begin with it"
type XPUTenant struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   XPUTenantSpec   `json:"spec"`
	Status XPUTenantStatus `json:"status,omitempty"`
}

// XPUTenantList is a list of XPUTenants.
//
// +kubebuilder:object:root=true
type XPUTenantList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []XPUTenant `json:"items"`
}

// Has reports whether the XPU is selected. An error means that the selector is invalid.
func (x TenantXPUs) Has(xpu *XPU) (bool, error) {
	if slices.Contains(x.Names, xpu.Name) {
		return true, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(x.Selector)
	if err != nil {
		return false, fmt.Errorf("spec.xpus.selector: %w", err)
	}
	return selector.Matches(labels.Set(xpu.Labels)), nil
}

// TenantOf returns the tenant whose nodes the XPU serves, or nil if there is no such tenant. A
// tenant with an invalid selector has only the XPUs that it names. The result points into the
// slice.
func TenantOf(xpu *XPU, tenants []XPUTenant) *XPUTenant {
	var found *XPUTenant
	for i := range tenants {
		t := &tenants[i]
		if has, err := t.Spec.XPUs.Has(xpu); err != nil || !has {
			continue
		}
		if found == nil || t.Precedes(found) {
			found = t
		}
	}

	return found
}

// Precedes reports whether the tenant is older than the other one and so gets the XPUs that both
// select. Of two tenants created in the same second, the first by name precedes.
func (t *XPUTenant) Precedes(other *XPUTenant) bool {
	if !t.CreationTimestamp.Equal(&other.CreationTimestamp) {
		return t.CreationTimestamp.Before(&other.CreationTimestamp)
	}
	return t.Name < other.Name
}
