// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// Result is how a case ended.
type Result struct {
	Case    Case
	Outcome Outcome
	Text    string // why, unless it passed
	Took    time.Duration
}

// Verdict says what the results of a profile's cases mean.
type Verdict string

// The verdicts.
const (
	// Conformant means that all cases passed, but for what was skipped for lack of hooks or flags.
	Conformant Verdict = "conformant"
	// Partial means that nothing failed, and that the agent does not serve all of the profile.
	Partial Verdict = "partial"
	// NotConformant means that a case failed or was blocked.
	NotConformant Verdict = "not conformant"
	// NotServed means that the agent serves nothing of the profile.
	NotServed Verdict = "not served"
	// NotTested means that nothing of the profile was run.
	NotTested Verdict = "not tested"
)

// Implementation is the agent that is tested, as the vendor names it.
type Implementation struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	URL     string `json:"url,omitempty"`
}

// Report has the results of a run. Its fields are those of the JSON report.
type Report struct {
	// Format is the version of the report's format.
	Format         string          `json:"format"`
	Implementation Implementation  `json:"implementation"`
	Kit            string          `json:"kit"`
	API            string          `json:"opiAPI"`
	Date           string          `json:"date"` // RFC 3339
	Seconds        float64         `json:"seconds"`
	Reproduce      []string        `json:"reproduce"` // the command line
	Profiles       []ProfileReport `json:"profiles"`
	// LeftBehind is what the run made and could not delete.
	LeftBehind []string     `json:"leftBehind,omitempty"`
	Cases      []CaseReport `json:"cases"`

	results []Result
}

// ProfileReport has the results of a profile.
type ProfileReport struct {
	Name     Profile `json:"name"`
	Verdict  Verdict `json:"verdict"`
	Declared bool    `json:"declared"`
	Passed   int     `json:"passed"`
	Failed   int     `json:"failed"`
	Blocked  int     `json:"blocked"`
	Deviates int     `json:"deviates"`
	Skipped  int     `json:"skipped"`
	NotRun   int     `json:"notRun"`
}

// CaseReport has the result of a case.
type CaseReport struct {
	Name    string  `json:"name"`
	Outcome Outcome `json:"outcome"`
	Text    string  `json:"text,omitempty"`
	Level   Level   `json:"level"`
	Source  string  `json:"source"`
	Seconds float64 `json:"seconds"`
}

// reportFormat is the version of the report's format.
const reportFormat = "opi-conformance/v1"

// opiModule is the module of OPI's API.
const opiModule = "github.com/opiproject/opi-api"

func (r *Runner) newReport(begin time.Time) *Report {
	report := &Report{
		Format: reportFormat, Kit: version.String(), API: apiVersion(),
		Date: begin.UTC().Format(time.RFC3339),
	}
	for _, p := range Profiles() {
		report.Profiles = append(report.Profiles, ProfileReport{
			Name: p, Declared: slices.Contains(r.cfg.Declared, p),
		})
	}
	return report
}

// apiVersion returns the version of OPI's API that the program was built with.
func apiVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range info.Deps {
		if m.Path == opiModule {
			return m.Version
		}
	}
	return "unknown"
}

func (r *Report) add(result Result) {
	r.results = append(r.results, result)
	r.Cases = append(r.Cases, CaseReport{
		Name: result.Case.ID(), Outcome: result.Outcome, Text: result.Text,
		Level: result.Case.level(), Source: result.Case.Source,
		Seconds: result.Took.Round(time.Millisecond).Seconds(),
	})
}

// Results returns the results in the order in which the cases ran.
func (r *Report) Results() []Result { return r.results }

// finish counts the results.
func (r *Report) finish(took time.Duration, left []string) {
	r.Seconds, r.LeftBehind = took.Round(time.Millisecond).Seconds(), left
	for i := range r.Profiles {
		r.Profiles[i].count(r.results)
	}
}

