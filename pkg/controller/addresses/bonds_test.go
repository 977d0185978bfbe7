// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestBondShares checks that the Ports of one bond have the same addresses, that nobody else has them
// while one of these Ports is left, and that they are free after the last one.
func TestBondShares(t *testing.T) {
	rules, err := rulesOf(&v1alpha1.XPUNetwork{
		Spec: v1alpha1.XPUNetworkSpec{Subnets: []string{"10.1.0.0/24", "fd00::/64"}},
	})
	must.Succeed(t, err)
	book := newBook("blue")

	give := func(name, uid, bond string) *v1alpha1.XPUPort {
		t.Helper()
		port := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		port.Spec.Claim = v1alpha1.ClaimRef{Name: "c", UID: types.UID(uid), Bond: bond}
		port.Spec.MAC = "02:00:00:00:00:0" + name
		given, err := book.choose(port, rules, nil)
		must.Succeed(t, err)
		port.Spec.Addresses = texts(given)
		book.add(port)
		if _, what := book.other(port); what != "" {
			t.Errorf("Port %s shares its %s with a stranger", name, what)
		}
		return port
	}
	has := func(port *v1alpha1.XPUPort, want ...string) {
		t.Helper()
		if !slices.Equal(port.Spec.Addresses, want) {
			t.Errorf("Port %s has %q, want %q", port.Name, port.Spec.Addresses, want)
		}
	}

	left, right := give("1", "u", "bond0"), give("2", "u", "bond0")
	has(left, "10.1.0.2/24", "fd00::2/64")
	has(right, "10.1.0.2/24", "fd00::2/64")
	has(give("3", "u", "bond1"), "10.1.0.3/24", "fd00::3/64")
	has(give("4", "other claim", "bond0"), "10.1.0.4/24", "fd00::4/64")
	has(give("5", "u", ""), "10.1.0.5/24", "fd00::5/64")

	stranger := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "9"}}
	if _, err := book.choose(stranger, rules, prefixes("10.1.0.2/24")); err == nil {
		t.Error("a stranger may have the address of a bond")
	}
	if _, err := book.choose(right, rules, prefixes("10.1.0.2/24")); err != nil {
		t.Errorf("a port of the bond may not ask for its address: %v", err)
	}
	if _, err := book.choose(right, rules, prefixes("10.1.0.3/24")); err == nil {
		t.Error("a port of a bond may have the address of another bond")
	}

	// A later allocation of the claim shares nothing with this one, whose Ports may not be gone.
	for what, change := range map[string]func(*v1alpha1.XPUPort){
		"another allocation": func(p *v1alpha1.XPUPort) {
			p.Annotations = map[string]string{AnnotationAllocation: "later"}
		},
		"another node": func(p *v1alpha1.XPUPort) { p.Spec.NodeName = "n2" },
	} {
		later := right.DeepCopy()
		later.Name, later.Spec.Addresses = "later", nil
		change(later)
		if _, err := book.choose(later, rules, prefixes("10.1.0.2/24")); err == nil {
			t.Errorf("%s may have the address of the earlier one", what)
		}
		if given, err := book.choose(later, rules, nil); err != nil || given[0].String() == "10.1.0.2/24" {
			t.Errorf("%s gets %v, %v", what, given, err)
		}
	}

	book.remove(left)
	has(give("6", "", ""), "10.1.0.6/24", "fd00::6/64")
	has(give("7", "u", "bond0"), "10.1.0.2/24", "fd00::2/64")
	book.remove(right)
	book.remove(&v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "7"},
		Spec: v1alpha1.XPUPortSpec{
			Addresses: left.Spec.Addresses, Claim: left.Spec.Claim, MAC: "02:00:00:00:00:07",
		},
	})
	has(give("8", "", ""), "10.1.0.2/24", "fd00::2/64")

	// An API server that does not know the field drops it.
	lost := give("0", "z", "bond0")
	lost.Spec.Claim.Bond = ""
	book.add(lost)
	book.remove(lost)
	if len(book.bonds) != 2 || len(book.bond) != 2 {
		t.Errorf("bonds %v, %v are left, want the two that have Ports", book.bonds, book.bond)
	}
}
