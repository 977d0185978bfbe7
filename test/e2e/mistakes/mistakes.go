// SPDX-License-Identifier: Apache-2.0

// Package mistakes is the table of what people do wrong, what the product says about it, and what
// helps. The end-to-end test makes each mistake on the demo's cluster, and docs/gen makes the page
// docs/reference/mistakes.md from it.
package mistakes

import (
	"bytes"
	_ "embed"
	"fmt"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Section is a group of rows about one kind of object.
type Section struct {
	Title string `yaml:"title"`
	Rows  []Row  `yaml:"rows"`
}

// Row is one mistake.
type Row struct {
	// Mistake is what somebody does, as the page calls it.
	Mistake string `yaml:"mistake"`
	// Pod is the name of a pod that the row makes, with a claim of Class whose InterfaceConfig has
	// the fields of Config.
	Pod   string `yaml:"pod"`
	Class string `yaml:"class"`
	// Config has the fields of an InterfaceConfig, as a YAML flow mapping.
	Config string `yaml:"config"`
	// Before is a shell script that runs before anything is applied.
	Before string `yaml:"before"`
	// Apply has objects for kubectl apply. The pod's come after them.
	Apply string `yaml:"apply"`
	// Run is a shell script that runs after the objects are applied.
	Run string `yaml:"run"`
	// Look is the command that shows the sentences. If it is empty, it is "xpuctl explain pod" for a
	// row with a Pod, and otherwise the objects cannot be applied, and kubectl says why.
	Look string `yaml:"look"`
	// Exit is the exit code of Look.
	Exit int `yaml:"exit"`
	// Says are sentences that Look prints, each in one line; "..." stands for any text.
	Says []string `yaml:"says"`
	// Do is what helps.
	Do string `yaml:"do"`
	// Undo is a shell script that runs before the objects are deleted.
	Undo string `yaml:"undo"`
}

//go:embed mistakes.yaml
var table []byte

// All returns the table.
func All() (sections []Section, err error) {
	decoder := yaml.NewDecoder(bytes.NewReader(table))
	decoder.KnownFields(true)
	if err := decoder.Decode(&sections); err != nil {
		return nil, fmt.Errorf("mistakes.yaml: %w", err)
	}

	for _, section := range sections {
		for _, row := range section.Rows {
			if row.Mistake == "" || len(row.Says) == 0 || row.Do == "" {
				return nil, fmt.Errorf("mistakes.yaml: %q: mistake, says and do are needed",
					row.Mistake)
			}
		}
	}

	return sections, nil
}

// Command returns the command that shows the sentences.
func (r Row) Command() string {
	switch {
	case r.Look != "":
		return r.Look
	case r.Pod != "":
		return "xpuctl explain pod " + r.Pod
	}
	return "kubectl apply"
}

// Refused reports whether the objects of the row cannot be applied.
func (r Row) Refused() bool { return r.Look == "" && r.Pod == "" }

// Missing returns the first sentence that an output lacks, and "" if it has all.
func (r Row) Missing(output string) string {
	for _, sentence := range r.Says {
		parts := strings.Split(sentence, "...")
		for i := range parts {
			parts[i] = regexp.QuoteMeta(parts[i])
		}
		if !regexp.MustCompile(strings.Join(parts, ".*")).MatchString(output) {
			return sentence
		}
	}
	return ""
}

// Manifest returns the objects of the row, as YAML.
func (r Row) Manifest() string {
	if r.Pod == "" {
		return r.Apply
	}

	class, config := r.Class, ""
	if class == "" {
		class = "xpu-fast"
	}
	if r.Config != "" {
		fields := strings.TrimPrefix(strings.TrimSpace(r.Config), "{")
		config = `
      config:
      - opaque:
          driver: xpu.opiproject.org
          parameters: {apiVersion: xpu.opiproject.org/v1alpha1, kind: InterfaceConfig, ` + fields
	}

	objects := strings.NewReplacer("NAME", r.Pod, "CLASS", class, "CONFIG", config).Replace(claimed)
	if r.Apply == "" {
		return objects
	}
	return r.Apply + "---\n" + objects
}

// claimed are a pod and the template of its claim.
const claimed = `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: NAME}
spec:
  spec:
    devices:
      requests:
      - {name: nic, exactly: {deviceClassName: CLASS}}CONFIG
---
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: nic, resourceClaimTemplateName: NAME}]
  containers:
  - name: main
    image: devcluster.local/pause:1
    resources: {claims: [{name: nic}]}
`
