// SPDX-License-Identifier: Apache-2.0

// Package inspect tells people what a cluster has of xpu-device-plugin, and what is wrong with it.
package inspect
