// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"cmp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Dialect is how an OPI agent names and answers; agents differ where the OPI API leaves room.
// +kubebuilder:validation:Enum=evpn-gw
type Dialect string

// DialectEVPNGW is spoken by opi-evpn-bridge and by opi-bridge.
const DialectEVPNGW Dialect = "evpn-gw"

// LabelAgents is on Services whose endpoints are OPI agents, one on each node that is an xPU:
// xpu-controller makes an XPU of the name of the node for each. Its value there counts for nothing;
// on these XPUs it is the name of the Service.
const LabelAgents = GroupName + "/opi-agents"

// Annotations of such a Service, which say how the agents are reached.
const (
	// AnnotationTLSSecret is spec.tls.secretName of the XPUs; opi-client if it is absent.
	AnnotationTLSSecret = GroupName + "/tls-secret"
	// AnnotationServerName is spec.tls.serverName: the name in the certificate that all the agents
	// have.
	AnnotationServerName = GroupName + "/server-name"
	// AnnotationInsecure is "true" for agents without TLS.
	AnnotationInsecure = GroupName + "/insecure"
)

// XPUTLS says where the controller finds its credentials for an OPI agent.
type XPUTLS struct {
	// SecretName names a Secret of type kubernetes.io/tls in the controller's namespace with
	// tls.crt, tls.key (the client's) and ca.crt (the agent's CA).
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	SecretName string `json:"secretName"`

	// ServerName is the name in the agent's certificate, if it is not the host of the endpoint.
	// +optional
	ServerName string `json:"serverName,omitempty"`
}

// XPUSpec says where an xPU is and how it is reached.
// +kubebuilder:validation:XValidation:rule="!has(self.endpoint) || has(self.tls) != (has(self.insecure) && self.insecure)",message="set tls, or insecure: true if the way to the agent is protected otherwise"
// +kubebuilder:validation:XValidation:rule="has(self.endpoint) || !has(self.tls) && !(has(self.insecure) && self.insecure)",message="tls and insecure are for an endpoint: set endpoint too"
type XPUSpec struct {
	// NodeName is the node that has the card. Absent, it is the node whose card the OPI agent says
	// that it serves: see the condition Card.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`

	// PFs are the PCI addresses of the card's PFs on that node, "dddd:bb:dd.f". Empty means those
	// that the OPI agent says that it serves; or, if the agent does not tell and nodeName is set,
	// every PF of the node: right for nodes with one card.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`
	PFs []string `json:"pfs,omitempty"`

	// Endpoint is the OPI agent's address, "host:port". An IPv6 address may have a zone:
	// "[fe80::1%eth0]:50151". An XPU without it is served by an infra cluster: the broker made it.
	// +optional
	// +kubebuilder:validation:Pattern=`^(\[[0-9a-fA-F:.]+(%[A-Za-z0-9._-]{1,15})?\]|[A-Za-z0-9.-]+):[0-9]{1,5}$`
	Endpoint string `json:"endpoint,omitempty"`

	// Dialect is the OPI agent's.
	// +optional
	// +kubebuilder:default=evpn-gw
	Dialect Dialect `json:"dialect,omitempty"`

	// TLS is how the controller and the agent know each other (mutual TLS).
	// +optional
	TLS *XPUTLS `json:"tls,omitempty"`

	// Insecure allows a connection without TLS.
	// +optional
	Insecure bool `json:"insecure,omitempty"`

	// Abandon gives the xPU up, for one that will not answer any more: its XPUPorts go without the
	// agent being asked. Their Functions stay tainted until the agent is back and has let go of the
	// ports, or the XPU is deleted, which says that the card is gone.
	// +optional
	Abandon bool `json:"abandon,omitempty"`

	// AbandonedFunctions gives single Functions up, whose ports the OPI agent cannot delete, such
	// as when it has lost a representor: "0000:3b:02.1", or "0000:3b:00.0/sf88" for an SF. Their
	// XPUPorts go although the agent does not say that the port is gone. The Functions stay
	// tainted, and get no Port, until they are taken from the list, which says that their ports are
	// gone.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=32
	// +kubebuilder:validation:items:Pattern=`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](/sf[0-9]{1,10})?$`
	AbandonedFunctions []string `json:"abandonedFunctions,omitempty"`
}

