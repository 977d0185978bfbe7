// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

func TestCondition(t *testing.T) {
	difference := nodestate.Difference{
		Function: function.ID{Address: vf}, Property: "vf-index", Inventory: "0", Sriovnet: "4",
	}
	for name, test := range map[string]struct {
		last   nodestate.Verification
		status metav1.ConditionStatus
		reason string
		want   string
	}{
		"same": {nodestate.Verification{Same: 7, Unknown: 3}, metav1.ConditionTrue,
			v1alpha1.ReasonVerified, "sriovnet, which reads the same kernel by other code, says " +
				"nothing else about the Functions of this node, as far as it knows"},
		"one difference": {nodestate.Verification{
			Same: 7, Different: 1, Differences: []nodestate.Difference{difference},
		}, metav1.ConditionFalse, v1alpha1.ReasonDifferent, "Function 0000:3b:00.2: vf-index is 0 " +
			"in the inventory, and 4 by sriovnet; to see how each can be decided, run \"xpuctl " +
			"discover --verify\" on the node, and report the card"},
		"many differences": {nodestate.Verification{
			Different: 300, Differences: []nodestate.Difference{difference, difference},
		}, metav1.ConditionFalse, v1alpha1.ReasonDifferent, "; 299 more properties differ; to see"},
		"nothing compared": {nodestate.Verification{Skipped: "no card"}, metav1.ConditionUnknown,
			v1alpha1.ReasonNotVerified, "there is no result: no card; to compare again, run"},
	} {
		v := NewVerifier(Options{})
		if got, known := v.Condition(); known {
			t.Errorf("before the first comparison: %+v", got)
		}

		v.last = &test.last
		got, known := v.Condition()
		if !known || got.Type != "InventoryVerified" || got.Status != test.status ||
			got.Reason != test.reason || !strings.Contains(got.Message, test.want) {
			t.Errorf("%s: %+v, want %s %s %q", name, got, test.status, test.reason, test.want)
		}
	}
}
