// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// mostEvents is how many of the last events the text shows.
const mostEvents = 10

// Text writes the explanation for people.
func (p *Pod) Text(to io.Writer) error {
	paint := terminal.NewPainter(to)
	var out strings.Builder
	tone := terminal.Bad
	if p.OK {
		tone = terminal.Good
	}

	fmt.Fprintf(&out, "pod %s: %s\n", terminal.Escape(p.Namespace+"/"+p.Name),
		paint(tone, p.Verdict))

	for _, i := range p.Interfaces {
		out.WriteString("\n" + paint(terminal.Strong, i.Title()) + terminal.Escape(where(i)) + "\n")
		stages(&out, i.Stages, paint)
		sides(&out, i)
		for _, difference := range i.Differences {
			out.WriteString("  " + paint(terminal.Bad, difference) + "\n")
		}
	}

	p.why(&out)
	p.lastEvents(&out)

	for _, unknown := range p.Unknown {
		out.WriteString("\nnot known: " + terminal.Escape(unknown) + "\n")
	}

	_, err := io.WriteString(to, out.String())
	return err
}

// where describes the Function and what it belongs to.
func where(i Interface) string {
	var parts []string
	for _, part := range []struct{ name, value string }{
		{"Function", i.Function}, {"pool", i.Pool}, {"network", i.Network}, {"XPU", i.XPU},
	} {
		if part.value != "" {
			parts = append(parts, part.name+" "+part.value)
		}
	}

	if len(parts) == 0 {
		return ""
	}

	return ": " + strings.Join(parts, ", ")
}

// stages adds colours after the columns are aligned, because alignment would count them as text.
func stages(out *strings.Builder, all []Stage, paint terminal.Painter) {
	tones := map[Status]terminal.Tone{
		Done: terminal.Good, Failed: terminal.Bad, Waiting: terminal.Bad,
		Skipped: terminal.Faint, Unknown: terminal.Faint,
	}

	var rows [][]string
	for _, s := range all {
		rows = append(rows, []string{s.Name, formatTime(s.Time), s.Text})
	}

	for i, line := range terminal.Columns(2, rows) {
		mark := paint(tones[all[i].Status], all[i].Status.Mark())
		out.WriteString("  " + mark + " " + strings.TrimRight(line, " \n") + "\n")
	}
}

// sides shows the pod's side and the xPU's side next to each other.
func sides(out *strings.Builder, i Interface) {
	if i.Host == nil && i.Card == nil {
		return
	}

	rows := [][]string{{"    ", "MAC", "VLAN", "MTU", "ADDRESSES", "PORT", "STATE"}}
	for _, side := range []struct {
		name string
		*Side
	}{{"in the pod", i.Host}, {"at the xPU", i.Card}} {
		if side.Side == nil {
			rows = append(rows, []string{"    " + side.name, "-", "-", "-", "-", "-", "-"})
			continue
		}
		rows = append(rows, []string{
			"    " + side.name, dash(side.MAC), number(side.VLAN), number(side.MTU),
			dash(strings.Join(side.Addresses, ",")), dash(side.Port), dash(side.State),
		})
	}

	writeRows(out, rows)
}

// Mark returns one character for the status, so that it is not shown by colour alone.
func (s Status) Mark() string {
	switch s {
	case Done:
		return "✓"
	case Failed:
		return "✗"
	case Waiting:
		return "…"
	case Skipped:
		return "-"
	}
	return "?"
}

func (p *Pod) why(out *strings.Builder) {
	if len(p.Why) < 2 {
		return
	}
	out.WriteString("\nwhy it stays pending:\n")
	for _, line := range p.Why[1:] {
		out.WriteString(terminal.Escape(line) + "\n")
	}
}

func (p *Pod) lastEvents(out *strings.Builder) {
	if len(p.Events) == 0 {
		return
	}

	out.WriteString("\nlast events:\n")
	var rows [][]string
	for _, e := range p.Events[max(0, len(p.Events)-mostEvents):] {
		times := ""
		if e.Count > 1 {
			times = fmt.Sprintf(" (%d times)", e.Count)
		}
		rows = append(rows,
			[]string{"  " + formatTime(e.Time), e.Object, e.Reason, e.Message + times})
	}

	writeRows(out, rows)
}

func writeRows(out *strings.Builder, rows [][]string) {
	for _, line := range terminal.Columns(2, rows) {
		out.WriteString(line)
	}
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func number(n int32) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// formatTime formats a time for people.
func formatTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.TimeOnly)
}
