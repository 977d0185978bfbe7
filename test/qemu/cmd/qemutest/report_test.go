// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

func TestReport(t *testing.T) {
	event := func(kind plan.Kind, status int, name string) string {
		return plan.Event{Kind: kind, Status: status, Name: name, Uptime: time.Second}.String()
	}
	begin, end := event(plan.Begin, 0, "link"), event(plan.End, 0, "link")
	for _, test := range []struct {
		name  string
		lines []string
		wrong []string
	}{
		{
			"passed", []string{
				begin, "=== RUN   TestA", "--- PASS: TestA (0.10s)",
				"    --- PASS: TestA/b (0.10s)", end,
			}, nil,
		},
		{"failed", []string{begin, "--- FAIL: TestA (0.10s)", event(plan.End, 1, "link")},
			[]string{"link ended with status 1"}},
		{"skipped", []string{
			begin, "--- PASS: TestA (0.10s)", "    --- SKIP: TestA/b (0.00s)", end,
		},
			[]string{"link skipped TestA/b"}},
		{"without tests", []string{begin, "testing: warning: no tests to run", "PASS", end},
			[]string{"link ran no test"}},
		{"cut off", []string{begin, "--- PASS: TestA (0.10s)"},
			[]string{"link did not run to its end"}},
		{"never begun", []string{"guestinit: load igb.ko.xz: invalid argument"},
			[]string{"link did not run to its end"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out, log bytes.Buffer
			r := newReport(&out, &log, []suite{{name: "link"}}, false)
			for _, line := range test.lines {
				r.line(line)
			}

			if diff := cmp.Diff(test.wrong, r.wrong()); diff != "" {
				t.Errorf("wrong (-want +got):\n%s", diff)
			}
			if got := strings.TrimSpace(log.String()); got != strings.Join(test.lines, "\n") {
				t.Errorf("the log is not what the guest told: %s", got)
			}
			if guestinit := test.lines[0]; guestinit != begin &&
				!strings.Contains(out.String(), guestinit) {
				t.Errorf("told %q, without %q", out.String(), guestinit)
			}
			if passed := strings.Contains(out.String(),
				"PASS link"); passed != (test.wrong == nil) {
				t.Errorf("told %q", out.String())
			}
		})
	}
}

// TestReportShowsWhyASuiteFails checks that the result shows lines that are not part of a test.
func TestReportShowsWhyASuiteFails(t *testing.T) {
	var out bytes.Buffer
	r := newReport(&out, io.Discard, []suite{{name: "link"}}, false)
	for _, line := range []string{
		"@@ begin 0 1 link", "    x_test.go:7: the reason", "--- FAIL: TestA (0.10s)",
		"@@ end 1 2 link",
	} {
		r.line(line)
	}

	if !strings.Contains(out.String(), "x_test.go:7: the reason") {
		t.Errorf("told %q", out.String())
	}
}

// TestReportRepeatsReasons checks that the end of a run says why a suite failed, and that the
// reason is not pushed out by logs, by other tests or by the list of goroutines.
func TestReportRepeatsReasons(t *testing.T) {
	logs := slices.Repeat([]string{"    metrics.go:102: a change"}, 100)
	for name, test := range map[string]struct{ output, want []string }{
		"panic": {
			slices.Concat([]string{"=== RUN   TestA", "    a_test.go:3: begins"}, logs,
				[]string{"panic: test timed out after 3m0s", "\trunning tests:", "\t\tTestA (3m0s)",
					"", "goroutine 1 [running]:"}, logs),
			[]string{"    a_test.go:3: begins", "panic: test timed out after 3m0s",
				"\trunning tests:", "\t\tTestA (3m0s)", ""},
		},
		"failure": {
			slices.Concat([]string{"=== RUN   TestA", "=== RUN   TestA/one",
				"    a_test.go:5: fine"}, logs,
				[]string{"=== RUN   TestA/two", "    a_test.go:7: got", "        2, want 3"}, logs,
				[]string{"=== RUN   TestA/three"}, logs,
				[]string{"--- FAIL: TestA (2.00s)", "    --- PASS: TestA/one (0.10s)",
					"    --- FAIL: TestA/two (1.00s)", "    --- PASS: TestA/three (0.90s)",
					"FAIL"}),
			[]string{"    a_test.go:7: got", "        2, want 3",
				"--- FAIL: TestA (2.00s)", "    --- FAIL: TestA/two (1.00s)"},
		},
		"no test": {
			append(logs, "cannot load"),
			append(slices.Clone(logs[:shownLines-1]), "cannot load"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReport(io.Discard, io.Discard, []suite{{name: "link"}}, false)
			for _, line := range slices.Concat([]string{"@@ begin 0 1 link"}, test.output,
				[]string{"@@ end 2 2 link"}) {
				r.line(line)
			}

			want := append([]string{"link ended with status 2:"}, test.want...)
			if diff := cmp.Diff([]string{strings.Join(want, "\n")}, r.reasons); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
		})
	}
}
