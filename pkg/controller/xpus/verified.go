// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// setVerifiedCondition says in a condition of the XPU what it costs that agents of its dialect do
// not report their ports.
func setVerifiedCondition(xpu *v1alpha1.XPU) {
	traits, known := traitsOf(xpu)
	if !known || traits.Verifies {
		meta.RemoveStatusCondition(&xpu.Status.Conditions, v1alpha1.ConditionVerified)
		return
	}

	meta.SetStatusCondition(&xpu.Status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionVerified, xpu.Generation,
			v1alpha1.ReasonNotReported, "OPI agents of dialect "+string(xpu.Spec.Dialect)+
				" do not report their ports: XPUPorts are Up because the agent accepted them, "+
				"ports of others and of deleted XPUPorts are not found, and nobody notices if the "+
				"agent loses a port while its connection stays"))
}

// traitsOf returns what agents of the XPU's dialect can do. known is false for an XPU that another
// cluster's controller serves, or with a dialect that does not exist.
func traitsOf(xpu *v1alpha1.XPU) (traits opi.Traits, known bool) {
	dialect, err := dialects.Named(string(xpu.Spec.Dialect))
	return dialect.Traits, err == nil && xpu.Spec.Endpoint != ""
}
