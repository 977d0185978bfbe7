// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// Condition returns the condition InventoryVerified of the node's XPUNode. known is false before
// the first comparison.
func (v *Verifier) Condition() (c metav1.Condition, known bool) {
	last := v.Last()
	if last == nil {
		return c, false
	}
	return condition(last), true
}

// condition leaves out how many properties were compared, which changes with each pod.
func condition(v *nodestate.Verification) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionInventoryVerified}
	const again = `run "xpuctl discover --verify" on the node`
	switch {
	case v.Skipped != "":
		c.Status, c.Reason = metav1.ConditionUnknown, v1alpha1.ReasonNotVerified
		c.Message = fmt.Sprintf("there is no result: %s; to compare again, %s", v.Skipped, again)
	case v.Different > 0:
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonDifferent
		c.Message = fmt.Sprintf("%s; to see how each can be decided, %s, and report the card",
			firstOf(v), again)
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonVerified
		c.Message = "sriovnet, which reads the same kernel by other code, says nothing else about " +
			"the Functions of this node, as far as it knows their properties; to see which are " +
			"unknown, " + again
	}

	return c
}

// firstOf describes the first difference, and counts the others.
func firstOf(v *nodestate.Verification) string {
	first := v.Differences[0]
	text := fmt.Sprintf("Function %s: %s is %s in the inventory, and %s by sriovnet",
		first.Function, first.Property, first.Inventory, first.Sriovnet)
	if v.Different > 1 {
		text += fmt.Sprintf("; %d more properties differ", v.Different-1)
	}
	return text
}
