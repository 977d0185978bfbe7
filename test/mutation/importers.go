// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
)

// tooLong matches packages whose tests run whole clusters, programs of their own, or guests.
var tooLong = regexp.MustCompile(`/test/(e2e|bench|qemu|soak|images|mutation|scenarios)`)

// importersOf returns the packages of the module that import a package, in their code or in their
// tests, and that have tests.
func importersOf(ctx context.Context, pkg string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", pkg).Output()
	if err != nil {
		return nil, fmt.Errorf("import path: %w", err)
	}
	path := string(bytes.TrimSpace(out))

	out, err = exec.CommandContext(ctx, "go", "list", "-json", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("packages of the module: %w", err)
	}

	var importers []string
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath                         string
			Imports, TestImports, XTestImports []string
			TestGoFiles, XTestGoFiles          []string
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return importers, nil
		} else if err != nil {
			return nil, fmt.Errorf("packages of the module: %w", err)
		}

		imports := slices.Concat(p.Imports, p.TestImports, p.XTestImports)
		tested := len(p.TestGoFiles)+len(p.XTestGoFiles) > 0
		if tested && p.ImportPath != path && slices.Contains(imports, path) &&
			!tooLong.MatchString(p.ImportPath) {
			importers = append(importers, p.ImportPath)
		}
	}
}
