// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"os"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestSeeded checks that a file has every fault of functions, and no other.
func TestSeeded(t *testing.T) {
	s, err := parseText("x.go", "package x\n\nvar a = 1\n\nfunc f(n int) (m int, err error) {\n"+
		"	return n, nil\n}\n\nfunc g() {\n	h()\n}\n")
	must.Succeed(t, err)
	rest, err := s.seed([]Fault{
		{Name: "one", edits: []edit{{"n, nil", "n + 1, nil"}}},
		{Name: "two", edits: []edit{{"n, nil", "n + 2, nil"}, {"	h()", "	i()"}}},
		{Name: "three", edits: []edit{{"a = 1", "a = 3"}}},
	})
	must.Succeed(t, err)
	if len(rest) != 1 || rest[0].Name != "three" {
		t.Errorf("alone are %v, want three", rest)
	}

	want := `package x

var a = 1

func f(n int) (m int, err error) {
if seededFault("one") {
return func() (m int, err error) {
	return n + 1, nil
}()
}

if seededFault("two") {
return func() (m int, err error) {
	return n + 2, nil
}()
}

	return n, nil
}

func g() {
if seededFault("two") {
func() {
	i()
}()
return
}

	h()
}
`
	if got := s.seeded(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestSeed checks that each fault fits the source, and that almost all share a program.
func TestSeed(t *testing.T) {
	_, alone, err := Seed("../../..", t.TempDir(), All())
	must.Succeed(t, err)
	var names []string
	for _, f := range alone {
		if f.IsVLANAware() {
			t.Errorf("%s: must be in a function, because it is tried in a guest", f.Name)
		}
		names = append(names, f.Name)
	}
	if len(alone) > 20 {
		t.Errorf("%d faults need a program each: %s", len(alone), strings.Join(names, ", "))
	}
	t.Logf("alone: %s", strings.Join(names, ", "))
}

// TestFits checks that the source still has what each fault changes.
func TestFits(t *testing.T) {
	for _, f := range All() {
		text, err := os.ReadFile("../../../" + f.file)
		must.Succeed(t, err)
		if _, err := f.apply(string(text)); err != nil {
			t.Errorf("%s: %v", f.Name, err)
		}
	}
}
