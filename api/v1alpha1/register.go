// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the API group, the name of the DRA driver and the prefix of extended resources,
// attributes, labels and conditions.
const GroupName = "xpu.opiproject.org"

// SchemeGroupVersion is the group and version of every kind in this package.
var SchemeGroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1alpha1"}

// AddToScheme registers every kind of this package in a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(SchemeGroupVersion,
		&DevicePool{}, &DevicePoolList{},
		&XPU{}, &XPUList{},
		&XPUNetwork{}, &XPUNetworkList{},
		&XPUNode{}, &XPUNodeList{},
		&XPUPort{}, &XPUPortList{},
		&XPUTenant{}, &XPUTenantList{},
		&InterfaceConfig{},
	)

	metav1.AddToGroupVersion(scheme, SchemeGroupVersion)
	return nil
}
