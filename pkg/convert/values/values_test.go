// SPDX-License-Identifier: Apache-2.0

package values_test

import (
	"os"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/convert/values"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestTargetsAreInOurChart checks that values are converted to values that this project's chart has.
func TestTargetsAreInOurChart(t *testing.T) {
	text, err := os.ReadFile("../../../deploy/chart/values.yaml")
	must.Succeed(t, err)
	var ours map[string]any
	must.Succeed(t, yaml.Unmarshal(text, &ours))

	for _, chart := range values.Charts() {
		for _, path := range chart.Targets() {
			if _, has, err := unstructured.NestedFieldNoCopy(ours,
				strings.Split(path, ".")...); err != nil || !has {
				t.Errorf("%s: our chart has no value %s (%v)", chart.Name, path, err)
			}
		}
	}
}

func TestOf(t *testing.T) {
	for text, want := range map[string]string{
		"{}":                                             "",
		"nodeSelector: {a: b}":                           "",
		"operator: {replicas: 2}":                        "", // Cilium's
		"kubeletPlugin: {nodeSelector: {}}":              "", // of any DRA driver
		"image: {repository: r.example/x/dranet}":        "DRANET",
		"args: {dbPath: /var/lib/db}":                    "", // of any program
		"args: {moveIBInterfaces: true}":                 "DRANET",
		"kubeletPlugin: {configurationMode: STANDALONE}": "dra-driver-sriov",
		"operator: {resourcePrefix: example.com}":        "sriov-network-operator",
	} {
		var of map[string]any
		must.Succeed(t, yaml.Unmarshal([]byte(text), &of))
		got := ""
		if chart := values.Of(of); chart != nil {
			got = chart.Name
		}
		if got != want {
			t.Errorf("%s: are values of %q, want %q", text, got, want)
		}
	}
}
