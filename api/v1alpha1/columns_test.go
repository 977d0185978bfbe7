// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

// TestNumbersInColumns: a number of the status that kubectl prints is there once the status is. The
// first write of a status is a patch, which leaves out zeros.
func TestNumbersInColumns(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "deploy", "crds", "xpu.*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("CRDs: %v, %v", files, err)
	}

	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}

		for _, version := range crd.Spec.Versions {
			status := version.Schema.OpenAPIV3Schema.Properties["status"]
			for _, column := range version.AdditionalPrinterColumns {
				field, ofStatus := strings.CutPrefix(column.JSONPath, ".status.")
				if column.Type != "integer" || !ofStatus {
					continue
				}
				if status.Properties[field].Default == nil && !slices.Contains(status.Required, field) {
					t.Errorf("%s: column %s may be empty", crd.Name, column.Name)
				}
			}
		}
	}
}
