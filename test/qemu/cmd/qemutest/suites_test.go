// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestSelectGuests(t *testing.T) {
	for _, test := range []struct {
		name    string
		options options
		want    string // guests, each with its selected suites
		not     string // a suite or guest that is not selected
	}{
		{"all that is short", options{}, "igb inventory simnic switchdev", "igb8"},
		{"one guest", options{guest: "simnic"}, "simnic switchdev", "igb"},
		{"one suite", options{only: "inventory"}, "igb inventory", "simnic"},
		{"several suites", options{only: "netdev,inventory"}, "igb netdev inventory simnic netdev",
			"switchdev"},
		{"everything", options{full: true}, "igb inventory igb8 many", "none"},
		{"a long guest by name", options{guest: "igb8"}, "igb8 many", "igb"},
	} {
		t.Run(test.name, func(t *testing.T) {
			selected, err := selectGuests(test.options)
			if err != nil {
				t.Fatal(err)
			}

			var got []string
			for _, g := range selected {
				got = append(append(got, g.name), names(g.suites)...)
			}

			for _, want := range strings.Fields(test.want) {
				if !slices.Contains(got, want) {
					t.Errorf("%q has no %s", got, want)
				}
			}

			if slices.Contains(got, test.not) {
				t.Errorf("%q has %s", got, test.not)
			}
		})
	}
	if _, err := selectGuests(options{only: "absent"}); err == nil ||
		!strings.Contains(err.Error(), `"absent"`) {
		t.Errorf("a suite that is not there: %v", err)
	}
}

// TestGuests checks that the suites in suites.go can be built and have different names.
func TestGuests(t *testing.T) {
	for _, g := range guests() {
		seen := map[string]string{} // package by name of its binary
		for i, s := range g.suites {
			if slices.Contains(names(g.suites[:i]), s.name) {
				t.Errorf("guest %s has two suites %s", g.name, s.name)
			}
			if s.limit == 0 || s.run == "" || strings.Contains(s.name, " ") {
				t.Errorf("suite %s/%s needs a limit, tests and a name without spaces",
					g.name, s.name)
			}
			if other, ok := seen[s.binary()]; ok && other != s.path {
				t.Errorf("guest %s: %s and %s have test binaries of one name", g.name,
					other, s.path)
			}

			seen[s.binary()] = s.path
			for _, dir := range append(slices.Clone(s.programs), s.path) {
				if strings.Contains(strings.SplitN(dir, "/", 2)[0], ".") {
					continue // belongs to another module
				}
				if _, err := os.Stat(filepath.Join("../../../..", dir)); err != nil {
					t.Errorf("suite %s/%s: %v", g.name, s.name, err)
				}
			}
		}
	}
}

// TestHardwarePage checks that the suites and tests in docs/reference/hardware.md exist.
func TestHardwarePage(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/reference/hardware.md")
	if err != nil {
		t.Fatal(err)
	}

	all := map[string]guest{}
	for _, g := range guests() {
		all[g.name] = g
	}

	evidence := regexp.MustCompile(`(?m)^\d+\. guest (\w+).*$`)
	suiteOrTest := regexp.MustCompile("`([a-z-]+)`:|(Test\\w+)")
	found := evidence.FindAllStringSubmatch(string(page), -1)
	if len(found) == 0 {
		t.Error("the page names no guest")
	}

	for _, line := range found {
		g, current := all[line[1]], suite{}
		for _, word := range suiteOrTest.FindAllStringSubmatch(line[0], -1) {
			if word[1] != "" {
				i := slices.Index(names(g.suites), word[1])
				if i < 0 {
					t.Fatalf("%s: guest %s has no suite %s", line[0], line[1], word[1])
				}
				current = g.suites[i]
				continue
			}
			if runs, err := regexp.MatchString(current.run, word[2]); err != nil || !runs ||
				!hasTest(t, current.path, word[2]) {
				t.Errorf("%s: suite %s runs no %s (%v)", line[0], current.name, word[2], err)
			}
		}
	}
}

// hasTest reports whether the package in a folder of the module has a test of this name.
func hasTest(t *testing.T, folder, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../../../..", folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(files, func(file string) bool {
		content, err := os.ReadFile(file)
		return err == nil && strings.Contains(string(content), "func "+name+"(t *testing.T)")
	})
}

func TestProgramPackages(t *testing.T) {
	g := guest{suites: []suite{
		{programs: []string{"cmd/xpu-agent", "example.org/plugins/static"}},
		{programs: []string{"cmd/xpu-agent"}},
	}}

	want := []string{"example.org/plugins/static", module + "/cmd/xpu-agent", module +
		"/test/qemu/cmd/guestinit"}
	if got := g.programPackages(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestMoreTime checks that a suite with more work than usual may take longer, and that its guest
// may be silent as long.
func TestMoreTime(t *testing.T) {
	ordinary := options{personalities: "a,b,c,d,e", lives: ordinaryLives}
	for _, test := range []struct {
		name, suite string
		change      func(*options)
		more        time.Duration
	}{
		{"a third of the personalities", "personalities", func(*options) {}, 0},
		{"all of them", "personalities", func(o *options) {
			o.personalities = "a,b,c,d,e,f,g,h,i,j,k,l,m,n"
		}, 12 * time.Minute},
		{"lives as usual", "lives", func(*options) {}, 0},
		{"many lives", "lives", func(o *options) {
			o.lives = ordinaryLives + 100
		}, 5 * time.Minute},
		{"a long soak", "bridge-soak", func(o *options) { o.soak = time.Hour }, time.Hour},
	} {
		t.Run(test.name, func(t *testing.T) {
			usual, o := ordinary, ordinary
			usual.only, o.only = test.suite, test.suite
			test.change(&o)
			before, err := selectGuests(usual)
			must.Succeed(t, err)
			after, err := selectGuests(o)
			must.Succeed(t, err)
			if got := after[0].suites[0].limit - before[0].suites[0].limit; got != test.more {
				t.Errorf("the suite may take %s longer, want %s", got, test.more)
			}
			if got := after[0].silence() - before[0].silence(); got != test.more {
				t.Errorf("the guest may be silent %s longer, want %s", got, test.more)
			}
		})
	}
}
