// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestAttributeNames checks that an attribute has a name exactly if Kubernetes takes it in a
// ResourceSlice (validateQualifiedName in pkg/apis/resource/validation), because Kubernetes refuses
// all slices of the pool otherwise.
func TestAttributeNames(t *testing.T) {
	n := strings.Repeat
	for _, name := range []string{
		"rail", "_a", "0a", "a-b", n("n", 32), n("n", 33), "", "/rail", "a/", "a/b/c",
		"example.com/rail", "a/rail", "a..b/rail", "a.-b/rail", "a-.b/rail", "a-/rail", "-a/rail",
		".a/rail", "a./rail", "A.b/rail", "a_b/rail", "a--b.c0/rail", "0.1/rail", "example.com/rail-0",
		n("d", 63) + "/rail", n("d", 64) + "/rail", n("d", 31) + "." + n("d", 31) + "/rail",
		n("d", 32) + "." + n("d", 31) + "/rail", n("a.", 31) + "a/rail", n("a.", 32) + "a/rail",
	} {
		domain, identifier, qualified := strings.Cut(name, "/")
		if !qualified {
			domain, identifier = "d", name
		}
		want := len(domain) <= 63 && len(validation.IsDNS1123Subdomain(domain)) == 0 &&
			len(identifier) <= 32 && len(validation.IsCIdentifier(identifier)) == 0

		err := v1alpha1.PoolAttribute{Name: name, Int: new(int64(1))}.Validate()
		if (err == nil) != want {
			t.Errorf("name %q: error %v, want a name that is accepted: %v", name, err, want)
		}
	}
}