// count sums up the results of the profile's cases.
func (p *ProfileReport) count(results []Result) {
	unserved := 0
	for _, result := range results {
		if result.Case.Profile != p.Name {
			continue
		}
		switch result.Outcome {
		case Passed:
			p.Passed++
		case Failed:
			p.Failed++
		case Blocked:
			p.Blocked++
		case Deviates:
			p.Deviates++
		case NotRun:
			p.NotRun++
		case Skipped:
			p.Skipped++
			if notServed(result) {
				unserved++
			}
		}
	}

	p.Verdict = p.verdict(unserved)
}

// notServed reports whether a case was skipped because the agent lacks what the case is about.
func notServed(r Result) bool {
	return strings.HasPrefix(r.Text, "not served: ") &&
		!r.Case.optional() && !r.Case.Profile.crosses()
}

func (p *ProfileReport) verdict(unserved int) Verdict {
	switch {
	case p.Failed+p.Blocked > 0:
		return NotConformant
	case p.Passed == 0 && unserved > 0:
		return NotServed
	case p.Passed == 0 || p.NotRun > 0:
		return NotTested
	case unserved > 0:
		return Partial
	}
	return Conformant
}

// OK reports whether no case failed or was blocked, and all of them were run.
func (r *Report) OK() bool {
	for _, p := range r.Profiles {
		if p.Failed+p.Blocked+p.NotRun > 0 {
			return false
		}
	}
	return true
}

// WriteJSON writes the report as JSON, with a line for each case.
func (r *Report) WriteJSON(w io.Writer) error {
	head := *r
	head.Cases = []CaseReport{}
	text, err := json.MarshalIndent(head, "", "  ")
	if err != nil {
		return err
	}

	lines := make([]string, len(r.Cases))
	for i, c := range r.Cases {
		line, err := json.Marshal(c)
		if err != nil {
			return err
		}
		lines[i] = "    " + string(line)
	}

	const none = "[]\n}" // the empty list of cases, which ends the head
	_, err = fmt.Fprintf(w, "%s[\n%s\n  ]\n}\n", strings.TrimSuffix(string(text), none),
		strings.Join(lines, ",\n"))
	return err
}

type junitSuites struct {
	XMLName xml.Name     `xml:"testsuites"`
	Suites  []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Errors   int         `xml:"errors,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Time     string      `xml:"time,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	Class   string     `xml:"classname,attr"`
	Name    string     `xml:"name,attr"`
	Time    string     `xml:"time,attr"`
	Failure *junitText `xml:"failure,omitempty"`
	Error   *junitText `xml:"error,omitempty"`
	Skipped *junitText `xml:"skipped,omitempty"`
	Output  string     `xml:"system-out,omitempty"`
}

type junitText struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes the results as JUnit's XML, with a suite for each profile. Blocked cases are
// errors, and cases that deviate have passed with output.
func (r *Report) WriteJUnit(w io.Writer) error {
	var all junitSuites
	for _, p := range r.Profiles {
		suite := junitSuite{Name: string(p.Name)}
		var took time.Duration
		for _, result := range r.results {
			if result.Case.Profile == p.Name {
				suite.add(result)
				took += result.Took
			}
		}

		suite.Time = fmt.Sprintf("%.3f", took.Seconds())
		if suite.Tests > 0 {
			all.Suites = append(all.Suites, suite)
		}
	}

	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	encoder := xml.NewEncoder(w)
	encoder.Indent("", "  ")
	return encoder.Encode(all)
}

func (s *junitSuite) add(r Result) {
	c := junitCase{
		Class: string(r.Case.Profile), Name: r.Case.Name,
		Time: fmt.Sprintf("%.3f", r.Took.Seconds()),
	}
	text := &junitText{Message: r.Text, Text: fmt.Sprintf("%s: %s\n%s", r.Case.Source, r.Case.Says,
		r.Case.Violation)}
	s.Tests++

	switch r.Outcome {
	case Failed:
		s.Failures++
		c.Failure = text
	case Blocked, NotRun:
		s.Errors++
		c.Error = text
	case Skipped:
		s.Skipped++
		c.Skipped = &junitText{Message: r.Text}
	case Deviates:
		c.Output = "deviates: " + r.Text
	}

	s.Cases = append(s.Cases, c)
}
