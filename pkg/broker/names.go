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

// scoped is the name in the infra cluster of a tenant's cluster-scoped object. It begins with the
// tenant's name and a dot, whatever its name there is. Names of tenants have no dot, so that no two
// tenants have a name in common.
func scoped(tenant, name string) string {
	return fit(tenant, name, validation.DNS1123SubdomainMaxLength)
}

// scopedNetwork is that of an XPUNetwork. It is also the value of a label.
func scopedNetwork(tenant, name string) string {
	return fit(tenant, name, validation.LabelValueMaxLength)
}

// scopedPort is the name of an XPUPort. Names of namespaces have no dot.
func scopedPort(tenant string, port types.NamespacedName) string {
	return scoped(tenant, port.Namespace+"."+port.Name)
}

// local reverses scoped. ok is false for names of other tenants' objects.
func local(tenant, name string) (_ string, ok bool) {
	return strings.CutPrefix(name, tenant+".")
}

// fit puts the tenant before a name, and shortens what is too long then. What it leaves out is in
// the digest. Of a text that no object can have as its name, such as dashes alone, only a digest
// follows the tenant's dot, because shortening could cut that off.
func fit(tenant, name string, most int) string {
	full := tenant + "." + name
	sum := sha256.Sum256([]byte(full))
	fitted := full
	if len(full) > most {
		end := "-" + hex.EncodeToString(sum[:4])
		fitted = strings.TrimRight(full[:most-len(end)], ".-") + end
	}
	if _, ok := local(tenant, fitted); ok && len(validation.IsDNS1123Subdomain(fitted)) == 0 {
		return fitted
	}

	// Of an XPUTenant's 32 characters at most, a label value leaves 30 for the digest.
	return tenant + "." + hex.EncodeToString(sum[:15])
}

// localText has a text of the infra cluster name objects as the tenant does.
func localText(tenant, text string) string {
	if !strings.Contains(text, tenant+".") {
		return text
	}
	prefix := regexp.MustCompile(`(^|[^A-Za-z0-9.-])` + regexp.QuoteMeta(tenant) + `\.([a-z0-9])`)
	return prefix.ReplaceAllString(text, "$1$2")
}
