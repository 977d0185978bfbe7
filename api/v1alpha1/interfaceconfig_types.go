// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Route is a route of the pod through the interface.
type Route struct {
	// To is the destination in CIDR notation; "0.0.0.0/0" or "::/0" is the default route.
	To string `json:"to"`

	// Via is the next hop; absent means that the destination is on the link.
	// +optional
	Via string `json:"via,omitempty"`

	// Metric is the route's priority; lower is better. Absent leaves the kernel's default.
	// +optional
	Metric *int32 `json:"metric,omitempty"`

	// Table is the routing table, 1-2147483647. Absent means the main table. Rules lead to other
	// tables.
	// +optional
	Table *int32 `json:"table,omitempty"`

	// Source is the address that packets on this route have by default. It must be one of the pod's
	// addresses.
	// +optional
	Source string `json:"source,omitempty"`

	// OnLink accepts a next hop that is in no subnet of the interface.
	// +optional
	OnLink *bool `json:"onLink,omitempty"`

	// Scope is "universe", "site", "link" or "host". Absent means link without via, and universe
	// with it.
	// +optional
	Scope string `json:"scope,omitempty"`

	// MTU is the MTU of the route in bytes. Absent means the interface's.
	// +optional
	MTU *int32 `json:"mtu,omitempty"`

	// AdvMSS is the segment size in bytes that TCP advertises on this route. Absent means that it
	// follows from the MTU.
	// +optional
	AdvMSS *int32 `json:"advMSS,omitempty"`
}

// RoutingRule is a rule of the pod's policy routing: packets that match all its fields use a table.
// One of from, to, incoming and outgoing must be given. Without from and to it is for IPv4 and IPv6.
type RoutingRule struct {
	// Priority is the rule's place, 1-32765. Rules are tried from the lowest. The rule of the main
	// table has 32766.
	Priority int32 `json:"priority"`

	// Table is the routing table in which matching packets find their route.
	Table int32 `json:"table"`

	// From is the source of the packets in CIDR notation.
	// +optional
	From string `json:"from,omitempty"`

	// To is the destination of the packets in CIDR notation.
	// +optional
	To string `json:"to,omitempty"`

	// Incoming matches packets that come in by the interface.
	// +optional
	Incoming *bool `json:"incoming,omitempty"`

	// Outgoing matches packets of sockets that are bound to the interface.
	// +optional
	Outgoing *bool `json:"outgoing,omitempty"`
}

// VRF is a routing domain of the pod with a table of its own. The interfaces of a pod that name the
// same VRF are in it together.
type VRF struct {
	// Name is the name of the VRF's own interface in the pod, at most 15 bytes.
	Name string `json:"name"`

	// Table is the routing table of the VRF, 1-2147483647 but for 253-255. It must be the same for
	// all interfaces in the VRF.
	Table int32 `json:"table"`
}

// Bond is a bond of the pod. The Functions of a claim that name the same bond are its ports, and ask
// for the same: they differ in primary alone.
type Bond struct {
	// Name is the name of the bond's own interface in the pod, at most 15 bytes. It must be given.
	// +optional
	Name string `json:"name,omitempty"`

	// Mode is "balance-rr", "active-backup", "balance-xor", "broadcast", "802.3ad", "balance-tlb" or
	// "balance-alb". It must be given. In active-backup each port keeps its own MAC address, and the
	// bond has the address of the active port (fail_over_mac=active). In the other modes the bond
	// gives its own to its ports, which the PF must allow its VFs.
	// +optional
	Mode string `json:"mode,omitempty"`

	// MIIMon is the time between two looks at the carrier of a port in milliseconds, 10-10000. Absent
	// means 100.
	// +optional
	MIIMon *int32 `json:"miimon,omitempty"`

	// XmitHashPolicy says which headers of a packet choose its port: "layer2" (the default),
	// "layer2+3", "layer3+4", "encap2+3", "encap3+4" or "vlan+srcmac". It is for the modes balance-xor
	// and 802.3ad.
	// +optional
	XmitHashPolicy string `json:"xmitHashPolicy,omitempty"`

	// LACPRate is how often the partner sends LACP messages: "slow" (each 30 s, the default) or
	// "fast" (each second). It is for the mode 802.3ad.
	// +optional
	LACPRate string `json:"lacpRate,omitempty"`

	// Primary makes this Function the active port whenever it has a carrier. At most one Function of
	// the bond is the primary one. It is for the modes active-backup, balance-tlb and balance-alb.
	// +optional
	Primary *bool `json:"primary,omitempty"`
}

// Neighbor is a permanent entry of the interface's neighbor table.
type Neighbor struct {
	// Address is the IP address of the neighbor.
	Address string `json:"address"`

	// MAC is its unicast Ethernet address.
	MAC string `json:"mac"`
}

