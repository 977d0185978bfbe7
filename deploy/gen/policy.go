// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
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
  # Only classes are updated here, and they have their parameters in spec.config.
  - name: changes-the-parameters
    expression: oldObject == null || dyn(object).spec.?config.orValue([]) != dyn(oldObject).spec.?config.orValue([])
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
      : [variables.wrong[0], variables.wrong[1], variables.wrong[2], variables.wrong[3]].join("; ") +
      "; and " + string(variables.wrong.size() - 4) + " more"
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
// is wrong with it, because the API server bounds the cost of each expression. Expressions have
// functions of Kubernetes 1.33 only, because Kubernetes 1.34 takes no others
// (baseOpts of k8s.io/apiserver/pkg/cel/environment).
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
		for _, p := range c.problems(f) {
			variable(&page, p.variable, p.expression)
			all = append(all, "variables."+p.variable)
		}
	}
	variable(&page, "wrong", strings.Join(all, " + "))
	page.WriteString(tail)

	return page.Bytes()
}

// problem is a variable with the messages about a field.
type problem struct {
	variable, expression string
}

// problems returns what is wrong with a field of the parameters. A struct has a problem for each of
// its fields, and before them one for itself.
func (c checker) problems(f field) []problem {
	value := "e.p." + f.name
	t := f.of
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return []problem{{f.name, c.problem("", value, f.name, t)}}
	}

	var names []string
	var inner []problem
	isStruct := fmt.Sprintf("has(%s) && type(%[1]s) == map && ", value)
	for _, of := range fieldsOf(t) {
		names = append(names, of.name)
		inner = append(inner, problem{f.name + "_" + of.name,
			c.problem(isStruct, value+"."+of.name, f.name+"."+of.name, of.of)})
	}

	itself := fmt.Sprintf("variables.ours.filter(e, has(%s) && %[1]s != null && (type(%[1]s) != map || %[2]s))"+
		".map(e, type(%[1]s) != map ? e.at + %[3]q : %[4]s)", value, hasUnknown(value, names),
		"."+f.name+": must have fields", unknownField(value, f.name+".", names))
	return append([]problem{{f.name, itself}}, inner...)
}

// problem returns an expression for the messages about values that are given, but wrong. It looks at
// those only for which the condition in front holds.
func (c checker) problem(front, value, path string, t reflect.Type) string {
	check := c.value(value, t, path, 0)
	return fmt.Sprintf("variables.ours.filter(e, %shas(%s) && %[2]s != null && !(%s)).map(e, e.at + %q)",
		front, value, check.holds, "."+path+": "+check.must)
}

// hasUnknown returns a condition that a map has other keys than the names.
func hasUnknown(value string, names []string) string {
	return fmt.Sprintf("%s.exists(k, !(k in %s))", value, set(names))
}

// unknownField returns an expression for the message about the first key of a map that is not among
// the names, in the words of the driver and with the names. Other such keys have no message, because
// a claim could have so many of them that the messages cost more than the API server allows.
func unknownField(value, prefix string, names []string) string {
	return fmt.Sprintf(`e.at + ": unknown field \"%s" + %s.filter(k, !(k in %s)).map(k, `+
		`k.size() > 64 ? k.substring(0, 64) : k)[0] + "\"; fields are %s"`, prefix, value,
		set(names), strings.Join(slices.Sorted(slices.Values(names)), ", "))
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
