// SPDX-License-Identifier: Apache-2.0

// Package docs tests that an API server accepts the YAML in documents, and that their links lead
// somewhere.
package docs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	strictyaml "sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const root = "../.."

var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, filepath.Join(root, "deploy"), func(c *kubeapitest.Cluster) {
		cluster = c
	}, [2]string{"feature-gates", "GenericWorkload=true"},
		[2]string{"runtime-config", "scheduling.k8s.io/v1beta1=true"}))
}

// A manifest is YAML in a document or a file that describes objects.
type manifest struct {
	where string // file:line
	text  string
}

// files returns the files of the project, without build output, whose paths match a condition.
func files(t testing.TB, want func(path string) bool) (found []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}

		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}

		if entry.IsDir() &&
			(relative == "bin" || entry.Name() == "node_modules" ||
				strings.HasPrefix(entry.Name(), ".") && relative != ".") {
			return filepath.SkipDir
		}

		if entry.Type().IsRegular() && want(relative) {
			found = append(found, relative)
		}

		return nil
	})

	must.Succeed(t, err)
	return found
}

func documents(t testing.TB) []string {
	return files(t, func(path string) bool { return filepath.Ext(path) == ".md" })
}

func read(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	must.Succeed(t, err)
	return string(text)
}

var yamlBlock = regexp.MustCompile("(?ms)^( *)```yaml\n(.*?)^ *```")

// shown returns the manifests in documents and in files of examples.
func shown(t testing.TB) (all []manifest) {
	t.Helper()
	for _, path := range documents(t) {
		text := read(t, path)
		for _, match := range yamlBlock.FindAllStringSubmatchIndex(text, -1) {
			indent, block := text[match[2]:match[3]], text[match[4]:match[5]]
			if indent != "" {
				block = regexp.MustCompile("(?m)^"+indent).ReplaceAllString(block, "")
			}
			all = append(all,
				manifest{fmt.Sprintf("%s:%d", path, strings.Count(text[:match[4]], "\n")+1), block})
		}
	}

	examples := files(t, func(path string) bool {
		return filepath.Ext(path) == ".yaml" &&
			(strings.HasPrefix(path, "deploy/samples/") || strings.HasPrefix(path, "examples/") ||
				strings.HasPrefix(path, "cni/examples/"))
	})

	for _, path := range examples {
		all = append(all, manifest{path, read(t, path)})
	}

	return append(all, converted(t)...)
}

// converted returns what xpuctl convert makes in its test of the objects of other programs.
func converted(t testing.TB) (all []manifest) {
	t.Helper()
	const path = "cmd/xpuctl/testdata/convert-detect.txtar"
	for _, file := range txtar.Parse([]byte(read(t, path))).Files {
		if strings.HasSuffix(file.Name, "-converted.yaml") {
			all = append(all, manifest{path + ": " + file.Name, string(file.Data)})
		}
	}
	return all
}

// objects returns the objects in a manifest. A part of an object, without kind, has none.
func (m manifest) objects() (all []*unstructured.Unstructured, err error) {
	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(m.text), 4096); ; {
		object := &unstructured.Unstructured{}
		switch err := decoder.Decode(&object.Object); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		case object.GetKind() != "" && object.GetAPIVersion() != "":
			all = append(all, object)
		}
	}
}

// others are the kinds that the API server of this test does not know, with their projects.
var others = map[string]string{
	"Kustomization":               "kubectl reads it",
	"Component":                   "kubectl reads it",
	"Certificate":                 "cert-manager's",
	"ClusterIssuer":               "cert-manager's",
	"Issuer":                      "cert-manager's",
	"NetworkAttachmentDefinition": "Multus'; its configuration is tested in package cni",
	"ServiceMonitor":              "prometheus-operator's",
	"PodMonitor":                  "prometheus-operator's",
	"PrometheusRule":              "prometheus-operator's",
	"VirtualMachine":              "KubeVirt's; tested in test/kubevirt",
}

// TestYAML checks that an API server accepts each object in a document or an example as kubectl
// would send it.
func TestYAML(t *testing.T) {
	cluster.Need(t)
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)

	for name, labels := range map[string]map[string]string{
		"xpu-tenants": nil, "xpu-quickstart": nil, "monitoring": {resourceapi.DRAAdminNamespaceLabelKey: "true"},
	} {
		must.Succeed(t, admin.Create(t.Context(),
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}))
	}

	strict := client.WithFieldValidation(admin, metav1.FieldValidationStrict)
	var kinds []string
	parts := 0
	for _, m := range shown(t) {
		objects, err := m.objects()
		if err != nil {
			t.Errorf("%s: %v", m.where, err)
			continue
		}

		if len(objects) == 0 {
			parts++
		}

		for _, object := range objects {
			if _, ok := others[object.GetKind()]; ok {
				continue
			}
			kinds = append(kinds, object.GetKind())
			if err := apply(t.Context(), strict, admin.RESTMapper(), object); err != nil {
				t.Errorf("%s: %s %s: %v", m.where, object.GetKind(), object.GetName(), err)
			}
		}
	}

	slices.Sort(kinds)
	t.Logf("%d objects of kinds %v; %d blocks are parts of objects", len(kinds),
		slices.Compact(kinds), parts)
	if len(kinds) < 60 {
		t.Errorf("only %d objects were found", len(kinds))
	}
}

// apply sends an object to the API server as a dry run.
func apply(
	ctx context.Context, c client.Client, mapper meta.RESTMapper, object *unstructured.Unstructured,
) error {
	mapping, err := mapper.RESTMapping(object.GroupVersionKind().GroupKind(),
		object.GroupVersionKind().Version)
	if err != nil {
		return err
	}

	if mapping.Scope.Name() == meta.RESTScopeNameNamespace && object.GetNamespace() == "" {
		object.SetNamespace("default")
	}

	if err := parameters(object); err != nil {
		return err
	}

	return c.Create(ctx, object, client.DryRunAll)
}

// parameters checks the parameters for this driver in claims and classes, which the API server does
// not check.
func parameters(object *unstructured.Unstructured) error {
	path, ok := map[string][]string{
		"ResourceClaim":         {"spec", "devices", "config"},
		"ResourceClaimTemplate": {"spec", "spec", "devices", "config"},
		"DeviceClass":           {"spec", "config"},
	}[object.GetKind()]

	if !ok {
		return nil
	}

	configs, _, err := unstructured.NestedSlice(object.Object, path...)
	if err != nil {
		return err
	}

	for i, config := range configs {
		raw, found, err := unstructured.NestedMap(config.(map[string]any), "opaque", "parameters")
		if err != nil || !found {
			return fmt.Errorf("config %d has no parameters: %w", i, err)
		}

		text, err := strictyaml.Marshal(raw)
		if err != nil {
			return err
		}

		var decoded v1alpha1.InterfaceConfig
		if err := strictyaml.UnmarshalStrict(bytes.TrimSpace(text), &decoded); err != nil {
			return fmt.Errorf("config %d: %w", i, err)
		}
	}

	return nil
}