// Offload has the sizes in bytes of the largest packets that the kernel passes to the driver (GSO)
// and takes from it (GRO), 1-524280. More than 65536 is called BIG TCP. Absent fields keep the
// netdev's values.
type Offload struct {
	// GSOMaxSize is the largest packet that the kernel passes to the driver.
	// +optional
	GSOMaxSize *int32 `json:"gsoMaxSize,omitempty"`

	// GROMaxSize is the largest packet that the kernel takes from the driver.
	// +optional
	GROMaxSize *int32 `json:"groMaxSize,omitempty"`

	// GSOIPv4MaxSize is like gsoMaxSize, for IPv4 (Linux 6.3).
	// +optional
	GSOIPv4MaxSize *int32 `json:"gsoIPv4MaxSize,omitempty"`

	// GROIPv4MaxSize is like groMaxSize, for IPv4 (Linux 6.3).
	// +optional
	GROIPv4MaxSize *int32 `json:"groIPv4MaxSize,omitempty"`
}

// Ethtool has settings of the driver, by the names that the kernel has for them. The attachment
// fails before anything is changed if the driver does not have one of them; the error lists those
// that it has.
type Ethtool struct {
	// Features are switched on or off: "tx-tcp-segmentation", "rx-gro", "rx-lro" and others, as
	// ethtool -k prints them, but not its summaries such as "tcp-segmentation-offload".
	// +optional
	Features map[string]bool `json:"features,omitempty"`

	// PrivateFlags are flags that only this driver has.
	// +optional
	PrivateFlags map[string]bool `json:"privateFlags,omitempty"`

	// Channels are numbers of queues: "rx", "tx", "other", "combined".
	// +optional
	Channels map[string]int32 `json:"channels,omitempty"`

	// Rings are lengths of queues in packets: "rx", "tx" and others.
	// +optional
	Rings map[string]int32 `json:"rings,omitempty"`

	// Coalescing says when the card interrupts: "rx-usecs", "rx-frames", "adaptive-rx" (0 or 1) and
	// others.
	// +optional
	Coalescing map[string]int32 `json:"coalescing,omitempty"`

	// Pause are the pause frames: "autoneg", "rx", "tx".
	// +optional
	Pause map[string]bool `json:"pause,omitempty"`

	// RSS says how the card spreads received packets over its queues (receive side scaling).
	// +optional
	RSS *RSS `json:"rss,omitempty"`
}

// RSS has what ethtool -x shows. Absent fields keep the netdev's values.
type RSS struct {
	// Equal is the number of queues, from the first one, among which packets are spread in equal
	// shares, 1-1024. It is not for use with weights.
	// +optional
	Equal *int32 `json:"equal,omitempty"`

	// Weights are the shares of up to 1024 queues, from the first one, 0-65535: with [3, 1] the first
	// queue gets three of four packets. Their sum is at most the length of the card's table.
	// +optional
	Weights []int32 `json:"weights,omitempty"`

	// HashKey is the key of the hash in hexadecimal, "6d:5a:56:da", as long as the card's key.
	// +optional
	HashKey string `json:"hashKey,omitempty"`

	// HashFunction is "toeplitz", "xor" or "crc32".
	// +optional
	HashFunction string `json:"hashFunction,omitempty"`
}

// VFConfig is what the PF enforces for a VF (IFLA_VF_* in linux/if_link.h). If the PF's driver does
// not support a setting, the attachment fails with the driver's answer. Absent fields keep the
// administrator's settings.
type VFConfig struct {
	// VLAN is the tag that the PF adds and strips, 1-4094; 0 removes the tag.
	// +optional
	VLAN *int32 `json:"vlan,omitempty"`

	// QoS is the 802.1p priority of the tag, 0-7. It needs vlan.
	// +optional
	QoS *int32 `json:"qos,omitempty"`

	// VLANProtocol is "802.1q" (the default) or "802.1ad". It needs vlan.
	// +optional
	VLANProtocol string `json:"vlanProtocol,omitempty"`

	// Trust lets the VF change its MAC address and be promiscuous.
	// +optional
	Trust *bool `json:"trust,omitempty"`

	// SpoofCheck drops frames that the VF sends from another MAC address.
	// +optional
	SpoofCheck *bool `json:"spoofCheck,omitempty"`

	// MinTxRate is the guaranteed rate in Mbit/s; 0 removes the guarantee.
	// +optional
	MinTxRate *int32 `json:"minTxRate,omitempty"`

	// MaxTxRate is the highest rate in Mbit/s; 0 removes the limit.
	// +optional
	MaxTxRate *int32 `json:"maxTxRate,omitempty"`

	// LinkState is "auto", "enable" or "disable".
	// +optional
	LinkState string `json:"linkState,omitempty"`

	// NodeGUID is the GUID of the VF's RDMA device, "00:11:22:33:44:55:66:77", for the VF of an
	// InfiniBand PF. The PF must report the one that the VF has, so that it can be given back.
	// +optional
	NodeGUID string `json:"nodeGUID,omitempty"`

	// PortGUID is the GUID of the VF's port, as nodeGUID. The subnet manager knows the VF by it.
	// +optional
	PortGUID string `json:"portGUID,omitempty"`
}

