// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// scoped returns the name in the infra cluster of a tenant's cluster-scoped object. It begins with
// the tenant's name and a dot. Names of tenants contain no dot, so two tenants never share a name.
func scoped(tenant, name string) string {
	return fit(tenant, name, validation.DNS1123SubdomainMaxLength)
}

// scopedNetwork returns the name in the infra cluster of a tenant's XPUNetwork. It is also valid as
// the value of a label.
func scopedNetwork(tenant, name string) string {
	return fit(tenant, name, validation.LabelValueMaxLength)
}

// scopedVRF returns the name in the infra cluster of a tenant's VRF, which has the form of a
// network's name.
func scopedVRF(tenant, vrf string) string { return scopedNetwork(tenant, vrf) }

// scopedPort returns the name in the infra cluster of a tenant's XPUPort. It is unambiguous because
// names of namespaces contain no dot.
func scopedPort(tenant string, port types.NamespacedName) string {
	return scoped(tenant, port.Namespace+"."+port.Name)
}

// unscoped reverses scoped. ok is false for names of other tenants' objects.
func unscoped(tenant, name string) (_ string, ok bool) {
	return strings.CutPrefix(name, tenant+".")
}

// fit joins tenant and name with a dot. A result longer than most is shortened and ends with a
// digest of the full name. If the result is not a valid object name (the name is only dashes, say),
// a digest replaces the whole name, because shortening could cut off the tenant's dot.
func fit(tenant, name string, most int) string {
	full := tenant + "." + name
	sum := sha256.Sum256([]byte(full))
	fitted := full
	if len(full) > most {
		end := "-" + hex.EncodeToString(sum[:4])
		fitted = strings.TrimRight(full[:most-len(end)], ".-") + end
	}
	if _, ok := unscoped(tenant, fitted); ok && len(validation.IsDNS1123Subdomain(fitted)) == 0 {
		return fitted
	}

	// A label value has 63 characters. The tenant's name takes at most 32 and the dot one, which
	// leaves 30 for the digest.
	return tenant + "." + hex.EncodeToString(sum[:15])
}

// unscopedText replaces the names of the tenant's objects in a text of the infra cluster by their
// names in the tenant's cluster.
func unscopedText(tenant, text string) string {
	if !strings.Contains(text, tenant+".") {
		return text
	}
	prefix := regexp.MustCompile(`(^|[^A-Za-z0-9.-])` + regexp.QuoteMeta(tenant) + `\.([a-z0-9])`)
	return prefix.ReplaceAllString(text, "$1$2")
}
