// Package bridge is an OPI agent for xPUs that run plain Linux.
//
// A LogicalBridge is a VLAN of one Linux bridge, or a bridge of its own where the kernel cannot filter VLANs (see
// [DataPlane]), with a VXLAN port on the uplink if it has a VNI. A BridgePort is a representor as a port of that bridge:
// the netdev whose name or alternative name is the port's id, or else the one that devlink or phys_port_name says is for
// the Function whose PCI address is in the id. What clients asked for is kept in a file, and the data plane is brought
// to it again at each start and whenever a netdev changes; it stays as it is when the agent stops.
package bridge
