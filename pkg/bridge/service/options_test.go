// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func (a *Agent) setAddresses(
	t *testing.T, name string, addresses ...string,
) (*opibridge.PortOptions, error) {
	return optionsServer{Agent: a}.UpdatePortOptions(t.Context(),
		&opibridge.UpdatePortOptionsRequest{
			Options: &opibridge.PortOptions{Name: name, Addresses: addresses},
		})
}

func (a *Agent) setOptions(
	t *testing.T, options *opibridge.NetworkOptions,
) (*opibridge.NetworkOptions, error) {
	return optionsServer{Agent: a}.UpdateNetworkOptions(t.Context(),
		&opibridge.UpdateNetworkOptionsRequest{Options: options})
}

// addresses returns the addresses of a port, and the status code of the call.
func (a *Agent) addresses(t *testing.T, id string) (string, codes.Code) {
	got, err := optionsServer{Agent: a}.GetPortOptions(t.Context(),
		&opibridge.GetPortOptionsRequest{Name: portNames.prefix + id})
	return strings.Join(got.GetAddresses(), " "), status.Code(err)
}

// TestOptionsStay checks that options survive a restart, and that they are removed with their
// object.
func TestOptionsStay(t *testing.T) {
	a, fake := newTestAgent(t)
	_, err := a.create(t, p1, accessPort(mac1, blue))
	must.Succeed(t, err)
	_, err = a.setAddresses(t, portNames.prefix+p1, "fd00::0:2", "10.1.0.2", "10.1.0.2")
	must.Succeed(t, err)
	_, err = a.setOptions(t, &opibridge.NetworkOptions{
		Name: blue, Mtu: 9000, SourceFilter: opibridge.SourceFilter_SOURCE_FILTER_MAC,
	})
	must.Succeed(t, err)
	must.Succeed(t, a.state.Close())

	a = open(t, a.cfg.State, fake)
	if got, code := a.addresses(t, p1); got != "10.1.0.2 fd00::2" || code != codes.OK {
		t.Errorf("after a restart the port has %q, %s", got, code)
	}

	network, err := optionsServer{Agent: a}.GetNetworkOptions(t.Context(),
		&opibridge.GetNetworkOptionsRequest{Name: "logicalBridges/net-blue"})
	if err != nil || network.GetMtu() != 9000 ||
		network.GetSourceFilter() != opibridge.SourceFilter_SOURCE_FILTER_MAC ||
		network.GetName() != blue {
		t.Errorf("after a restart the network has %v, %v", network, err)
	}

	must.Succeed(t, a.delete(t, p1, false))
	if _, code := a.addresses(t, p1); code != codes.NotFound {
		t.Errorf("after delete: %s", code)
	}

	must.Succeed(t, a.state.Close())
	a = open(t, a.cfg.State, fake)
	_, err = a.create(t, p1, accessPort(mac1, blue))
	must.Succeed(t, err)
	if got, code := a.addresses(t, p1); got != "" || code != codes.OK {
		t.Errorf("a new port has the addresses of the one before: %q, %s", got, code)
	}
}

func TestOptionsThatAreWrong(t *testing.T) {
	a, fake := newTestAgent(t)
	_, err := a.create(t, p1, accessPort(mac1, blue))
	must.Succeed(t, err)

	for _, addresses := range [][]string{
		{"10.1.0.2/24"}, {"10.1.0.2", "ten"}, {"::"}, {"0.0.0.0"}, {"224.0.0.1"}, {"ff02::1"},
		{"fe80::1%eth0"}, {"127.0.0.1"}, make([]string, 65),
	} {
		_, err := a.setAddresses(t, portNames.prefix+p1, addresses...)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), p1) {
			t.Errorf("addresses %q: %v", addresses, err)
		}
	}

	for what, options := range map[string]*opibridge.NetworkOptions{
		"an MTU that is too small": {Name: blue, Mtu: 67},
		"an MTU that is too large": {Name: blue, Mtu: 65536},
		"a filter of the future":   {Name: blue, SourceFilter: 4},
		"a name of a port":         {Name: portNames.prefix + p1},
		"no options":               nil,
	} {
		if _, err := a.setOptions(t, options); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}

	if _, err := a.setAddresses(t, portNames.prefix+"vf-0000-03-00-7",
		"10.1.0.2"); status.Code(err) != codes.NotFound {
		t.Errorf("addresses of a port that does not exist: %v", err)
	}

	if _, err := a.setOptions(t,
		&opibridge.NetworkOptions{
			Name: "logicalBridges/net-none",
		}); status.Code(err) != codes.NotFound {
		t.Errorf("options of a network that does not exist: %v", err)
	}

	fake.failure = errors.New("busy")
	if err := a.delete(t, p1, false); err == nil {
		t.Fatal("deleted although the data plane fails")
	}
	if _, err := a.setAddresses(t, portNames.prefix+p1,
		"10.1.0.2"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("addresses of a port that is being deleted: %v", err)
	}
}

