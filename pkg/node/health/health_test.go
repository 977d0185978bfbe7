// SPDX-License-Identifier: Apache-2.0

package health

import (
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestProblems(t *testing.T) {
	sick := function.ID{Address: "0000:3b:00.2"}
	only := func(message string) Source {
		return func(id function.ID) string {
			if id == sick {
				return message
			}
			return ""
		}
	}

	all := &Checker{
		XPUAway: func(f function.Function) string {
			if f.PF == "0000:3b:00.0" && !f.LinkUp {
				return "the xPU does not answer"
			}
			return ""
		},
		Fault: func(f function.Function) string {
			if f.PF == "0000:3b:00.0" {
				return "the driver tells an error"
			}
			return ""
		},
		ProvisionFailed: only("the xPU refused it"), ReleasePending: only("it is not back"),
		Quarantined: only("it leaks"), Lost: only("a pod lost it"), InUse: only("a pod has it"),
	}

	for _, test := range []struct {
		name     string
		checker  *Checker
		function function.Function
		want     []function.Problem
	}{
		{"healthy", all, function.Function{ID: function.ID{Address: "0000:3b:00.3"}, LinkUp: true},
			nil},
		{"no link", all, function.Function{
			ID: function.ID{Address: "0000:3b:00.3"}, PF: "0000:3b:00.1", PFName: "ens3f0",
		},
			[]function.Problem{
				{Taint: v1alpha1.TaintLinkDown, Message: "PF ens3f0 (0000:3b:00.1)"},
			}},
		{"everything", all, function.Function{ID: sick, PF: "0000:3b:00.0"}, []function.Problem{
			{Taint: v1alpha1.TaintLinkDown, Message: "0000:3b:00.0"},
			{Taint: v1alpha1.TaintFault, Message: "the driver tells an error"},
			{Taint: v1alpha1.TaintXPUAway, Message: "the xPU does not answer"},
			{Taint: v1alpha1.TaintProvisionFailed, Message: "the xPU refused it"},
			{Taint: v1alpha1.TaintReleasePending, Message: "it is not back"},
			{Taint: v1alpha1.TaintQuarantined, Message: "it leaks"},
			{Taint: v1alpha1.TaintLost, Message: "a pod lost it"},
			{Taint: v1alpha1.TaintInUse, Message: "a pod has it"},
		}},
		{"no sources", &Checker{}, function.Function{ID: sick, PF: "0000:3b:00.0", LinkUp: true},
			nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := test.checker.Problems(test.function)
			if len(got) != len(test.want) {
				t.Fatalf("Problems = %+v, want %+v", got, test.want)
			}

			for i, want := range test.want {
				if got[i].Taint != want.Taint || !strings.Contains(got[i].Message, want.Message) {
					t.Errorf("problem %d is %+v, want taint %s and %q in the message", i, got[i],
						want.Taint, want.Message)
				}
			}
		})
	}
}
