// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

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
