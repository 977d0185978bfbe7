// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestTablesOfQuarantine checks that a quarantined Function is shown in a separate table with the
// reason, and among waiting hooks only until its Port is deleted.
func TestTablesOfQuarantine(t *testing.T) {
	at := time.Unix(1e9, 0).UTC()
	leaks := &nodestate.Attachment{
		State: "Releasing", StoppedAt: at, Hook: &nodestate.Hook{Name: "port", Attempts: 2},
		Quarantine: &nodestate.Quarantine{
			Reason: "MayLeak", Message: "macvlan evil0", Since: at.Add(time.Minute), Attempts: 3,
		},
	}

	states := []*nodestate.State{{Node: "node1", Time: at.Add(11 * time.Minute),
		Functions: []nodestate.Function{
			{ID: function.ID{Address: "0000:3b:01.1"}, Pool: "fast", Attachment: leaks},
			{ID: function.ID{Address: "0000:3b:01.2"}, Pool: "fast",
				Attachment: &nodestate.Attachment{State: "Attached"}},
			{ID: function.ID{Address: "0000:3b:01.3"}, Pool: "fast"},
		}}}

	var out strings.Builder
	must.Succeed(t, quarantineTable(states).Write(&out, false))
	must.Succeed(t, waitingTable(states).Write(&out, false))

	for _, want := range []string{
		"0000:3b:01.1   fast   MayLeak       3 times       10m", "  macvlan evil0",
		"port             2 times   11m",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("tables\n%s\nwant %q", out.String(), want)
		}
	}

	if strings.Contains(out.String(), "01.2") || strings.Contains(out.String(), "01.3") {
		t.Errorf("tables have Functions that are not quarantined:\n%s", out.String())
	}
}
