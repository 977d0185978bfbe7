// SPDX-License-Identifier: Apache-2.0

// Package bridge is an OPI agent for xPUs that run plain Linux.
//
// A LogicalBridge is a VLAN of one Linux bridge, or a bridge of its own where the kernel cannot
// filter VLANs (see [DataPlane]). If it has a VNI it also has a VXLAN port on the uplink. A
// BridgePort is a representor in that bridge, found by name or by the PCI address in the port's id.
// The agent keeps in a file what clients asked for, and brings the data plane to it at each start
// and whenever a netdev changes. The data plane stays as it is when the agent stops.
package bridge
