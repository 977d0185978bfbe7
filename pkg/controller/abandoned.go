// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

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
func (r *ports) giveUp(port *v1alpha1.XPUPort, why string) {
	const note = "Function %s is given up (spec.abandonedFunctions of XPU %s), so the Port goes " +
		"although its port may be there: %s"
	r.Events.Eventf(port, nil, corev1.EventTypeWarning, v1alpha1.ReasonAbandoned, "Release",
		note, claim.FunctionOf(port.Spec.Function), port.Spec.XPU, why)
}

// maxNamed bounds how many Functions a condition names.
const maxNamed = 10

// setFunctionsCondition names the XPU's Functions that were given up in a condition of the XPU.
func setFunctionsCondition(xpu *v1alpha1.XPU) {
	given := xpu.Spec.AbandonedFunctions
	if len(given) == 0 {
		meta.RemoveStatusCondition(&xpu.Status.Conditions, v1alpha1.ConditionFunctions)
		return
	}

	names := strings.Join(given[:min(len(given), maxNamed)], ", ")
	if len(given) > maxNamed {
		names += fmt.Sprintf(" and %d more", len(given)-maxNamed)
	}

	message := names +
		": given up, and kept from pods; once the OPI agent has no ports of them any " +
		"more, take them from spec.abandonedFunctions"
	meta.SetStatusCondition(&xpu.Status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionFunctions, xpu.Generation,
			v1alpha1.ReasonAbandoned, message))
}
