// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"cmp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Dialect is how an OPI agent names and answers. Agents differ where the OPI API leaves room.
// +kubebuilder:validation:Enum=dpu-operator;evpn-gw;intel-e2000
type Dialect string

const (
	// DialectDPUOperator is spoken by the DPU side of dpu-operator, whose plugins are for Intel
	// NetSec, Marvell and Intel IPU.
	DialectDPUOperator Dialect = "dpu-operator"
	// DialectEVPNGW is spoken by opi-evpn-bridge and by opi-bridge.
	DialectEVPNGW Dialect = "evpn-gw"
	// DialectIntelE2000 is spoken by opi-intel-bridge.
	DialectIntelE2000 Dialect = "intel-e2000"
)

// Dialects returns all dialects, sorted.
func Dialects() []Dialect {
	return []Dialect{DialectDPUOperator, DialectEVPNGW, DialectIntelE2000}
}

// LabelAgents is on Services whose endpoints are OPI agents, one on each node that is an xPU. For
// each endpoint, xpu-controller makes an XPU with the name of the node. On the Service the value of
// the label has no meaning; on these XPUs it is the name of the Service.
const LabelAgents = GroupName + "/opi-agents"

// Annotations of such a Service describe how the agents are reached.
const (
	// AnnotationTLSSecret is spec.tls.secretName of the XPUs; the default is opi-client.
	AnnotationTLSSecret = GroupName + "/tls-secret"
	// AnnotationServerName is spec.tls.serverName: the name in the certificates of all the agents.
	AnnotationServerName = GroupName + "/server-name"
	// AnnotationInsecure is "true" for agents without TLS.
	AnnotationInsecure = GroupName + "/insecure"
)

// XPUTLS names the controller's credentials for an OPI agent.
type XPUTLS struct {
	// SecretName names a Secret of type kubernetes.io/tls in the controller's namespace with
	// tls.crt and tls.key (the client's) and ca.crt (the agent's CA).
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	SecretName string `json:"secretName"`

	// ServerName is the name in the agent's certificate, if it is not the host of the endpoint.
	// +optional
	ServerName string `json:"serverName,omitempty"`
}

// XPUSpec describes where an xPU is and how it is reached.
// +kubebuilder:validation:XValidation:rule="!has(self.endpoint) || has(self.tls) != (has(self.insecure) && self.insecure)",message="set tls, or insecure: true if the way to the agent is protected otherwise"
// +kubebuilder:validation:XValidation:rule="has(self.endpoint) || !has(self.tls) && !(has(self.insecure) && self.insecure)",message="tls and insecure are for an endpoint: set endpoint too"
type XPUSpec struct {
	// NodeName is the node that has the card. If it is absent, the node is found by the card that
	// the OPI agent reports to serve: see the condition Card.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`

	// PFs are the PCI addresses of the card's PFs on the node, "dddd:bb:dd.f". Empty means the PFs
	// that the OPI agent reports to serve. If the agent does not report any and nodeName is set,
	// empty means every PF of the node, which is right for nodes with one card. If the node has
	// another XPU, no device is tainted because of an XPU that names and reports no PFs. If the node
	// has several such XPUs, none of them gets new XPUPorts, because it is not known which has the
	// PF.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`
	PFs []string `json:"pfs,omitempty"`

	// Endpoint is the OPI agent's address, "host:port". The host is a name, an IPv4 address, or an
	// IPv6 address in brackets, which may have a zone of 1 to 15 characters: "10.0.0.1:50151",
	// "xpu-1.example.com:50151", "[fd00::1]:50151", "[fe80::1%eth0]:50151". The port has 1 to 5
	// digits. An XPU without an endpoint was made by the broker and is served by an infra cluster.
	// +optional
	// +kubebuilder:validation:MaxLength=320
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^(\\[[0-9a-fA-F:.]+(%[A-Za-z0-9._-]{1,15})?\\]|[A-Za-z0-9.-]+):[0-9]{1,5}$')",message="must be HOST:PORT, such as 10.0.0.1:50151, xpu-1.example.com:50151 or [fd00::1]:50151"
	Endpoint string `json:"endpoint,omitempty"`

	// Dialect is the OPI agent's dialect.
	// +optional
	// +kubebuilder:default=evpn-gw
	Dialect Dialect `json:"dialect,omitempty"`

	// VTEP is the address of the xPU from which networks with a VNI are sent by VXLAN, such as
	// 198.51.100.1. If it is absent, the OPI agent chooses the address. A network that the agent
	// has already keeps its address.
	// +optional
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="vtep must be an address, such as 198.51.100.1"
	VTEP string `json:"vtep,omitempty"`

	// TLS is how the controller and the agent authenticate each other (mutual TLS).
	// +optional
	TLS *XPUTLS `json:"tls,omitempty"`

	// Insecure allows a connection without TLS.
	// +optional
	Insecure bool `json:"insecure,omitempty"`

	// Abandon gives up an xPU that will not answer any more: its XPUPorts are deleted without
	// asking the agent. Their Functions stay tainted until the agent is back and has deleted the
	// ports, or until the XPU is deleted, which states that the card is gone.
	// +optional
	Abandon bool `json:"abandon,omitempty"`

	// AbandonedFunctions gives up single Functions whose ports the OPI agent cannot delete, for
	// example because it has lost a representor: "0000:3b:02.1", or "0000:3b:00.0/sf88" for an SF.
	// Their XPUPorts are deleted although the agent does not report the ports as gone. The
	// Functions stay tainted, and get no Port, until they are removed from the list, which states
	// that their ports are gone.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=32
	// +kubebuilder:validation:items:Pattern=`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](/sf[0-9]{1,10})?$`
	AbandonedFunctions []string `json:"abandonedFunctions,omitempty"`
}

