// SPDX-License-Identifier: Apache-2.0

package function_test

import (
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestCheckLinkType(t *testing.T) {
	identified := function.Interface{VF: &function.VFConfig{
		PortGUID: "00:11:22:33:44:55:66:77",
	}}
	addressed := function.Interface{MAC: "02:00:00:00:00:01"}
	for name, test := range map[string]struct {
		linkType string
		want     function.Interface
		network  string
		says     string
	}{
		"Ethernet":              {linkType: function.Ethernet, want: addressed, network: "blue"},
		"InfiniBand":            {linkType: function.InfiniBand, want: identified},
		"InfiniBand as it is":   {linkType: function.InfiniBand},
		"unknown":               {want: identified, network: "blue"},
		"unknown, MAC":          {want: addressed},
		"MAC of InfiniBand":     {function.InfiniBand, addressed, "", "mac: Function 0000:3b:00.2: must be absent: an InfiniBand interface has no MAC address"},
		"network of InfiniBand": {function.InfiniBand, addressed, "blue", `network "blue": must be absent: Function 0000:3b:00.2 is InfiniBand`},
		"GUID of Ethernet":      {function.Ethernet, identified, "", "vf.nodeGUID, vf.portGUID: must be absent: Function 0000:3b:00.2 is Ethernet"},
	} {
		f := function.Function{
			ID: function.ID{Address: "0000:3b:00.2"}, LinkType: test.linkType,
		}
		err := f.CheckLinkType(test.want, test.network)
		if (err == nil) != (test.says == "") ||
			err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want %q", name, err, test.says)
		}
	}
}
