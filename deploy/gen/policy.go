// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

const head = `# Made by deploy/gen from the type InterfaceConfig and its limits. Do not edit: run make generate.
#
# Claims, templates and classes with wrong parameters for this driver are refused when they are written: fields that do not
# exist, wrong types, values that are never right. Other drivers' parameters are not looked at. What costs too much, or cannot be
# judged, is written (failurePolicy: Ignore): the node's agent judges the parameters before a pod starts.
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: xpu-parameters
spec:
  failurePolicy: Ignore
  matchConstraints:
    matchPolicy: Equivalent # the API server converts objects of other versions
    resourceRules:
    # Nothing changes the specs of these two.
    - apiGroups: [resource.k8s.io]
      apiVersions: [v1]
      operations: [CREATE]
      resources: [resourceclaims, resourceclaimtemplates]
    - apiGroups: [resource.k8s.io]
      apiVersions: [v1]
      operations: [CREATE, UPDATE]
      resources: [deviceclasses]
  matchConditions:
  - name: has-parameters-for-this-driver
    expression: >-
      dyn(object).spec.?spec.?devices.?config.orValue(dyn(object).spec.?devices.?config.orValue(
      dyn(object).spec.?config.orValue([]))).exists(c, c.?opaque.?driver.orValue("") == "xpu.opiproject.org")
  - name: changes-the-spec
    expression: oldObject == null || dyn(object).spec != dyn(oldObject).spec
  - name: stays
    expression: '!has(dyn(object).metadata.deletionTimestamp)'
  variables:
  - name: at
    expression: >-
      has(dyn(object).spec.spec) ? "spec.spec.devices.config[" : has(dyn(object).spec.devices) ? "spec.devices.config["
      : "spec.config["
  - name: configs
    expression: >-
      dyn(object).spec.?spec.?devices.?config.orValue(dyn(object).spec.?devices.?config.orValue(
      dyn(object).spec.?config.orValue([])))
  # at is the field of the parameters, and p the parameters themselves.
  - name: ours
    expression: >-
      variables.configs.transformList(i, c, c.?opaque.?driver.orValue("") == "xpu.opiproject.org",
      {"at": dyn(variables.at + string(i) + "].opaque.parameters"), "p": dyn(c.opaque.parameters)})
`

const tail = `  validations:
  - expression: variables.wrong.size() == 0
    reason: Invalid
    message: the parameters for driver xpu.opiproject.org are wrong
    messageExpression: >-
      variables.wrong.size() <= 4 ? variables.wrong.join("; ")
      : variables.wrong.slice(0, 4).join("; ") + "; and " + string(variables.wrong.size() - 4) + " more"
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: xpu-parameters
spec:
  policyName: xpu-parameters
  validationActions: [Deny]
`

// policy returns the ValidatingAdmissionPolicy and its binding. Each field has a variable with what
// is wrong with it, because the API server bounds the cost of each expression.
func policy() []byte {
	known := []string{"apiVersion", "kind"}
	fields := fieldsOf(reflect.TypeFor[v1alpha1.InterfaceConfig]())
	for _, f := range fields {
		known = append(known, f.name)
	}

	var page bytes.Buffer
	page.WriteString(head)
	variable(&page, "otherKind", fmt.Sprintf(
		`variables.ours.filter(e, e.p.?apiVersion.orValue("") != %q || e.p.?kind.orValue("") != %q).map(e, `+
			`e.at + %q)`, v1alpha1.SchemeGroupVersion, "InterfaceConfig",
		fmt.Sprintf(": apiVersion and kind: must be %s and InterfaceConfig", v1alpha1.SchemeGroupVersion)))
	variable(&page, "unknownFields", fmt.Sprintf("variables.ours.filter(e, %s).map(e, %s)",
		hasUnknown("e.p", known), unknownField("e.p", "", known)))

	all := []string{"variables.otherKind", "variables.unknownFields"}
	c := checker{limits: claim.Limits()}
	for _, f := range fields {
		variable(&page, f.name, c.problems(f))
		all = append(all, "variables."+f.name)
	}
	variable(&page, "wrong", strings.Join(all, " + "))
	page.WriteString(tail)

	return page.Bytes()
}

// problems returns an expression of what is wrong with a field of the parameters. The fields of a
// struct have a message each.
func (c checker) problems(f field) string {
	value := "e.p." + f.name
	given := fmt.Sprintf("has(%s) && %[1]s != null", value)
	t := f.of
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		check := c.value(value, t, f.name, 0)
		return fmt.Sprintf("variables.ours.filter(e, %s && !(%s)).map(e, e.at + %q)", given, check.holds,
			"."+f.name+": "+check.must)
	}

	var names []string
	var parts []string
	for _, inner := range fieldsOf(t) {
		names = append(names, inner.name)
		at := value + "." + inner.name
		check := c.value(at, inner.of, f.name+"."+inner.name, 0)
		parts = append(parts, fmt.Sprintf("(has(%s) && %[1]s != null && !(%s) ? [e.at + %q] : [])", at,
			check.holds, "."+f.name+"."+inner.name+": "+check.must))
	}

	unknown := fmt.Sprintf("(%s ? [%s] : [])", hasUnknown(value, names),
		unknownField(value, f.name+".", names))
	return fmt.Sprintf("variables.ours.filter(e, %s).map(e, type(%s) != map ? [e.at + %q] : %s + %s).flatten()",
		given, value, "."+f.name+": must have fields", unknown, strings.Join(parts, " + "))
}

// hasUnknown returns a condition that a map has other keys than the names.
func hasUnknown(value string, names []string) string {
	return fmt.Sprintf("%s.exists(k, !(k in %s))", value, set(names))
}

// unknownField returns an expression for the message about the first key of a map that is none of
// the names, in the words of the driver. There is no message for each, because a claim could have so
// many of them that they cost more than the API server allows.
func unknownField(value, prefix string, names []string) string {
	return fmt.Sprintf(`e.at + ": unknown field \"%s" + %s.filter(k, !(k in %s)).map(k, `+
		`k.size() > 64 ? k.substring(0, 64) : k)[0] + "\""`, prefix, value, set(names))
}

// variable writes a variable with its expression on lines of at most 120 columns. They are folded
// at blanks outside of strings.
func variable(page *bytes.Buffer, name, expression string) {
	fmt.Fprintf(page, "  - name: %s\n    expression: >-\n", name)
	const width = 120
	line, quoted := "", false
	flush := func(word string) {
		if line != "" && len(line)+1+len(word) > width-6 {
			fmt.Fprintf(page, "      %s\n", line)
			line = ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}

	word := ""
	for _, r := range expression {
		if r == '"' && !strings.HasSuffix(word, `\`) {
			quoted = !quoted
		}
		if r == ' ' && !quoted {
			flush(word)
			word = ""
			continue
		}
		word += string(r)
	}
	flush(word)
	fmt.Fprintf(page, "      %s\n", line)
}