// MaxForeignExamples bounds XPUForeign.Examples.
const MaxForeignExamples = 5

// XPUForeign is what an OPI agent has that is not known to be this cluster's. It stays as it is.
type XPUForeign struct {
	// Ports is how many ports the agent has in others' networks.
	// +optional
	Ports int32 `json:"ports"`

	// Networks is how many networks of others it has.
	// +optional
	Networks int32 `json:"networks"`

	// Unknown is how many ports it has of which it does not tell whose they are.
	// +optional
	Unknown int32 `json:"unknown,omitempty"`

	// Examples are some of all these, at most 5: "port vf-0000-3b-02-1", "network net-blue (VLAN
	// 10)".
	// +optional
	// +listType=atomic
	Examples []string `json:"examples,omitempty"`
}

// XPUPF is a PF that the xPU serves.
type XPUPF struct {
	// Address is its PCI address on the node, "dddd:bb:dd.f".
	// +kubebuilder:validation:MaxLength=32
	Address string `json:"address"`

	// Name is how the xPU's eswitch calls it, "c1pf0": the phys_port_name of its representor. Ports
	// of its Functions have ids at the OPI agent that begin with it.
	// +kubebuilder:validation:MaxLength=32
	Name string `json:"name"`

	// VFOffset, VFStride and TotalVFs are those of the XPUNode: VF i, less than TotalVFs, has the
	// routing ID of the PF plus VFOffset plus i times VFStride.
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

// XPUStatus is what the controller knows of the xPU.
type XPUStatus struct {
	// NodeName is the node that has the card: that of the spec, or else the one that was found by
	// what the OPI agent tells.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`

	// Endpoint is spec.endpoint once the OPI agent there has answered; names are in lower case.
	// While the spec says the same, no other XPU gets this agent. It is absent while another XPU
	// has the agent.
	// +optional
	// +kubebuilder:validation:MaxLength=320
	Endpoint string `json:"endpoint,omitempty"`

	// Serial is the card's serial number, if the OPI agent tells it.
	// +optional
	// +kubebuilder:validation:MaxLength=255
	Serial string `json:"serial,omitempty"`

	// PFs are those PFs of the node that the OPI agent says that it serves, at most 64.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=address
	PFs []XPUPF `json:"pfs,omitempty"`

	// Foreign is what the agent has that is not this cluster's; absent if it has nothing.
	// +optional
	Foreign *XPUForeign `json:"foreign,omitempty"`

	// Conditions has Ready: True (Connected) while the OPI agent answers; and Card: True (Found) if
	// the card that the agent says that it serves is that of the node.
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

// Node is the node that has the card, "" while that is not known.
func (x *XPU) Node() string { return cmp.Or(x.Spec.NodeName, x.Status.NodeName) }

// Serves says whether the xPU serves a PF of its node, by its PCI address.
func (x *XPU) Serves(pf string) bool {
	if len(x.Spec.PFs) > 0 {
		return slices.Contains(x.Spec.PFs, pf)
	}
	return !x.NamesPFs() || x.PF(pf) != nil
}

// NamesPFs says whether the xPU serves certain PFs, and not just those of its node.
func (x *XPU) NamesPFs() bool { return len(x.Spec.PFs)+len(x.Status.PFs) > 0 }

// PF is what is known of a PF that the OPI agent says that it serves, by its PCI address; nil for
// others.
func (x *XPU) PF(address string) *XPUPF {
	i := slices.IndexFunc(x.Status.PFs, func(pf XPUPF) bool { return pf.Address == address })
	if i < 0 {
		return nil
	}
	return &x.Status.PFs[i]
}