// InterfaceNetwork is a network whose frames have a VLAN tag at the Function.
type InterfaceNetwork struct {
	// Name is the XPUNetwork to join.
	Name string `json:"name"`

	// Addresses are IP addresses with prefix length, "10.1.0.5/24", inside the network's subnets.
	// Absent means that one address of each of the network's subnets is assigned.
	// +optional
	Addresses []string `json:"addresses,omitempty"`

	// InterfaceName is the name of a VLAN interface in the pod, at most 15 bytes. It has the
	// network's tag, MTU and addresses. Absent means that the pod makes one itself, if it needs one.
	// With driver it must be absent.
	// +optional
	InterfaceName string `json:"interfaceName,omitempty"`
}

// InterfaceConfig is what a pod asks of one interface. It is given as opaque parameters of driver
// xpu.opiproject.org in a ResourceClaim, a ResourceClaimTemplate or a DeviceClass. A field in the
// claim overrides the same field in the class; of vf, bond, offload, ethtool and sysctls each setting
// is such a field. Unknown fields are refused.
//
// +kubebuilder:object:root=true
type InterfaceConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Network is the XPUNetwork to join. If both network and networks are absent, it is the
	// DevicePool's network.
	// +optional
	Network string `json:"network,omitempty"`

	// Networks are up to 64 XPUNetworks to join with VLAN tags, instead of network. The pod has a
	// VLAN interface for each that has an interfaceName, and makes others itself: the XPUPort's
	// status.networks has the tags. The fields addresses, routes, rules, neighbors, vrf, bond and
	// vf.vlan must be absent. What the claim gives of network and networks replaces both of the class;
	// with networks it also replaces these fields, but for bond and vf.vlan.
	// +optional
	Networks []InterfaceNetwork `json:"networks,omitempty"`

	// InterfaceName is the name in the pod, at most 15 bytes without "/" or white space. Absent
	// means "net1", "net2", ... in the order of the pod's devices.
	// +optional
	InterfaceName string `json:"interfaceName,omitempty"`

	// MTU is the MTU in bytes, 68-9216, and at most the network's MTU.
	// +optional
	MTU *int32 `json:"mtu,omitempty"`

	// MAC is a unicast Ethernet address, "02:00:00:00:00:01". Absent means an address that is derived
	// from claim, node and Function. An InfiniBand Function has none: see vf.portGUID.
	// +optional
	MAC string `json:"mac,omitempty"`

	// Addresses are IP addresses with prefix length, "10.1.0.5/24", inside the network's subnets.
	// Absent means that one address of each of the network's subnets is assigned.
	// +optional
	Addresses []string `json:"addresses,omitempty"`

	// Routes are added once the interface is up.
	// +optional
	Routes []Route `json:"routes,omitempty"`

	// AllMulticast makes the interface receive every multicast frame (IFF_ALLMULTI). Multicast
	// routing daemons need that, and programs that answer Neighbor Discovery themselves. Some
	// drivers also require vf.trust.
	// +optional
	AllMulticast *bool `json:"allMulticast,omitempty"`

	// Rules are up to 64 rules of policy routing, for the tables of routes. They are removed with
	// the interface.
	// +optional
	Rules []RoutingRule `json:"rules,omitempty"`

	// Neighbors are up to 256 permanent entries of the neighbor table.
	// +optional
	Neighbors []Neighbor `json:"neighbors,omitempty"`

	// VRF puts the interface into a VRF, which is made if the pod does not have it, and removed with
	// its last interface. Routes without table are in the table of the VRF. The node's kernel must
	// have VRFs (CONFIG_NET_VRF).
	// +optional
	VRF *VRF `json:"vrf,omitempty"`

	// Bond makes the interface a port of a bond, which is made if the pod does not have it, and removed
	// with its last Function. The bond then has addresses, routes, rules, neighbors, vrf,
	// allMulticast and sysctls, and IFNAME stands for it. The Function must not join a network. The
	// node's kernel must have bonds (CONFIG_BONDING).
	// +optional
	Bond *Bond `json:"bond,omitempty"`

	// Sysctls are settings of the interface in the pod's network namespace by name, such as
	// "net.ipv4.conf.IFNAME.arp_ignore", where IFNAME stands for the interface. The names that can
	// be set are in [Configure an interface](../how-to/configure-interface.md#sysctls).
	// +optional
	Sysctls map[string]string `json:"sysctls,omitempty"`

	// Offload has the sizes of the largest packets between kernel and driver.
	// +optional
	Offload *Offload `json:"offload,omitempty"`

	// Ethtool has settings of the driver. They are given back when the pod ends, as all others.
	// +optional
	Ethtool *Ethtool `json:"ethtool,omitempty"`

	// VF is what the PF enforces. For an SF, and for a VF in eswitch mode switchdev, minTxRate and
	// maxTxRate are a rate object of the eswitch (devlink-rate). The other fields do not apply to
	// an SF.
	// +optional
	VF *VFConfig `json:"vf,omitempty"`

	// Driver is bound to the Function while the pod has it; absent means the DevicePool's driver.
	// With vfio-pci and its variants the container gets the Function's IOMMU group, and there is no interface: only
	// network, networks, mac, addresses and vf may be given, and addresses are only reported to the
	// pod.
	// +optional
	Driver FunctionDriver `json:"driver,omitempty"`
}
