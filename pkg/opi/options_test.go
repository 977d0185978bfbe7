// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// startWithOptions returns an agent that implements options, with network blue, and a client.
func startWithOptions(t *testing.T) (*opitest.Agent, *opi.Client) {
	t.Helper()
	a := opitest.Start(t)
	a.Set(func(b *opitest.Behaviour) { b.Options, b.MTU = true, 1450 })
	c := dial(t, a.Config())
	must.Succeed(t, c.EnsureNetwork(t.Context(), blue))
	return a, c
}

func TestAddressesAreTold(t *testing.T) {
	a, c := startWithOptions(t)
	with := port1
	with.Addresses = []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00::2")}
	// created, then without addresses, then with addresses again
	for _, port := range []opi.Port{with, port1, with} {
		must.Succeed(t, c.EnsurePort(t.Context(), port))
		var want []string
		for _, address := range port.Addresses {
			want = append(want, address.String())
		}
		if got := a.Addresses(port1.ID); !slices.Equal(got, want) {
			t.Errorf("the agent was told %q, want %q", got, want)
		}
	}

	// The first answer is lost: the port exists, perhaps with another client's addresses.
	must.Succeed(t, c.DeletePort(t.Context(), port1.ID))
	a.DropNext("CreateBridgePort", 1)
	before := a.Calls("UpdatePortOptions")
	must.Succeed(t, c.EnsurePort(t.Context(), port1))
	if a.Calls("UpdatePortOptions") == before {
		t.Error("a port that was perhaps made by another was not told that it has no addresses")
	}
}

// TestSharedAddresses checks that an agent that does not know shared addresses is named, because it
// would drop the frames that come from the other xPU.
func TestSharedAddresses(t *testing.T) {
	a, c := startWithOptions(t)
	port := port1
	port.Addresses, port.Shared = []netip.Addr{netip.MustParseAddr("10.1.0.2")}, true
	must.Succeed(t, c.EnsurePort(t.Context(), port))
	if !a.Shared(port1.ID) {
		t.Error("the agent does not know that the addresses are shared")
	}

	a.Set(func(b *opitest.Behaviour) { b.NoShared = true })
	err := c.EnsurePort(t.Context(), port)
	if err == nil || !strings.Contains(err.Error(), "upgrade opi-bridge") {
		t.Errorf("error %v of an agent without shared addresses", err)
	}
}

func TestNetworkOptionsAreTold(t *testing.T) {
	a, c := startWithOptions(t)
	if got := c.MTU(blue.ID); got != 1450 {
		t.Errorf("MTU %d, want what the agent says", got)
	}

	changed := blue
	changed.MTU, changed.SourceFilter = 1400, opi.SourceFilterMAC
	must.Succeed(t, c.EnsureNetwork(t.Context(), changed))
	if got := a.NetworkOptions(blue.ID); got.GetMtu() != 1400 ||
		got.GetSourceFilter() != opibridge.SourceFilter_SOURCE_FILTER_MAC {
		t.Errorf("the agent was told %v", got)
	}

	must.Succeed(t, c.DeleteNetwork(t.Context(), blue.ID))
	if got := c.MTU(blue.ID); got != 0 {
		t.Errorf("MTU %d of a network that is gone", got)
	}
}

// TestNoOptions checks that an agent without options is asked for them once per connection, and
// otherwise works.
func TestNoOptions(t *testing.T) {
	a, c := start(t)
	with := port1
	with.Addresses = []netip.Addr{netip.MustParseAddr("10.1.0.2")}
	must.Succeed(t, c.EnsurePort(t.Context(), with))
	must.Succeed(t, c.EnsurePort(t.Context(), with))
	if n := a.Calls("UpdateNetworkOptions") + a.Calls("UpdatePortOptions"); n != 1 {
		t.Errorf("it was asked %d times, want once", n)
	}
}

// TestOptionsAreRefused checks that a port is not up if the agent rejects its addresses.
func TestOptionsAreRefused(t *testing.T) {
	a, c := startWithOptions(t)
	with := port1
	with.Addresses = []netip.Addr{netip.MustParseAddr("10.1.0.2")}
	a.FailNext("UpdatePortOptions", 1, codes.InvalidArgument, "no such address")
	if err := c.EnsurePort(t.Context(), with); !errors.Is(err, opi.ErrInvalid) {
		t.Errorf("error %v, want that of the agent", err)
	}

	must.Succeed(t, c.EnsurePort(t.Context(), with))
	if got := a.Addresses(port1.ID); len(got) != 1 {
		t.Errorf("the agent was told %q", got)
	}
}
