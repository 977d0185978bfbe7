// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 holds the API of xpu-device-plugin: what an administrator declares (DevicePool,
// XPU, XPUNetwork), what the controller keeps for every provisioned Function (XPUPort), and what a
// pod asks of its interface (InterfaceConfig, carried as opaque parameters in ResourceClaims and
// DeviceClasses).
//
// +kubebuilder:object:generate=true
// +groupName=xpu.opiproject.org
package v1alpha1