// TestTrunkOptions checks that a trunk has addresses of its own in each network, that they survive
// a restart, and what clients get that know one list only.
func TestTrunkOptions(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.vlanAware, a.cfg.SourceFilter = true, true
	_, err := a.create(t, p1, trunkPort(mac1, blue, red))
	must.Succeed(t, err)
	set := func(options *opibridge.PortOptions) error {
		options.Name = portNames.prefix + p1
		_, err := optionsServer{Agent: a}.UpdatePortOptions(t.Context(),
			&opibridge.UpdatePortOptionsRequest{Options: options})
		return err
	}
	in := func(network string, addresses ...string) *opibridge.LogicalBridgeAddresses {
		return &opibridge.LogicalBridgeAddresses{LogicalBridge: network, Addresses: addresses}
	}
	check := func(what string, want map[string]string) {
		t.Helper()
		got := map[string]string{}
		for network, sources := range a.membership(p1, a.ports.objects[p1].spec).Sources {
			got[network] = fmt.Sprint(sources.Filtered, sources.Addresses)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}

	check("at first", map[string]string{"net-blue": "true []", "net-red": "true []"})
	must.Succeed(t, set(&opibridge.PortOptions{Addresses: []string{"10.1.0.2"}}))
	check("one list", map[string]string{"net-blue": "true [10.1.0.2]", "net-red": "true [10.1.0.2]"})

	must.Succeed(t, set(&opibridge.PortOptions{
		Addresses: []string{"10.1.0.2", "10.2.0.2"},
		LogicalBridges: []*opibridge.LogicalBridgeAddresses{
			in(red, "10.2.0.2"), in("logicalBridges/net-blue", "10.1.0.2"),
		},
	}))
	each := map[string]string{"net-blue": "true [10.1.0.2]", "net-red": "true [10.2.0.2]"}
	check("a list each", each)
	must.Succeed(t, a.state.Close())
	a = open(t, a.cfg.State, fake)
	a.cfg.SourceFilter = true
	check("after a restart", each)

	got, err := optionsServer{Agent: a}.GetPortOptions(t.Context(),
		&opibridge.GetPortOptionsRequest{Name: portNames.prefix + p1})
	if err != nil || len(got.GetAddresses()) != 2 || len(got.GetLogicalBridges()) != 2 ||
		got.GetLogicalBridges()[0].GetLogicalBridge() != blue {
		t.Errorf("the options are %v, %v", got, err)
	}

	must.Succeed(t, set(&opibridge.PortOptions{
		Addresses: []string{"10.1.0.2"}, LogicalBridges: []*opibridge.LogicalBridgeAddresses{in(red)},
	}))
	check("any in one", map[string]string{"net-blue": "true [10.1.0.2]", "net-red": "true []"})

	_, err = a.setOptions(t, &opibridge.NetworkOptions{
		Name: blue, SourceFilter: opibridge.SourceFilter_SOURCE_FILTER_NONE,
	})
	must.Succeed(t, err)
	check("no filter in one", map[string]string{"net-blue": "false []", "net-red": "true []"})

	for what, wrong := range map[string][]*opibridge.LogicalBridgeAddresses{
		"not that of the port": {in("logicalBridges/net-none")},
		"no name":              {in("")},
		"twice":                {in(red), in("logicalBridges/net-red")},
		"an address":           {in(red, "ten")},
		"many addresses":       {in(red, make([]string, 65)...)},
	} {
		err := set(&opibridge.PortOptions{LogicalBridges: wrong})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), p1) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestMTUIsForgotten checks that nothing is kept of a network that is deleted.
func TestMTUIsForgotten(t *testing.T) {
	a, _ := newTestAgent(t)
	for _, name := range []string{blue, red} {
		_, err := networkServer{Agent: a}.DeleteLogicalBridge(t.Context(),
			&evpn.DeleteLogicalBridgeRequest{Name: name})
		must.Succeed(t, err)
	}
	if len(a.maxMTUs) > 0 {
		t.Errorf("it remembers %v", a.maxMTUs)
	}
}

// TestMTUTooLarge checks that a network whose MTU is too large is down and names both MTUs.
func TestMTUTooLarge(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.mtu = 1450
	a.networks.reconcile("net-red", false)

	network := func(mtu uint32) (up bool, details string) {
		t.Helper()
		got, err := a.setOptions(t, &opibridge.NetworkOptions{Name: red, Mtu: mtu})
		if err != nil || got.GetMaxMtu() != 1450 {
			t.Fatalf("options %v, %v", got, err)
		}

		is, err := a.networks.get(t.Context(), red)
		must.Succeed(t, err)

		return state(is.GetStatus().GetOperStatus()) == stateUp,
			is.GetStatus().GetComponents()[0].GetDetails()
	}

	for _, mtu := range []uint32{0, 1280, 1450} {
		if up, details := network(mtu); !up {
			t.Errorf("MTU %d: down: %s", mtu, details)
		}
	}

	up, details := network(1500)
	for _, text := range []string{"1500", "1450"} {
		if up || !strings.Contains(details, text) {
			t.Errorf("MTU 1500: up %t, %q lacks %s", up, details, text)
		}
	}

	fake.mtu = 1500
	a.networks.reconcileEach(a.networks.withKey(keyVXLAN))
	if is, err := a.networks.get(t.Context(), red); err != nil ||
		state(is.GetStatus().GetOperStatus()) != stateUp {
		t.Errorf("after the path was widened: %v, %v", is, err)
	}
}