// MaxForeignExamples bounds XPUForeign.Examples.
const MaxForeignExamples = 5

// XPUForeign counts the objects of an OPI agent that are not known to be this cluster's. They stay
// unchanged.
type XPUForeign struct {
	// Ports is how many ports the agent has in networks of others.
	// +optional
	Ports int32 `json:"ports"`

	// Networks is how many networks of others the agent has.
	// +optional
	Networks int32 `json:"networks"`

	// VRFs is how many routing domains of others the agent has, which OPI calls Vrf.
	// +optional
	VRFs int32 `json:"vrfs,omitempty"`

	// Gateways is how many gateways of others the agent has, which OPI calls Svi.
	// +optional
	Gateways int32 `json:"gateways,omitempty"`

	// Unknown is how many ports the agent has without reporting their owner.
	// +optional
	Unknown int32 `json:"unknown,omitempty"`

	// Examples are some of these objects, at most 5: "port vf-0000-3b-02-1", "network net-blue
	// (VLAN 10)", "gateway net-blue-gw", "VRF tenants".
	// +optional
	// +listType=atomic
	Examples []string `json:"examples,omitempty"`
}

// XPUPF is a PF that the xPU serves.
type XPUPF struct {
	// Address is the PCI address of the PF on the node, "dddd:bb:dd.f".
	// +kubebuilder:validation:MaxLength=32
	Address string `json:"address"`

	// Name is the name of the PF at the xPU's eswitch, "c1pf0": the phys_port_name of its
	// representor. At the OPI agent, ids of ports of the PF's Functions begin with Name.
	// +kubebuilder:validation:MaxLength=32
	Name string `json:"name"`

	// VFOffset, VFStride and TotalVFs have the values of the XPUNode: VF i, less than TotalVFs, has
	// the routing ID of the PF plus VFOffset plus i times VFStride.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	VFOffset int32 `json:"vfOffset,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	VFStride int32 `json:"vfStride,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	TotalVFs int32 `json:"totalVFs,omitempty"`
}

// XPUStatus is what the controller knows about the xPU.
type XPUStatus struct {
	// NodeName is the node that has the card: the node of the spec, or else the node that was found
	// by the report of the OPI agent.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`

	// Endpoint is spec.endpoint once the OPI agent there has answered; names are in lower case.
	// While spec.endpoint stays the same, no other XPU gets this agent. Endpoint is absent while
	// another XPU has the agent.
	// +optional
	// +kubebuilder:validation:MaxLength=320
	Endpoint string `json:"endpoint,omitempty"`

	// Serial is the card's serial number, if the OPI agent reports it.
	// +optional
	// +kubebuilder:validation:MaxLength=255
	Serial string `json:"serial,omitempty"`

	// PFs are the PFs of the node that the OPI agent reports to serve, at most 64.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=address
	PFs []XPUPF `json:"pfs,omitempty"`

	// AwaySeconds is for how long an infra cluster has failed to reach the OPI agent, without a
	// break, when it last looked: 60, 120, 180 and so on, later in steps of a quarter of the time. It
	// is absent before the first minute has passed, and once the agent answers. A time that an
	// earlier controller has written stays until the next one has measured a longer one.
	// +optional
	// +kubebuilder:validation:Minimum=0
	AwaySeconds int32 `json:"awaySeconds,omitempty"`

	// Foreign counts the agent's objects that are not this cluster's; absent if there are no such
	// objects.
	// +optional
	Foreign *XPUForeign `json:"foreign,omitempty"`

	// Conditions has Ready: True (Connected) while the OPI agent answers. It has Card: True (Found)
	// if the node has the card that the agent reports to serve. It has Verified: False
	// (NotReported) if agents of its dialect do not report their ports.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// XPU is a SmartNIC, DPU or IPU and the OPI agent that serves it.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:selectablefield:JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="Endpoint",type=string,JSONPath=`.spec.endpoint`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type XPU struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   XPUSpec   `json:"spec"`
	Status XPUStatus `json:"status,omitempty"`
}

// XPUList is a list of XPUs.
//
// +kubebuilder:object:root=true
type XPUList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []XPU `json:"items"`
}

// Node returns the node that has the card, or "" if the node is not known.
func (x *XPU) Node() string { return cmp.Or(x.Spec.NodeName, x.Status.NodeName) }

// Serves reports whether the xPU serves the PF of its node with this PCI address.
func (x *XPU) Serves(pf string) bool {
	if len(x.Spec.PFs) > 0 {
		return slices.Contains(x.Spec.PFs, pf)
	}
	return !x.NamesPFs() || x.PF(pf) != nil
}

// NamesPFs reports whether the xPU serves certain PFs, instead of all PFs of its node.
func (x *XPU) NamesPFs() bool { return len(x.Spec.PFs)+len(x.Status.PFs) > 0 }

// PF returns the status of the PF with this PCI address that the OPI agent reports to serve, or nil
// for another PF.
func (x *XPU) PF(address string) *XPUPF {
	i := slices.IndexFunc(x.Status.PFs, func(pf XPUPF) bool { return pf.Address == address })
	if i < 0 {
		return nil
	}
	return &x.Status.PFs[i]
}
