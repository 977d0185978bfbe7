// SPDX-License-Identifier: Apache-2.0

// Package inspect shows people the xpu-device-plugin objects of a cluster, and their problems.
package inspect
