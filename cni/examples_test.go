// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/version"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// networkList is a network configuration as users write it: one plugin, or a list of plugins.
type networkList struct {
	CNIVersion string           `json:"cniVersion"`
	Name       string           `json:"name"`
	Type       string           `json:"type"`
	Plugins    []map[string]any `json:"plugins"`
}

// examples returns the network configurations in the files with examples, by file and name.
func examples(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob("examples/*")
	if err != nil {
		t.Fatal(err)
	}

	configs := map[string][]byte{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Ext(file) == ".conflist" {
			configs[file] = data
			continue
		}

		documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
		for {
			document, err := documents.Read()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}

			var object struct {
				Kind     string
				Metadata struct {
					Name        string
					Annotations map[string]string
				}
				Spec struct{ Config string }
			}

			if err := yaml.Unmarshal(document, &object); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if object.Kind != "NetworkAttachmentDefinition" {
				continue
			}
			if object.Metadata.Annotations["k8s.v1.cni.cncf.io/resourceName"] == "" {
				t.Errorf("%s: %s names no resource", file, object.Metadata.Name)
			}

			configs[file+" "+object.Metadata.Name] = []byte(object.Spec.Config)
		}
	}

	return configs
}

// TestExamples: the shim accepts the examples, and they use documented fields.
func TestExamples(t *testing.T) {
	documented := documentedFields(t)
	found := examples(t)
	if len(found) == 0 {
		t.Fatal("there are no examples")
	}

	for name, data := range found {
		t.Run(name, func(t *testing.T) {
			var list networkList
			if err := json.Unmarshal(data, &list); err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(version.All.SupportedVersions(), list.CNIVersion) ||
				list.Name == "" {
				t.Errorf("cniVersion %q, name %q", list.CNIVersion, list.Name)
			}

			plugin := map[string]any{}
			if list.Type != "" {
				if err := json.Unmarshal(data, &plugin); err != nil {
					t.Fatal(err)
				}
			} else if len(list.Plugins) > 0 {
				plugin = list.Plugins[0]
			}

			if plugin["type"] != "xpu-cni" {
				t.Fatalf("its first plugin is %v", plugin["type"])
			}

			for field := range plugin {
				if !slices.Contains(documented, field) {
					t.Errorf("field %s is not in the reference", field)
				}
			}

			config, err := json.Marshal(plugin)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := parseConfig(config,
				site{DefaultPaths(), DefaultDeviceInfoDir, "c1"}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestReferenceHasEveryField: the fields that the shim itself reads are documented.
func TestReferenceHasEveryField(t *testing.T) {
	documented := documentedFields(t)
	for field := range reflect.TypeFor[config]().Fields() {
		if name := field.Tag.Get("json"); !slices.Contains(documented, name) {
			t.Errorf("field %s is not in the reference", name)
		}
	}
}

// documentedFields returns the names at the beginning of rows of the reference's tables. For
// "runtimeConfig.mac" it also returns the part before the dot.
func documentedFields(t *testing.T) []string {
	t.Helper()
	data, err := os.ReadFile("../docs/reference/xpu-cni.md")
	if err != nil {
		t.Fatal(err)
	}

	var fields []string
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			continue
		}
		for _, cell := range strings.Split(cells[1], ",") {
			field := strings.Trim(strings.TrimSpace(cell), "`")
			first, _, _ := strings.Cut(field, ".")
			fields = append(fields, field, first)
		}
	}

	return fields
}
