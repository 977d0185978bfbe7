// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

func TestStatus(t *testing.T) {
	for _, test := range []struct {
		name   string
		qemu   int
		status int
		ok     bool
	}{
		{"guest's success", (plan.Offset+0)<<1 | 1, 0, true},
		{"guest's failure", (plan.Offset+1)<<1 | 1, 1, true},
		{"largest", (plan.Offset+plan.MaxStatus)<<1 | 1, plan.MaxStatus, true},
		{"power off", 0, 0, false},
		{"QEMU's failure", 1, 0, false},
		{"killed", -1, 0, false},
		{"another program's", 34, 0, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			status, ok := plan.Status(test.qemu)
			if ok != test.ok || ok && status != test.status {
				t.Errorf("got %d, %v; want %d, %v", status, ok, test.status, test.ok)
			}
		})
	}
}

func FuzzParseEvent(f *testing.F) {
	f.Add(plan.Event{Kind: plan.Ready, Uptime: 3 * time.Second, Name: "6.12"}.String())
	f.Add(plan.Event{Kind: plan.End, Status: 1, Uptime: time.Millisecond, Name: "link"}.String())
	f.Add("@@ exit x 1 y")
	f.Add("--- PASS: TestX (0.00s)")

	f.Fuzz(func(t *testing.T, line string) {
		e, ok := plan.ParseEvent(line)
		if !ok {
			return
		}
		if again, ok := plan.ParseEvent(e.String()); !ok || again != e {
			t.Errorf("%q is %+v, and read again %+v, %v", line, e, again, ok)
		}
	})
}
