// SPDX-License-Identifier: Apache-2.0

// Package bridge has the parts of opi-bridge, an OPI agent for xPUs that run plain Linux, and the
// tests of the agent as a whole.
//
// A client asks for networks (LogicalBridge) and ports (BridgePort), and for gateways of networks
// (Svi) in routing domains (Vrf). Each part uses only the parts below it:
//
//   - service serves the OPI APIs, keeps what clients asked for in a state file, and brings the
//     data plane to it at each start and whenever a netdev changes.
//   - access knows clients by their certificates, and decides what each of them may see and change.
//     inventory describes the xPU.
//   - plane is the data plane: it makes a network as a VLAN of a Linux bridge, or as a bridge of
//     its own, with a VXLAN port on the uplink if the network has a VNI. It puts ports into
//     networks, and makes a gateway as a netdev of the network in a VRF.
//   - representor finds the netdev of a port. sourcefilter drops what ports send with a false
//     source address, and keeps them from the xPU itself.
package bridge
