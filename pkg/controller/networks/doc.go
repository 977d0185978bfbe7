// SPDX-License-Identifier: Apache-2.0

// Package networks has OPI agents serve each network at the xPUs where Ports need it.
//
// The [Catalog] says which networks Ports may join. A network at one xPU is a [Bridge]; it is made
// for the first Port there and deleted after the last.
package networks
