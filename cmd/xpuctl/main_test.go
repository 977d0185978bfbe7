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

	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
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

// TestScripts runs testdata/*.txtar.
func TestScripts(t *testing.T) { scripted.Run(t, "xpuctl", nil) }

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
