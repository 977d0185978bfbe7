// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// TestScopedNames checks that names stay the same between versions, because an upgraded broker
// would create a second copy under a new name.
func TestScopedNames(t *testing.T) {
	long := strings.Repeat("n", 63)
	tenant := strings.Repeat("t", 32)
	port := func(tenant, namespace, name string) string {
		return scopedPort(tenant, types.NamespacedName{Namespace: namespace, Name: name})
	}
	for _, test := range []struct{ got, want string }{
		{scopedNetwork("a", "blue"), "a.blue"},
		{scopedNetwork("a", "blue.green-2"), "a.blue.green-2"},
		{scopedNetwork("a", long[:61]), "a." + long[:61]},
		{scopedNetwork("a", long), "a." + long[:52] + "-420224db"},
		{scopedNetwork(tenant, long), tenant + "." + long[:21] + "-03491450"},
		{scopedNetwork("a", long[:51]+"."+long[:11]), "a." + long[:51] + "-2ece84ad"},
		{scoped("a", "node1.example"), "a.node1.example"},
		{port("a", "pods", "node1-0000-3b-00-2"), "a.pods.node1-0000-3b-00-2"},
		{
			port(tenant, long, strings.Repeat("p", 253)),
			tenant + "." + long + "." + strings.Repeat("p", 147) + "-773a35a5",
		},
	} {
		if test.got != test.want {
			t.Errorf("%s, want %s", test.got, test.want)
		}
	}
}

// TestScopedNamesOfNoObject checks texts that no object has as a name. A tenant may still send
// them, because it controls the rules of its cluster.
func TestScopedNamesOfNoObject(t *testing.T) {
	seen := map[string]string{}
	for _, text := range []string{
		"", ".", "-", "..", "a.", "-a", "A", "a_b", "a/b", "../b", "\u00e9", "\xff", "a\x00",
		strings.Repeat("-", 80), strings.Repeat(".", 80), strings.Repeat("-", 300),
		strings.Repeat("A", 300), strings.Repeat("a", 60) + strings.Repeat("-", 240),
	} {
		got := scopedNetwork("a", text)
		checkScoped(t, "a", text, got, validation.LabelValueMaxLength)
		if other, taken := seen[got]; taken {
			t.Errorf("%q and %q are both %q", text, other, got)
		}
		seen[got] = text
	}
}

// checkScoped checks that the API server accepts the name, and that it begins with the tenant and a
// dot.
func checkScoped(t *testing.T, tenant, text, name string, most int) {
	t.Helper()
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 || len(name) > most {
		t.Errorf("%q of %s is %q, of %d characters: want at most %d; %q",
			text, tenant, name, len(name), most, problems)
	}
	if of, _, ok := strings.Cut(name, "."); !ok || of != tenant {
		t.Errorf("%q of %s is %q, which is not the tenant's", text, tenant, name)
	}
}

// tenantName turns a text into a valid name of an XPUTenant.
func tenantName(text string) string {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789-"
	name := []byte(text[:min(len(text), 32)])
	for i, c := range name {
		name[i] = letters[int(c)%len(letters)]
	}
	return cmp.Or(strings.Trim(string(name), "-"), "a")
}

// FuzzScoped looks for a name outside its tenant, and for a name that two tenants share.
func FuzzScoped(f *testing.F) {
	f.Add("a", "blue", "b", "blue")
	f.Add("a", strings.Repeat("-", 80), "b", "")
	f.Add("a", "b.c", "a-b", "c")
	long := strings.Repeat("n", 300)
	f.Add(strings.Repeat("t", 32), long, strings.Repeat("t", 31), "t."+long)

	f.Fuzz(func(t *testing.T, tenant, text, other, otherText string) {
		tenant, other = tenantName(tenant), tenantName(other)
		namespace, name, _ := strings.Cut(text, "/")
		port := scopedPort(tenant, types.NamespacedName{Namespace: namespace, Name: name})
		checkScoped(t, tenant, text, port, validation.DNS1123SubdomainMaxLength)

		for most, of := range map[int]func(tenant, name string) string{
			validation.DNS1123SubdomainMaxLength: scoped,
			validation.LabelValueMaxLength:       scopedNetwork,
		} {
			got := of(tenant, text)
			checkScoped(t, tenant, text, got, most)
			plain := tenant + "." + text
			isName := len(plain) <= most && len(validation.IsDNS1123Subdomain(plain)) == 0
			if isName && got != plain {
				t.Errorf("%q of %s is %q, want %q", text, tenant, got, plain)
			}
			if tenant != other && got == of(other, otherText) {
				t.Errorf("%q of %s and %q of %s are both %q", text, tenant, otherText, other, got)
			}
		}
	})
}
