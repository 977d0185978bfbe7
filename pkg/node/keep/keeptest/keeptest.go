// SPDX-License-Identifier: Apache-2.0

// Package keeptest compares the files of directories that package keep keeps.
package keeptest

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"testing"
)

// WantFiles fails the test unless the directory has the files of these names, sorted, and no others.
// A directory that does not exist has none.
func WantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}

	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if !slices.Equal(names, want) {
		t.Errorf("%s has %q, want %q", dir, names, want)
	}
}
