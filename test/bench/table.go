// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Measurement is a row of the table: samples of one quantity, and of its reference from the same
// run.
type Measurement struct {
	What string
	Unit Unit
	// Samples are the results of the runs. Their median counts.
	Samples []float64
	// Reference describes ReferenceSamples, which are also in Unit; "" if there is no reference.
	Reference        string
	ReferenceSamples []float64
	Goal             Goal
	// Details are shown below the table.
	Details []string
}

// Unit formats a quantity.
type Unit func(float64) string

// Goal is the limit for the median, or for its ratio to the reference's median. The zero value is
// no goal.
type Goal struct {
	// Most is in the row's Unit, or a factor if OfReference is set.
	Most float64
	// Exclusive is set if Most itself misses the goal.
	Exclusive   bool
	OfReference bool
	set         bool
}

func atMost(most float64) Goal   { return Goal{Most: most, set: true} }
func lessThan(most float64) Goal { return Goal{Most: most, Exclusive: true, set: true} }
func atMostTimes(n float64) Goal { return Goal{Most: n, OfReference: true, set: true} }
func lessThanTimes(n float64) Goal {
	return Goal{Most: n, Exclusive: true, OfReference: true, set: true}
}

// Seconds is the Unit of durations.
func Seconds(s float64) string {
	switch d := time.Duration(s * float64(time.Second)); {
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d >= 100*time.Millisecond:
		return fmt.Sprintf("%.0f ms", float64(d)/float64(time.Millisecond))
	case d >= time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	default:
		return fmt.Sprintf("%.0f us", float64(d)/float64(time.Microsecond))
	}
}

// Bytes is the Unit of memory and files; a MB is 10^6 bytes.
func Bytes(n float64) string { return fmt.Sprintf("%.1f MB", n/1e6) }

// KiloBytes is the Unit of objects and messages; a kB is 10^3 bytes.
func KiloBytes(n float64) string { return fmt.Sprintf("%.1f kB", n/1e3) }

// Count is the Unit of things.
func Count(n float64) string { return fmt.Sprintf("%.0f", n) }

// PerPod is the Unit of things that are shared out among pods.
func PerPod(n float64) string { return fmt.Sprintf("%.4g", n) }

// median returns the median of the samples: the mean of the two middle ones if their number is
// even.
func median(samples []float64) float64 {
	sorted := slices.Sorted(slices.Values(samples))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// ratio returns the ratio to the reference; ok is false without a reference.
func (m Measurement) ratio() (ratio float64, ok bool) {
	reference := median(m.ReferenceSamples)
	if reference == 0 {
		return 0, false
	}
	return median(m.Samples) / reference, true
}

// missed reports whether the goal is missed. A goal without samples is missed.
func (m Measurement) missed() bool {
	if !m.Goal.set {
		return false
	}
	value, ok := median(m.Samples), len(m.Samples) > 0
	if m.Goal.OfReference {
		value, ok = m.ratio()
	}
	return !ok || value > m.Goal.Most || m.Goal.Exclusive && value == m.Goal.Most
}

func (m Measurement) columns() []string {
	columns := []string{m.What, m.number(m.Samples), spread(m.Unit, m.Samples), "-", "", "-", ""}
	if m.Reference != "" {
		columns[3] = m.Reference + ": " + m.number(m.ReferenceSamples)
	}

	if ratio, ok := m.ratio(); ok {
		columns[4] = fmt.Sprintf("%.2fx", ratio)
	}

	if m.Goal.set {
		columns[5] = m.Goal.text(m.Unit)
		columns[6] = map[bool]string{true: "MISSED", false: "ok"}[m.missed()]
	}

	return columns
}

func (m Measurement) number(samples []float64) string {
	if len(samples) == 0 {
		return "?"
	}
	return m.Unit(median(samples))
}

func spread(unit Unit, samples []float64) string {
	if len(samples) < 2 {
		return ""
	}
	return unit(slices.Min(samples)) + " - " + unit(slices.Max(samples))
}

func (g Goal) text(unit Unit) string {
	switch {
	case g.OfReference && g.Exclusive:
		return fmt.Sprintf("< %gx", g.Most)
	case g.OfReference:
		return fmt.Sprintf("<= %gx", g.Most)
	case g.Exclusive:
		return "< " + unit(g.Most)
	case g.Most == 0:
		return unit(0)
	}
	return "<= " + unit(g.Most)
}

// printTable writes the measurements, and how many missed their goals.
func printTable(out io.Writer, measurements []Measurement) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "what\tmedian\tmin - max\treference\tratio\tgoal\t")
	missed := 0
	for _, m := range measurements {
		fmt.Fprintln(w, strings.Join(m.columns(), "\t"))
		if m.missed() {
			missed++
		}
	}

	if err := w.Flush(); err != nil {
		return err
	}

	for _, m := range measurements {
		if len(m.Details) > 0 {
			fmt.Fprintf(out, "\n%s:\n  %s\n", m.What, strings.Join(m.Details, "\n  "))
		}
	}

	_, err := fmt.Fprintf(out, "\n%d measurements, %d goals missed\n", len(measurements), missed)
	return err
}
