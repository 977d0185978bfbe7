// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestEswitchPort(t *testing.T) {
	pfs := []v1alpha1.XPUPF{
		{Address: "0000:3b:00.0", Name: "c1pf0", VFOffset: 2, VFStride: 2, TotalVFs: 2},
		{Address: "0000:3b:00.1", Name: "c1pf1", VFOffset: 2, VFStride: 2, TotalVFs: 2},
		{Address: "0000:5e:00.0", Name: "pf0"},
	}
	for f, want := range map[function.ID]string{
		{Address: "0000:3b:00.0"}:                  "c1pf0",
		{Address: "0000:3b:00.2"}:                  "c1pf0vf0",
		{Address: "0000:3b:00.3"}:                  "c1pf1vf0",
		{Address: "0000:3b:00.5"}:                  "c1pf1vf1",
		function.SubfunctionID("0000:3b:00.1", 88): "c1pf1sf88",
		function.SubfunctionID("0000:5e:00.0", 8):  "pf0sf8",
		{Address: "0000:5e:00.0"}:                  "", // too short for an id
		{Address: "0000:3b:00.7"}:                  "", // c1pf1 has two VFs at most
		{Address: "0000:5e:00.1"}:                  "",
		{Address: "0000:5f:00.0"}:                  "",
	} {
		if got := eswitchPort(pfs, f); got != want {
			t.Errorf("%s: %q, want %q", f, got, want)
		}
	}
}
