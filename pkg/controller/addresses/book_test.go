// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
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

		book := newBook("lab")
		for i, asks := range [][]netip.Prefix{prefixes(wanted), nil, nil} {
			given, err := book.choose(&v1alpha1.XPUPort{}, rules, asks)
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
func checkGiven(t *testing.T, rules *networkRules, address netip.Prefix) {
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

// TestAddressBook: whatever comes and goes, each Port gets the lowest address that no other has.
func TestAddressBook(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	rules, err := rulesOf(&v1alpha1.XPUNetwork{Spec: v1alpha1.XPUNetworkSpec{
		Subnets: []string{"10.1.0.0/26"}, Reserved: []string{"10.1.0.7-10.1.0.9", "10.1.0.48/30"},
	}})
	if err != nil {
		t.Fatal(err)
	}

	book := newBook("lab")
	have := map[string]*v1alpha1.XPUPort{} // by address
	lowest := func() string {
		for n := 2; n < 63; n++ {
			text := fmt.Sprintf("10.1.0.%d/26", n)
			if have[text] == nil && (n < 7 || n > 9) && (n < 48 || n > 51) {
				return text
			}
		}
		return ""
	}

	for n := range 5000 {
		if len(have) > 0 && random.IntN(100) < 48 {
			for text, port := range have {
				book.remove(port)
				delete(have, text)
				break
			}
			continue
		}

		want := lowest()
		got, err := book.choose(&v1alpha1.XPUPort{}, rules, nil)
		if (err != nil) != (want == "") || err == nil && got[0].String() != want {
			t.Fatalf("step %d: %s, %v, want %q", n, got, err, want)
		}
		if want == "" {
			continue
		}

		port := &v1alpha1.XPUPort{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(n)},
			Spec:       v1alpha1.XPUPortSpec{Addresses: texts(got)},
		}

		book.add(port)
		have[want] = port
	}
}

// TestFreeListIsBounded: the list of free addresses does not grow when a pod is deleted and created
// many times, with an address that it asks for or that is free.
func TestFreeListIsBounded(t *testing.T) {
	rules, err := rulesOf(&v1alpha1.XPUNetwork{Spec: v1alpha1.XPUNetworkSpec{
		Subnets: []string{"10.1.0.0/26"},
	}})
	if err != nil {
		t.Fatal(err)
	}

	book := newBook("lab")
	port := func(name string, wanted ...netip.Prefix) *v1alpha1.XPUPort {
		p := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{Name: name}}
		addresses, err := book.choose(p, rules, wanted)
		if err != nil {
			t.Fatal(err)
		}
		p.Spec.Addresses = texts(addresses)
		book.add(p)
		return p
	}

	again := port("again")
	port("stays")
	port("too") // the addresses of the others are below the next one
	for range 100 {
		book.remove(again)
		again = port("again")
		book.remove(again)
		again = port("again", prefixes("10.1.0.2/26")...)
	}
	for _, free := range book.subnets {
		if n := len(free.below); n > 1 {
			t.Errorf("one address is %d times in the list", n)
		}
	}
}

