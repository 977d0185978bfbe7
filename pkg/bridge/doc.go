// Package bridge is an OPI agent for xPUs that run plain Linux.
//
// A LogicalBridge is a VLAN of one Linux bridge, or a bridge of its own where the kernel cannot filter VLANs (see
// [DataPlane]). If it has a VNI it also has a VXLAN port on the uplink. A BridgePort is a representor in that bridge: the
// netdev whose name or alternative name is the port's id, or else the netdev that by devlink or phys_port_name belongs to
// the Function whose PCI address is in the id. The agent keeps in a file what clients asked for, and brings the data plane
// to it at each start and whenever a netdev changes. The data plane stays as it is when the agent stops.
package bridge
