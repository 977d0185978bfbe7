// SPDX-License-Identifier: Apache-2.0

// Package addresses gives Ports their Functions, MAC addresses and IP addresses.
//
// The [Allocator] has a book of addresses for each network, which follows the model of Ports. It
// reserves what a Port gets before the Port exists, so that no two Ports get the same.
package addresses
