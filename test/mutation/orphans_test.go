// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestEndOrphans checks that a program which its parent left behind is ended.
func TestEndOrphans(t *testing.T) {
	if err := adoptOrphans(); err != nil {
		t.Fatal(err)
	}

	out, err := exec.Command("sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!").Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := endOrphans(); err != nil {
		t.Fatal(err)
	}

	pid := strings.TrimSpace(string(out))
	if exec.Command("kill", "-0", pid).Run() == nil {
		t.Errorf("process %s is still there", pid)
	}
}

func TestImporters(t *testing.T) {
	t.Chdir("../..")
	got, err := importersOf(t.Context(), "./pkg/keylock")
	if err != nil {
		t.Fatal(err)
	}
	if len(got) == 0 {
		t.Error("no package imports pkg/keylock")
	}
	for _, p := range got {
		if strings.HasSuffix(p, "pkg/keylock") {
			t.Error("a package is not its own importer")
		}
	}
}
