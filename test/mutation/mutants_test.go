// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestMutants(t *testing.T) {
	const source = `package p

func f(a, b int, ok bool) error {
	if a == 1 && !ok {
		log.Info("told")
		return err
	}
	do(a)
	defer undo(a)
	switch a, c.d = b, a; {
	case ok:
	default:
	}
	return fmt.Errorf("no %d", b)
}
`

	path := filepath.Join(t.TempDir(), "p.go")
	if err := os.WriteFile(path, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}

	found, err := mutants(path)
	if err != nil {
		t.Fatal(err)
	}

	var got []string
	for _, m := range found {
		_, what, _ := strings.Cut(m.String(), "p.go:")
		got = append(got, what)
		if string(m.source()) == source {
			t.Errorf("%s changes nothing", m)
		}
	}

	slices.Sort(got)
	want := []string{
		"4: ! left out", "4: && to ||", "4: == to !=", "6: err to nil", "8: left out: do(a)",
		"9: left out: defer undo(a)", "10: left out: assignment to a", "11: left out: case ok",
		"14: fmt.Errorf to nil",
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
	if source := string(found[0].source()); !strings.Contains(source, "a == 1 || !ok") {
		t.Errorf("the first mutant is\n%s", source)
	}
}
