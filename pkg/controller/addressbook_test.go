// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// FuzzAddressRules has a network with any texts give addresses, which somebody asks for or not.
// Whatever is given is inside a subnet, neither reserved nor a gateway's, and nobody else's.
func FuzzAddressRules(f *testing.F) {
	f.Add("10.1.0.0/24", "10.1.0.1", "10.1.0.0/29 10.1.0.250-10.1.0.254", "")
	f.Add("10.1.0.0/30 fd00::/126", "", "", "10.1.0.2/30 fd00::2/126")
	f.Add("10.1.0.0/32 ::/0", "::1", "::-ffff::", "10.1.0.0/32")
	f.Add("0.0.0.0/0", "0.0.0.1", "0.0.0.0/1", "255.255.255.255/0 1.2.3.4/0")
	f.Add("::ffff:10.0.0.0/120", "x", "10.1.0.9-10.1.0.2", "fe80::1%eth0/64")

	f.Fuzz(func(t *testing.T, subnets, gateways, reserved, wanted string) {
		network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"},
			Spec: v1alpha1.XPUNetworkSpec{
				Subnets: strings.Fields(subnets), Gateways: strings.Fields(gateways),
				Reserved: strings.Fields(reserved),
			}}

		rules, err := rulesOf(network)
		if err != nil {
			return
		}

		book := newAddressBook()
		for i, asks := range [][]netip.Prefix{prefixes(wanted), nil, nil} {
			given, err := book.choose(rules, asks)
			if err != nil {
				continue
			}

			for _, address := range given {
				if _, taken := book.addresses[address.Addr()]; taken {
					t.Errorf("%s is given twice", address)
				}
				checkGiven(t, rules, address)
			}

			book.take(types.NamespacedName{Name: strconv.Itoa(i)}, texts(given))
		}
	})
}

// checkGiven does not use the rules' own methods. A network without subnets leaves addresses to
// whoever asks.
func checkGiven(t *testing.T, rules *addressRules, address netip.Prefix) {
	t.Helper()
	inside := func(subnet netip.Prefix) bool {
		return subnet.Contains(address.Addr()) && subnet.Bits() == address.Bits()
	}
	if len(rules.subnets) > 0 && !slices.ContainsFunc(rules.subnets, inside) {
		t.Errorf("%s is in none of %s", address, rules.subnets)
	}
	if len(rules.subnets) > 0 && rules.reserved.Contains(address.Addr()) {
		t.Errorf("%s is reserved", address)
	}
}

// prefixes are those in a text.
func prefixes(text string) (list []netip.Prefix) {
	for _, word := range strings.Fields(text) {
		if prefix, err := netip.ParsePrefix(word); err == nil {
			list = append(list, prefix)
		}
	}
	return list
}

// TestRulesOf: what cannot be understood is named, with what would be right.
func TestRulesOf(t *testing.T) {
	for want, spec := range map[string]v1alpha1.XPUNetworkSpec{
		"": {Subnets: []string{"255.255.255.255/32"}, Gateways: []string{"10.1.0.1"}},
		`spec.gateways[0] "fe80::1%eth0" must be an address`: {Gateways: []string{"fe80::1%eth0"}},
		`spec.subnets[1] "10.1.0.0" must be a prefix`: {
			Subnets: []string{"10.2.0.0/24", "10.1.0.0"},
		},
		`spec.subnets[0] "255.255.255.255/32" has no address for a gateway`: {
			Subnets: []string{"255.255.255.255/32"},
		},
		`spec.reserved[0] "10.1.0.9-10.1.0.1" must be a prefix or a range`: {
			Reserved: []string{"10.1.0.9-10.1.0.1"},
		},
	} {
		_, err := rulesOf(&v1alpha1.XPUNetwork{Spec: spec})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", spec, err, want)
		}
	}
}
