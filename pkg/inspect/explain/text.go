package explain

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/cli-runtime/pkg/printers"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
)

// mostEvents is how many of the last events are shown in text.
const mostEvents = 10

// Text writes the explanation for people.
func (p *Pod) Text(to io.Writer) error {
	paint := inspect.Painter(to)
	var out strings.Builder
	tone := inspect.Bad
	if p.OK {
		tone = inspect.Good
	}
	fmt.Fprintf(&out, "pod %s/%s: %s\n", p.Namespace, p.Name, paint(tone, p.Verdict))
	for _, i := range p.Interfaces {
		out.WriteString("\n" + paint(inspect.Strong, i.Title()) + where(i) + "\n")
		stages(&out, i.Stages, paint)
		sides(&out, i)
		for _, difference := range i.Differences {
			out.WriteString("  " + paint(inspect.Bad, difference) + "\n")
		}
	}
	p.why(&out)
	p.lastEvents(&out)
	for _, unknown := range p.Unknown {
		out.WriteString("\nnot known: " + printers.EscapeTerminal(unknown) + "\n")
	}
	_, err := io.WriteString(to, out.String())
	return err
}

// where is the Function and what it belongs to.
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

// stages has its colours after the columns are made, as tabwriter counts them as text.
func stages(out *strings.Builder, all []Stage, paint func(inspect.Tone, string) string) {
	tones := map[Status]inspect.Tone{Done: inspect.Good, Failed: inspect.Bad, Waiting: inspect.Bad, Skipped: inspect.Faint, Unknown: inspect.Faint}
	marks := map[Status]string{Done: "✓", Failed: "✗", Waiting: "…", Skipped: "-", Unknown: "?"}
	var text bytes.Buffer
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, s := range all {
		fmt.Fprintf(table, "%s\t%s\t%s\n", s.Name, shown(s.Time), printers.EscapeTerminal(strings.ReplaceAll(s.Text, "\n", " ")))
	}
	table.Flush()
	for i, line := range strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n") {
		out.WriteString("  " + paint(tones[all[i].Status], marks[all[i].Status]) + " " + strings.TrimRight(line, " ") + "\n")
	}
}

// sides puts the pod's side and the xPU's next to each other.
func sides(out *strings.Builder, i Interface) {
	if i.Host == nil && i.Card == nil {
		return
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "    \tMAC\tVLAN\tMTU\tADDRESSES\tPORT\tSTATE")
	for _, side := range []struct {
		name string
		*Side
	}{{"in the pod", i.Host}, {"at the xPU", i.Card}} {
		if side.Side == nil {
			fmt.Fprintf(table, "    %s\t-\t-\t-\t-\t-\t-\n", side.name)
			continue
		}
		fmt.Fprintf(table, "    %s\t%s\t%s\t%s\t%s\t%s\t%s\n", side.name, dash(side.MAC), number(side.VLAN), number(side.MTU),
			dash(strings.Join(side.Addresses, ",")), dash(side.Port), dash(side.State))
	}
	table.Flush()
}

func (p *Pod) why(out *strings.Builder) {
	if len(p.Why) < 2 {
		return
	}
	out.WriteString("\nwhy it stays pending:\n")
	for _, line := range p.Why[1:] {
		out.WriteString(printers.EscapeTerminal(line) + "\n")
	}
}

func (p *Pod) lastEvents(out *strings.Builder) {
	if len(p.Events) == 0 {
		return
	}
	out.WriteString("\nlast events:\n")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, e := range p.Events[max(0, len(p.Events)-mostEvents):] {
		times := ""
		if e.Count > 1 {
			times = fmt.Sprintf(" (%d times)", e.Count)
		}
		fmt.Fprintf(table, "  %s\t%s\t%s\t%s%s\n", shown(e.Time), e.Object, e.Reason,
			printers.EscapeTerminal(strings.ReplaceAll(e.Message, "\n", " ")), times)
	}
	table.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return printers.EscapeTerminal(s)
}

func number(n int32) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// shown is a time for people.
func shown(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.TimeOnly)
}
