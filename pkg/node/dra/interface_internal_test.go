// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"net/netip"
	"testing"
)

// TestShown: the status of a claim has at most 16 addresses, and leaves out link-local ones first.
func TestShown(t *testing.T) {
	local := netip.MustParsePrefix("fe80::1/64")
	addresses := []netip.Prefix{local}
	for i := range 16 {
		addresses = append(addresses, netip.MustParsePrefix(fmt.Sprintf("10.1.0.%d/24", i+1)))
	}

	got := shown(addresses)
	if len(got) != 16 || got[0].String() != "10.1.0.1/24" || got[15].String() != "10.1.0.16/24" {
		t.Errorf("%d addresses: %v", len(got), got)
	}
	if got := shown(addresses[:2]); len(got) != 2 || got[1] != local || addresses[0] != local {
		t.Errorf("two addresses: %v", got)
	}
}
