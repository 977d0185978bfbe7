// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is the API of xpu-device-plugin. An administrator declares DevicePools, XPUs and
// XPUNetworks. The controller keeps an XPUPort for every provisioned Function. An InterfaceConfig
// is what a pod asks of its interface; it is carried as opaque parameters in ResourceClaims and
// DeviceClasses.
//
// +kubebuilder:object:generate=true
// +groupName=xpu.opiproject.org
package v1alpha1