func TestChooseAddresses(t *testing.T) {
	taken := func(ips ...string) map[netip.Addr]client.ObjectKey {
		m := map[netip.Addr]client.ObjectKey{}
		for _, ip := range ips {
			m[netip.MustParseAddr(ip)] = client.ObjectKey{Namespace: "ns", Name: "port"}
		}
		return m
	}

	tests := []struct {
		name               string
		subnets            []string
		gateways, reserved []string
		taken              map[netip.Addr]client.ObjectKey
		wanted             []string
		want               string
		reason             string
	}{
		{name: "no subnet"},
		{name: "no subnet, wanted", wanted: []string{"10.0.0.1/8"}, want: "10.0.0.1/8"},
		{name: "no subnet, taken", wanted: []string{"10.0.0.1/8"}, taken: taken("10.0.0.1"),
			reason: v1alpha1.ReasonConflict},
		{name: "first", subnets: []string{"10.1.0.0/24"}, want: "10.1.0.2/24"},
		{name: "lowest free", subnets: []string{"10.1.0.0/24"},
			taken: taken("10.1.0.2", "10.1.0.4"), want: "10.1.0.3/24"},
		{name: "both families", subnets: []string{"fd00::/64", "10.1.0.0/24"},
			taken: taken("fd00::2"), want: "fd00::3/64 10.1.0.2/24"},
		{name: "last", subnets: []string{"10.1.0.0/29"},
			taken: taken("10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5"), want: "10.1.0.6/29"},
		{name: "full", subnets: []string{"10.1.0.0/29"},
			taken:  taken("10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.6"),
			reason: v1alpha1.ReasonNoFreeAddress},
		{name: "point to point", subnets: []string{"10.1.0.0/31"},
			reason: v1alpha1.ReasonNoFreeAddress},
		{name: "single address", subnets: []string{"10.1.0.7/32"},
			reason: v1alpha1.ReasonNoFreeAddress},
		{name: "IPv6 has no broadcast", subnets: []string{"fd00::/126"}, taken: taken("fd00::2"),
			want: "fd00::3/126"},
		{name: "gateway on demand", subnets: []string{"10.1.0.0/24"},
			wanted: []string{"10.1.0.1/24"}, reason: v1alpha1.ReasonInvalidConfig},
		{name: "prefix length of its own", subnets: []string{"10.1.0.0/24"},
			wanted: []string{"10.1.0.5/1"}, reason: v1alpha1.ReasonInvalidConfig},
		{name: "another gateway", subnets: []string{"10.1.0.0/24"},
			gateways: []string{"10.1.0.254"}, want: "10.1.0.1/24"},
		{name: "another gateway on demand", subnets: []string{"10.1.0.0/24"},
			gateways: []string{"10.1.0.254"}, wanted: []string{"10.1.0.254/24"},
			reason: v1alpha1.ReasonInvalidConfig},
		{name: "gateway of the other family", subnets: []string{"10.1.0.0/24"},
			gateways: []string{"fd00::1"}, want: "10.1.0.2/24"},
		{name: "reserved", subnets: []string{"10.1.0.0/24"},
			reserved: []string{"10.1.0.0/29", "10.1.0.8-10.1.0.10"}, want: "10.1.0.11/24"},
		{name: "reserved on demand", subnets: []string{"10.1.0.0/24"},
			reserved: []string{"10.1.0.0/29"}, wanted: []string{"10.1.0.5/24"},
			reason: v1alpha1.ReasonInvalidConfig},
		{name: "all reserved", subnets: []string{"10.1.0.0/24"}, reserved: []string{"10.1.0.0/24"},
			reason: v1alpha1.ReasonNoFreeAddress},
		{name: "bad range", subnets: []string{"10.1.0.0/24"},
			reserved: []string{"10.1.0.9-10.1.0.3"}, reason: v1alpha1.ReasonNetworkNotReady},
		{name: "broadcast on demand", subnets: []string{"10.1.0.0/24"},
			wanted: []string{"10.1.0.255/24"}, reason: v1alpha1.ReasonInvalidConfig},
		{name: "network's own on demand", subnets: []string{"10.1.0.0/24"},
			wanted: []string{"10.1.0.0/24"}, reason: v1alpha1.ReasonInvalidConfig},
		{name: "twice", subnets: []string{"10.1.0.0/24"},
			wanted: []string{"10.1.0.5/24", "10.1.0.5/24"}, reason: v1alpha1.ReasonInvalidConfig},
		{name: "outside", subnets: []string{"10.1.0.0/24"}, wanted: []string{"10.1.1.5/24"},
			reason: v1alpha1.ReasonInvalidConfig},
		{name: "other family", subnets: []string{"10.1.0.0/24"}, wanted: []string{"fd00::5/64"},
			reason: v1alpha1.ReasonInvalidConfig},
		{name: "bad subnet", subnets: []string{"10.1.0.0"}, reason: v1alpha1.ReasonNetworkNotReady},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			network := &v1alpha1.XPUNetwork{Spec: v1alpha1.XPUNetworkSpec{
				Subnets: test.subnets, Gateways: test.gateways, Reserved: test.reserved,
			}}
			var wanted []netip.Prefix
			for _, w := range test.wanted {
				wanted = append(wanted, netip.MustParsePrefix(w))
			}

			var got []netip.Prefix
			rules, err := rulesOf(network)
			if err == nil {
				book := newBook("lab")
				maps.Copy(book.addresses, test.taken)
				got, err = book.choose(&v1alpha1.XPUPort{}, rules, wanted)
			}

			var refusal *reconciling.Refusal
			if errors.As(err, &refusal) != (test.reason != "") ||
				refusal != nil && refusal.Reason != test.reason {
				t.Fatalf("error %v, want reason %q", err, test.reason)
			}
			if err == nil && strings.Join(texts(got), " ") != test.want {
				t.Errorf("%s, want %s", texts(got), test.want)
			}
		})
	}
}
