// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// write makes files below a new directory.
func write(t *testing.T, files map[string]string) (root string) {
	root = t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	return root
}

const one = "package p\n\nimport \"testing\"\n\nfunc FuzzOne(f *testing.F) {}\n"

func TestTargets(t *testing.T) {
	root := write(t, map[string]string{
		"p/one_test.go": one,
		"p/p.go":        "package p\n\nfunc FuzzNoTest() {}\n",
		"p/two_test.go": "package p_test\n\nimport \"testing\"\n\n" +
			"func FuzzTwo(f *testing.F) {}\nfunc FuzzHelper(t *testing.T) {}\n" +
			"func TestFuzz(f *testing.F) {}\nfunc FuzzBoth(f, g *testing.F) {}\n" +
			"func (x T) FuzzMethod(f *testing.F) {}\n",
		"p/old_windows_test.go":    strings.ReplaceAll(one, "One", "Elsewhere"),
		"p/testdata/x_test.go":     strings.ReplaceAll(one, "One", "Data"),
		"bin/before/one_test.go":   one,
		"module/go.mod":            "module m\n",
		"module/cmd/a/one_test.go": one,
	})

	t.Chdir(root)
	got, err := targets([]string{".", "./p"})
	want := []target{{"module/cmd/a", "FuzzOne"}, {"p", "FuzzOne"}, {"p", "FuzzTwo"}}
	diff := cmp.Diff(want, got, cmp.AllowUnexported(target{}))
	if diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}

	if _, err := targets([]string{"absent"}); err == nil ||
		!strings.Contains(err.Error(), "absent") {
		t.Errorf("a directory that is not there: %v", err)
	}
}

// The input that the target refuses is found and named, in a module of its own. So are a seed that
// it refuses, and what does not compile.
func TestFailures(t *testing.T) {
	const source = `package p

import "testing"

func FuzzShort(f *testing.F) {
	f.Add("SEED")
	f.Fuzz(func(t *testing.T, s string) {
		if s REFUSED {
			t.Errorf("%q is refused", s)
		}
	})
}
`
	for name, test := range map[string]struct {
		seed, refused string
		says          []string
	}{
		"an input": {"a", `!= "a"`, []string{
			"module FuzzShort fails on the input in module/testdata/fuzz/FuzzShort/",
			"-run='^FuzzShort$/",
		}},
		"a seed": {"a", `== "a"`, []string{
			"module FuzzShort fails on FuzzShort/seed#0, one of its seeds", "-run='^FuzzShort$'",
		}},
		"a type": {"a", `== 1`, []string{
			"module FuzzShort: exit status 1, without an input", "fuzz_test.go:8",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(write(t, map[string]string{
				"module/go.mod": "module m\n\ngo 1.26\n",
				"module/fuzz_test.go": strings.NewReplacer(
					"SEED", test.seed, "REFUSED", test.refused,
				).Replace(source),
			}))

			err := run(t.Context(), options{time: time.Minute, parallel: 1}, nil)
			for _, says := range test.says {
				if err == nil || !strings.Contains(err.Error(), says) {
					t.Errorf("%v, want it to say %q", err, says)
				}
			}

			kept, err := filepath.Glob("module/testdata/fuzz/FuzzShort/*")
			if err != nil || len(kept) != map[string]int{"an input": 1}[name] {
				t.Errorf("inputs that were kept: %q, %v", kept, err)
			}
		})
	}
}

func TestOnlyLate(t *testing.T) {
	const late = "fuzz: elapsed: 3s, execs: 9 (0/sec)\n--- FAIL: FuzzOne (3.20s)\n" +
		"    context deadline exceeded\nFAIL\nexit status 1\nFAIL\tm\t3.2s\n"
	if !onlyLate.MatchString(late) {
		t.Error("the end of the time is taken for a failure")
	}

	said := strings.Replace(late, "    context",
		"    --- FAIL: FuzzOne (0.00s)\n        one_test.go:7: context", 1)
	if onlyLate.MatchString(said) {
		t.Error("a failure whose words are those is taken for the end of the time")
	}
}

func TestRefuses(t *testing.T) {
	t.Chdir(write(t, map[string]string{"p/one_test.go": one}))
	for says, o := range map[string]options{
		"-time is 0s":                     {},
		"-run: error parsing":             {time: time.Second, run: "("},
		`no fuzz target that matches "x"`: {time: time.Second, run: "x"},
	} {
		if err := run(t.Context(), o, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want it to say %q", err, says)
		}
	}
}
