// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestNamedPFs(t *testing.T) {
	functions := []function.Function{
		{ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF, PF: "0000:3b:00.0",
			PFName: "ens3f0", Vendor: "15b3", Device: "a2dc"},
		{ID: function.ID{Address: "0000:3b:00.1"}, Kind: function.PF, PF: "0000:3b:00.1",
			PFName: "ens3f1", Vendor: "15b3", Device: "a2dc"},
		{ID: function.ID{Address: "0000:3b:00.2"}, Kind: function.VF, PF: "0000:3b:00.0",
			PFName: "ens3f0", Vendor: "15b3", Device: "101e"},
	}
	for name, c := range map[string]struct {
		selectors []v1alpha1.FunctionSelector
		err       error
		want      []string
	}{
		"by name, with indexes": {
			selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"ENS3F0#2-3", "ens9"}}},
			want:      []string{"ens3f0"},
		},
		"by address": {
			selectors: []v1alpha1.FunctionSelector{
				{RootDevices: []string{"0000:3b:00.1#0", "0000:3B:00.0"}},
			},
			want: []string{"ens3f0", "ens3f1"},
		},
		"by both, which differ": {
			selectors: []v1alpha1.FunctionSelector{
				{PFNames: []string{"ens3f0"}, RootDevices: []string{"0000:3b:00.1"}},
			},
		},
		"by several selectors": {
			selectors: []v1alpha1.FunctionSelector{
				{PFNames: []string{"ens3f1"}}, {PFNames: []string{"ens3f0"}},
			},
			want: []string{"ens3f0", "ens3f1"},
		},
		"what is said about VFs": {
			selectors: []v1alpha1.FunctionSelector{{
				PFNames: []string{"ens3f0"}, Vendors: []string{"15B3"}, Devices: []string{"101e"},
				Drivers: []string{"vfio-pci"},
			}},
			want: []string{"ens3f0"},
		},
		"of another vendor": {
			selectors: []v1alpha1.FunctionSelector{
				{PFNames: []string{"ens3f0"}, Vendors: []string{"8086"}},
			},
		},
		"not by name": {selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}},
		"in a broken pool": {selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f0"}}},
			err: errors.New("broken")},
	} {
		t.Run(name, func(t *testing.T) {
			p := Pool{Spec: v1alpha1.DevicePoolSpec{Selectors: c.selectors}, Err: c.err}
			var got []string
			for _, pf := range p.NamedPFs(functions) {
				got = append(got, pf.PFName)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("names %q, want %q", got, c.want)
			}
		})
	}
}
