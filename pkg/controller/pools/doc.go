// SPDX-License-Identifier: Apache-2.0

// Package pools sums up each DevicePool in its status: what the nodes' agents found for it.
package pools
