package broker

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// scoped is the name in the infra cluster of a tenant's cluster-scoped object. Names of tenants have no dot, so that no two names are
// the same.
func scoped(tenant, name string) string {
	return fit(tenant+"."+name, validation.DNS1123SubdomainMaxLength)
}

// scopedNetwork is that of an XPUNetwork. It is also the value of a label.
func scopedNetwork(tenant, name string) string {
	return fit(tenant+"."+name, validation.LabelValueMaxLength)
}

// scopedPort is the name of an XPUPort. Names of namespaces have no dot.
func scopedPort(tenant string, port types.NamespacedName) string {
	return scoped(tenant, port.Namespace+"."+port.Name)
}

// local reverses scoped. ok is false for names of other tenants' objects.
func local(tenant, name string) (_ string, ok bool) {
	return strings.CutPrefix(name, tenant+".")
}

// fit shortens a name that is too long. What it leaves out is in the digest.
func fit(name string, most int) string {
	if len(name) <= most {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	end := "-" + hex.EncodeToString(sum[:4])
	return strings.TrimRight(name[:most-len(end)], ".-") + end
}

// localText has a text of the infra cluster name objects as the tenant does.
func localText(tenant, text string) string {
	if !strings.Contains(text, tenant+".") {
		return text
	}
	prefix := regexp.MustCompile(`(^|[^A-Za-z0-9.-])` + regexp.QuoteMeta(tenant) + `\.([a-z0-9])`)
	return prefix.ReplaceAllString(text, "$1$2")
}
