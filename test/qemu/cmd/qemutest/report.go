// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// report summarizes the output of a guest in a few lines: one for each test, and all output of a
// suite that fails.
type report struct {
	out, log io.Writer
	verbose  bool
	pending  []string // suites that have not ended yet
	current  string   // suite that runs, or ""
	begun    time.Duration
	output   []string // of the current suite
	passed   int      // tests of the current suite
	total    counts   // of all suites
	skipped  []string // tests of the current suite
	problems []string
	reasons  []string // by suite that failed, the end of its output
}

// counts are numbers of tests.
type counts struct{ passed, skipped int }

func newReport(out, log io.Writer, selected []suite, verbose bool) *report {
	return &report{out: out, log: log, verbose: verbose, pending: names(selected)}
}

// result matches the line with which package testing ends a test.
var result = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \((\S+)\)$`)

// line takes one line of the guest's output.
func (r *report) line(text string) {
	fmt.Fprintln(r.log, text)
	if e, ok := plan.ParseEvent(text); ok {
		r.event(e)
		return
	}

	r.output = append(r.output, text)
	if r.verbose || r.current == "" {
		fmt.Fprintln(r.out, text)
	}

	test := result.FindStringSubmatch(text)
	if test == nil {
		return
	}

	if !r.verbose {
		fmt.Fprintf(r.out, "  %s %s/%s (%s)\n", strings.ToLower(test[1]), r.current,
			test[2], test[3])
	}

	switch test[1] {
	case "PASS":
		r.passed++
		r.total.passed++
	case "SKIP":
		r.total.skipped++
		r.skipped = append(r.skipped, test[2])
	}
}

func (r *report) event(e plan.Event) {
	switch e.Kind {
	case plan.Ready:
		fmt.Fprintf(r.out, "guest runs Linux %s after %.1f s\n", e.Name, e.Uptime.Seconds())
	case plan.Begin:
		r.current, r.begun, r.output, r.passed, r.skipped = e.Name, e.Uptime, nil, 0, nil
	case plan.End:
		r.end(e)
	}
}

func (r *report) end(e plan.Event) {
	r.current = ""
	r.pending = slices.DeleteFunc(r.pending, func(name string) bool { return name == e.Name })
	problem := ""
	switch {
	case e.Status != 0:
		problem = fmt.Sprintf("%s ended with status %d", e.Name, e.Status)
	case len(r.skipped) > 0:
		problem = fmt.Sprintf("%s skipped %s", e.Name, strings.Join(r.skipped, ", "))
	case r.passed == 0:
		problem = e.Name + " ran no test"
	}

	if problem == "" {
		fmt.Fprintf(r.out, "PASS %s: %d tests in %.1f s\n", e.Name, r.passed,
			(e.Uptime - r.begun).Seconds())
		return
	}

	r.problems = append(r.problems, problem)
	r.reasons = append(r.reasons, problem+":\n"+strings.Join(why(r.output), "\n"))
	if !r.verbose {
		fmt.Fprintln(r.out, strings.Join(r.output, "\n"))
	}

	fmt.Fprintln(r.out, "FAIL", problem)
}

// shownLines is how many lines of a suite that failed are repeated at the end of the run.
const shownLines = 15

// Lines of the output of go test -v.
var (
	// testBegins matches the line above the output of a test.
	testBegins = regexp.MustCompile(`^=== (?:RUN|CONT|NAME) +(\S+)$`)
	// testSays matches what a test reports, and not what the code under test logs.
	testSays = regexp.MustCompile(`^ +\S+_test\.go:\d+: `)
	// continues matches a further line of what a test reports.
	continues = regexp.MustCompile(`^ {8}`)
)

// why returns the lines of a suite's output that say why it failed: what its failed tests report,
// their results, and the reason of a panic. The list of goroutines is left out, because it is long.
// Without such lines, why returns the end of the output.
func why(output []string) []string {
	end := slices.IndexFunc(output, func(line string) bool {
		return strings.HasPrefix(line, "goroutine ")
	})
	if end >= 0 {
		output = output[:end]
	}

	failed := failedTests(output)
	var reasons []string
	var test string
	reported := false // the line before is part of a report
	panicked := false
	for _, line := range output {
		if begins := testBegins.FindStringSubmatch(line); begins != nil {
			test, reported = begins[1], false
			continue
		}

		ended := result.FindStringSubmatch(line)
		panicked = panicked || strings.HasPrefix(line, "panic: ")
		reported = ended == nil && (testSays.MatchString(line) ||
			reported && continues.MatchString(line))
		if reported && failed[test] || panicked || ended != nil && ended[1] == "FAIL" {
			reasons = append(reasons, line)
		}
	}

	if len(reasons) == 0 {
		reasons = output
	}
	return reasons[max(0, len(reasons)-shownLines):]
}

// failedTests returns the tests that failed and those that never ended.
func failedTests(output []string) map[string]bool {
	failed := map[string]bool{}
	for _, line := range output {
		if begins := testBegins.FindStringSubmatch(line); begins != nil {
			failed[begins[1]] = true
		} else if ended := result.FindStringSubmatch(line); ended != nil && ended[1] != "FAIL" {
			delete(failed, ended[2])
		}
	}
	return failed
}

// wrong returns, after the guest's end, what failed, or nothing if all suites passed.
func (r *report) wrong() []string {
	wrong := r.problems
	for _, name := range r.pending {
		wrong = append(wrong, name+" did not run to its end")
	}
	return wrong
}
