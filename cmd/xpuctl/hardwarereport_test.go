// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// TestHardwareReportRefuses checks that a Function in use, or available to pods, is never touched.
func TestHardwareReportRefuses(t *testing.T) {
	free := nodestate.Function{
		ID: function.ID{Address: "0000:3b:02.7"}, Kind: function.VF,
		PF: "0000:3b:00.0", PFName: "ens1f0", Netdev: "no-such-netdev",
	}

	for name, c := range map[string]struct {
		change func(*nodestate.Function)
		want   string
	}{
		"in a pod": {func(f *nodestate.Function) {
			pod := nodestate.Pod{Namespace: "default", Name: "web"}
			f.Attachment = &nodestate.Attachment{State: "Attached", Pod: pod}
		}, "is Attached in pod default/web"},
		"in a pool": {func(f *nodestate.Function) {
			f.Pool = "fast"
		}, "belongs to DevicePool fast"},
		"PF":   {func(f *nodestate.Function) { f.Kind = function.PF }, "is no VF"},
		"gone": {func(f *nodestate.Function) { f.Gone = true }, "is not there"},
		"no netdev": {func(f *nodestate.Function) {
			f.Netdev, f.Driver = "", "vfio-pci"
		}, `its driver is "vfio-pci"`},
		"default route": {func(f *nodestate.Function) { f.DefaultRoute = true }, "default route"},
		"problem": {func(f *nodestate.Function) {
			f.Problems = []nodestate.Problem{{Message: "kept from others"}}
		}, "kept from others"},
		"not seen": {func(*nodestate.Function) {}, "cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			f := free
			c.change(&f)
			state := &nodestate.State{Functions: []nodestate.Function{f}}
			_, err := chooseVF(state, "0000:3b:02.7")
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}

	if _, err := chooseVF(&nodestate.State{}, "0000:3b:02.7"); err == nil {
		t.Error("a Function that is not there is chosen")
	}
}
