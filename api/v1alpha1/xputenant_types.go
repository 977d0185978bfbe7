// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// LabelTenant is on every object of an infra cluster that stands for one of a tenant cluster: the
// name of the XPUTenant.
const LabelTenant = GroupName + "/tenant"

// Annotations of objects of an infra cluster that stand for one of a tenant cluster.
const (
	// AnnotationOrigin is its name there, "namespace/name" or "name".
	AnnotationOrigin = GroupName + "/origin"
	// AnnotationOriginUID is its UID.
	AnnotationOriginUID = GroupName + "/origin-uid"
)

// TenantMember says how the broker reaches the tenant's cluster.
// +kubebuilder:validation:XValidation:rule="has(self.secretName) != has(self.clusterProfile)",message="set secretName or clusterProfile"
type TenantMember struct {
	// SecretName names a Secret in the broker's namespace that has a kubeconfig in its key
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

// TenantXPUs says which XPUs of the infra cluster are the tenant's: those that are named, and those
// that the selector matches. Of two XPUTenants that both say an XPU, the older has it.
type TenantXPUs struct {
	// Names are names of XPUs.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`

	// Selector matches labels of XPUs. An empty one matches all, an absent one none.
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

// DeletionPolicy is what becomes of a tenant's objects in the infra cluster when the tenant leaves.
// +kubebuilder:validation:Enum=Delete;Retain
type DeletionPolicy string

const (
	// DeletionDelete has the xPUs let go of the tenant's ports and networks: its pods lose them.
	DeletionDelete DeletionPolicy = "Delete"
	// DeletionRetain leaves them in service, until an XPUTenant of the same name takes them over or
	// a person deletes them.
	DeletionRetain DeletionPolicy = "Retain"
)

// XPUTenantSpec says who the tenant is and what it may have.
type XPUTenantSpec struct {
	// Member is the tenant's cluster.
	Member TenantMember `json:"member"`

	// XPUs are those that serve the tenant's nodes.
	XPUs TenantXPUs `json:"xpus"`

	// VLANs are given to the tenant's networks, one to each. No two XPUTenants may have some in
	// common.
	VLANs VLANRange `json:"vlans"`

	// VNIs are given to the tenant's networks too, so that their segments join all of the tenant's
	// xPUs. Without them each segment ends at each xPU. No two XPUTenants may have some in common.
	// +optional
	VNIs *VNIRange `json:"vnis,omitempty"`

	// MaxPorts is how many XPUPorts the tenant may have at a time; absent, as many as the broker's
	// --tenant-ports says.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxPorts *int32 `json:"maxPorts,omitempty"`

	// MaxNodes is how many XPUNodes the tenant may have here at a time; absent, as many as the
	// broker's --tenant-nodes says. Cards of other nodes are not found.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxNodes *int32 `json:"maxNodes,omitempty"`

	// DeletionPolicy is what becomes of what the tenant has here when the XPUTenant is deleted:
	// Delete or Retain.
	DeletionPolicy DeletionPolicy `json:"deletionPolicy"`
}

// TenantNetwork is the segment that was given to a network of the tenant.
type TenantNetwork struct {
	// Name is that of the XPUNetwork in the tenant's cluster.
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`

	// VLAN is of the tenant's range.
	VLAN int32 `json:"vlan"`

	// VNI is of the tenant's range, if it has one.
	// +optional
	VNI *int32 `json:"vni,omitempty"`
}

// MaxTenantNetworks bounds XPUTenantStatus.Networks.
const MaxTenantNetworks = 512

// XPUTenantStatus is what the broker knows of the tenant.
type XPUTenantStatus struct {
	// Networks are the tenant's networks and their segments, at most 512. A segment is free again
	// when the network is gone from the infra cluster.
	// +optional
	// +kubebuilder:validation:MaxItems=512
	// +listType=map
	// +listMapKey=name
	Networks []TenantNetwork `json:"networks,omitempty"`

	// Conditions has Connected: True while the tenant's cluster answers the broker; Synced: True
	// once all that it had was carried over; and WithinLimits: True while nothing of it waits
	// because the tenant may not have more.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// XPUTenant is a cluster whose nodes have cards that this cluster, an infra cluster, serves. The
// broker carries its XPUPorts and XPUNetworks over, and what becomes of them back.
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

// Has says whether the XPU is one of these. The error says that the selector is invalid.
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

// TenantOf is the tenant whose nodes the XPU serves, nil if there is none. A tenant whose selector
// is invalid has only XPUs that it names. It returns a pointer into the slice.
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

// Precedes says whether the tenant is older than another one, by name where both were made in the
// same second, and so has what both say that they have.
func (t *XPUTenant) Precedes(other *XPUTenant) bool {
	if !t.CreationTimestamp.Equal(&other.CreationTimestamp) {
		return t.CreationTimestamp.Before(&other.CreationTimestamp)
	}
	return t.Name < other.Name
}
