// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// isGivenUp reports whether an administrator has given up the Port's Function. Only the XPU's spec
// can say so, because no tenant may write it.
func isGivenUp(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) bool {
	f := claim.FunctionOf(port.Spec.Function)
	return xpu != nil && slices.Contains(xpu.Spec.AbandonedFunctions, f.String())
}

// keptFromPods is the refusal of a Port whose Function was given up.
func keptFromPods(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) error {
	const format = "Function %s of XPU %s is given up, because the xPU may still serve a port of " +
		"it; once that port is gone, take the Function from spec.abandonedFunctions"
	f := claim.FunctionOf(port.Spec.Function)
	return reconciling.Refuse(v1alpha1.ReasonAbandoned, format, f, xpu.Name)
}

// giveUp releases a Port although the agent does not confirm that the port is gone. why is the
// agent's answer.
func (r *reconciler) giveUp(port *v1alpha1.XPUPort, why string) {
	const note = "Function %s is given up (spec.abandonedFunctions of XPU %s), so the Port goes " +
		"although its port may be there: %s"
	r.Events.Eventf(port, nil, corev1.EventTypeWarning, v1alpha1.ReasonAbandoned, "Release",
		note, claim.FunctionOf(port.Spec.Function), port.Spec.XPU, why)
}
