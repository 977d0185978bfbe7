// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// TestGateways: the gateway has an address in each subnet.
func TestGateways(t *testing.T) {
	for name, test := range map[string]struct {
		subnets, gateways []string
		want, problem     string
	}{
		"the first of each subnet": {
			subnets: []string{"10.1.0.0/24", "fd00::/64"}, want: "[10.1.0.1/24 fd00::1/64]",
		},
		"one that is set": {
			subnets:  []string{"10.1.0.0/24", "fd00::/64"},
			gateways: []string{"10.1.0.254"}, want: "[10.1.0.254/24 fd00::1/64]",
		},
		"the only one of its family": {
			subnets: []string{"10.1.0.0/24"}, gateways: []string{"10.1.0.1", "fd00::1"},
			want: "[10.1.0.1/24]",
		},
		"in another subnet": {
			subnets: []string{"10.1.0.0/24"}, gateways: []string{"10.2.0.1"},
			problem: "10.2.0.1, which the xPUs have because of spec.routed, must be in subnet " +
				"10.1.0.0/24",
		},
		"the subnet's own": {
			subnets: []string{"10.1.0.0/24"}, gateways: []string{"10.1.0.0"},
			problem: "the gateway 10.1.0.0 cannot be in subnet 10.1.0.0/24",
		},
		"broadcast": {
			subnets: []string{"10.1.0.0/24"}, gateways: []string{"10.1.0.255"},
			problem: "the gateway 10.1.0.255 cannot be",
		},
		"a subnet of one address": {
			subnets: []string{"10.1.0.1/32"}, gateways: []string{"10.1.0.1"},
			problem: "cannot be in subnet 10.1.0.1/32",
		},
		"no address after the first": {
			subnets: []string{"255.255.255.255/32"}, problem: "has no address for a gateway",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := Gateways(&v1alpha1.XPUNetwork{Spec: v1alpha1.XPUNetworkSpec{
				Subnets: test.subnets, Gateways: test.gateways,
				Routed: &v1alpha1.RoutedNetwork{VRF: "one"},
			}})
			if test.problem != "" {
				if err == nil || !strings.Contains(err.Error(), test.problem) {
					t.Errorf("error %v, want %q", err, test.problem)
				}
				return
			}
			if err != nil || fmt.Sprint(got) != test.want {
				t.Errorf("gateways %v, error %v, want %s", got, err, test.want)
			}
		})
	}
}

// TestCheckGateway: no Port has what is the gateway's.
func TestCheckGateway(t *testing.T) {
	installation := opi.NewInstallation("one")
	network := &v1alpha1.XPUNetwork{Spec: v1alpha1.XPUNetworkSpec{
		Subnets: []string{"10.1.0.0/24"}, Routed: &v1alpha1.RoutedNetwork{VRF: "one"},
	}}
	plain := &v1alpha1.XPUNetwork{Spec: v1alpha1.XPUNetworkSpec{Subnets: network.Spec.Subnets}}
	mac := strings.ToUpper(installation.GatewayMAC().String())

	for name, test := range map[string]struct {
		network   *v1alpha1.XPUNetwork
		mac       string
		addresses []string
		up        string // the port's id at the agent
		problem   string
	}{
		"neither":          {network, "02:00:00:00:00:01", []string{"10.1.0.2/24"}, "", ""},
		"MAC address":      {network, mac, nil, "", "MAC address " + mac + " is the gateway's"},
		"address":          {network, "02:00:00:00:00:01", []string{"10.1.0.1/24"}, "", "address 10.1.0.1/24 is"},
		"address and up":   {network, "02:00:00:00:00:01", []string{"10.1.0.1/24"}, "vf1", ""},
		"no address":       {network, "", []string{"ten"}, "", ""},
		"without gateways": {plain, mac, []string{"10.1.0.1/24"}, "", ""},
	} {
		port := &v1alpha1.XPUPort{
			Spec:   v1alpha1.XPUPortSpec{MAC: test.mac, Addresses: test.addresses},
			Status: v1alpha1.XPUPortStatus{BridgePort: test.up},
		}
		err := CheckGateway(port, test.network, installation)
		if test.problem == "" && err != nil ||
			test.problem != "" && (err == nil || !strings.Contains(err.Error(), test.problem)) {
			t.Errorf("%s: error %v, want %q", name, err, test.problem)
		}
	}
}
