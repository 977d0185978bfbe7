// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"strings"
	"testing"
)

// FuzzNetdevName checks that every id gives names that the kernel accepts (dev_valid_name). The id
// of a network has no other characters than a-z, 0-9 and '-'.
func FuzzNetdevName(f *testing.F) {
	f.Add("net-blue")
	f.Add(strings.Repeat("a", 63))

	f.Fuzz(func(t *testing.T, id string) {
		if strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return
		}
		for _, name := range []string{bridgeName(id), vxlanName(id)} {
			if len(name) > 15 || strings.ContainsAny(name, "/: \t\n") || name == "." {
				t.Errorf("%q gives the netdev name %q", id, name)
			}
		}
	})
}
