// SPDX-License-Identifier: Apache-2.0

package prototypes

import (
	"fmt"
	"regexp"
	"strings"
)

// pcieRoot is the standard attribute that both prototypes assumed: pcie-root, and dra.k8s.io/pcie_root.
const pcieRoot = "resource.kubernetes.io/pcieRoot"

var (
	driverIs = regexp.MustCompile(
		`^\s*device\.driverName\s*==\s*['"]([^'"]+)['"]\s*(&&[^|]*)?$`)
	typed = regexp.MustCompile(
		`device\.(string|bool|version|quantity)Attributes\[['"]([^'"/]+)/([^'"]+)['"]\]`)
	isSet = regexp.MustCompile(`['"]([^'"/]+)/([^'"]+)['"]\s+in\s+device\.attributes`)
	plain = regexp.MustCompile(`\bdevice\.([A-Za-z_]\w*)`)
	// a quantity with a suffix, such as '10G'
	quantity = regexp.MustCompile(`['"][0-9.]+([kMGTPE]i?|Ki)['"]`)
)

// defaults are what an absent attribute was in dra-evolution, by type.
var defaults = map[string]string{
	"string": `""`, "bool": "false", "version": `semver("0.0.0")`, "quantity": `quantity("0")`,
}

// evolutionExpression converts a deviceSelector of dra-evolution. Quantities are capacity today.
func evolutionExpression(expression string) string {
	expression = isSet.ReplaceAllString(expression, `has(device.attributes["$1"].$2)`)
	expression = strings.ReplaceAll(expression, "device.driverName", "device.driver")

	return typed.ReplaceAllStringFunc(expression, func(found string) string {
		m := typed.FindStringSubmatch(found)
		from := "attributes"
		if m[1] == "quantity" {
			from = "capacity"
		}
		return fmt.Sprintf(`device.%s["%s"].?%s.orValue(%s)`, from, m[2], m[3], defaults[m[1]])
	})
}

// plainExpression converts constraints of k8srm-prototype, whose attributes have no domain.
func plainExpression(expression, driver string) string {
	return plain.ReplaceAllString(expression,
		fmt.Sprintf(`device.attributes["%s"].?$1.orValue("")`, driver))
}

// qualified returns the name of an attribute with its domain. Without a driver the name stays as it
// is, if it has no domain.
func qualified(name, driver string) string {
	switch {
	case name == "pcie-root", strings.HasSuffix(name, "/pcie_root"):
		return pcieRoot
	case strings.Contains(name, "/"), driver == "":
		return name
	}
	return driver + "/" + name
}

// selector returns an expression as a selector.
func selector(expression string) object {
	return object{"cel": object{"expression": expression}}
}
