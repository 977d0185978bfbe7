// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/scripted"
)

// run runs xpuctl.
func run(stdin string, args ...string) (stdout, stderr string, err error) {
	var out, notes bytes.Buffer
	c := command("xpuctl")
	c.SetArgs(args)
	err = execute(context.Background(), c, strings.NewReader(stdin), &out, &notes)
	return out.String(), notes.String(), err
}

func TestKubectlPlugin(t *testing.T) {
	var out bytes.Buffer
	c := command("kubectl-xpu")
	c.SetArgs([]string{"schedule", "--help"})
	c.SetOut(&out)
	if err := c.Execute(); err != nil ||
		!strings.Contains(out.String(), "Usage:\n  kubectl xpu schedule ") {
		t.Errorf("%v, %s", err, out.String())
	}
}

func TestMan(t *testing.T) {
	dir := t.TempDir()
	if _, stderr, err := run("", "man", dir); err != nil {
		t.Fatalf("%v, %s", err, stderr)
	}

	for _, page := range []string{"xpuctl.1", "xpuctl-schedule.1", "xpuctl-convert-sriovdp.1"} {
		content, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil || !strings.Contains(string(content), ".SH SYNOPSIS") {
			t.Errorf("%s: %v, %s", page, err, content)
		}
	}

	if _, _, err := run("", "man", filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that is not there is no error")
	}
}

func TestMain(m *testing.M) { scripted.Main(m, main) }

// TestScripts runs testdata/*.txtar. The scripts have no cluster but those that they name.
func TestScripts(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	scripted.Run(t, "xpuctl", nil)
}

// TestConvertedIsTaken checks that the agent takes what xpuctl convert prints.
func TestConvertedIsTaken(t *testing.T) {
	archive, err := txtar.ParseFile("testdata/convert.txtar")
	if err != nil {
		t.Fatal(err)
	}

	for _, file := range archive.Files {
		if file.Name == "pools.yaml" {
			if _, _, err := source.Parse(file.Data, ""); err != nil {
				t.Error(err)
			}
			return
		}
	}
	t.Error("the script has no pools.yaml")
}

// TestConvertedClaimsAreTaken checks that an API server with the project's CRDs and policies takes
// what xpuctl convert prints of other drivers' claims and networks.
func TestConvertedClaimsAreTaken(t *testing.T) {
	cluster, err := kubeapitest.Start("../../deploy")
	must.Succeed(t, err)
	cluster.Need(t)
	t.Cleanup(func() { must.Succeed(t, cluster.Stop()) })
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)

	taken := map[string]int{}
	for _, file := range []string{
		"convert-dranet.txtar", "convert-dra-driver-sriov.txtar", "convert-prototypes.txtar",
	} {
		archive, err := txtar.ParseFile(filepath.Join("testdata", file))
		must.Succeed(t, err)
		for _, f := range archive.Files {
			if !strings.HasSuffix(f.Name, "converted.yaml") {
				continue
			}
			for text := range strings.SplitSeq(string(f.Data), "---\n") {
				object := &unstructured.Unstructured{}
				must.Succeed(t, yaml.Unmarshal([]byte(text), object))
				switch object.GetKind() {
				case "ResourceClaim", "ResourceClaimTemplate":
					object.SetNamespace("default")
				case "DeviceClass", "ResourceSlice", "XPUNetwork":
				default:
					continue
				}
				taken[object.GetKind()]++
				if err := admin.Create(t.Context(), object, client.DryRunAll); err != nil {
					t.Errorf("%s, %s: %v", file, f.Name, err)
				}
			}
		}
	}

	if taken["XPUNetwork"] < 2 || taken["DeviceClass"] < 2 || taken["ResourceClaim"] < 1 {
		t.Errorf("only %v were found", taken)
	}
}
