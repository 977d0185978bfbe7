// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// manyVNIs is more than the multicast groups that a socket may join by default
// (net.ipv4.igmp_max_memberships).
const manyVNIs = 30

// underlay returns an xPU that has an uplink with an address.
func underlay(t *testing.T, mode plane.Mode) *xpu {
	t.Helper()
	x := newXPU(t, mode, "p0")
	netns.Connect(t, x.Namespace, "p0", netns.New(t), "wire")
	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	return x
}

// ensureNetworks makes n networks with a VNI, or stops at the first that is not up.
func (x *xpu) ensureNetworks(n int) error {
	x.t.Helper()
	for i := range n {
		vni := uint32(1000 + i)
		err := x.client.EnsureNetwork(x.ctx(),
			opi.Network{ID: fmt.Sprintf("net-%d", i), VLAN: uint16(10 + i), VNI: &vni})
		if err != nil {
			return err
		}
	}

	return nil
}

func testManyVNIs(t *testing.T, mode plane.Mode) {
	x := underlay(t, mode)
	x.start()
	if err := x.ensureNetworks(manyVNIs); err != nil {
		t.Error(err)
	}
}

// testTooManyVNIs checks that, if the agent may not raise the limits, a network beyond them is down
// and says what to do.
func testTooManyVNIs(t *testing.T, mode plane.Mode) {
	x := underlay(t, mode)
	x.cfg.Plane.Sysctl = t.TempDir()
	x.start()
	err := x.ensureNetworks(manyVNIs)
	if err == nil {
		t.Fatal("all networks are up without more groups")
	}

	for _, want := range []string{
		"net.ipv4.igmp_max_memberships", "net.core.optmem_max", "sysctl -w",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v: lacks %s", err, want)
		}
	}
}
