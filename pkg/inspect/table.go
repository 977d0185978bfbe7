package inspect

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"k8s.io/cli-runtime/pkg/printers"
)

// Table is what people see of objects: a row for each, and below it what is wrong with it.
type Table struct {
	Header []string
	Wide   int // how many of the last columns are shown only if asked for
	Rows   []Row
	Empty  string // what is said if there are no rows
}

// Row is an object's row. An empty cell is shown as "-".
type Row struct {
	Cells []string
	Notes []string // what is wrong with the object, each a sentence
}

// Write writes the table. The notes are in colour on a terminal that has colours.
func (t Table) Write(to io.Writer, wide bool) error {
	if len(t.Rows) == 0 {
		_, err := fmt.Fprintln(to, t.Empty)
		return err
	}
	columns := len(t.Header)
	if !wide {
		columns -= t.Wide
	}
	var text bytes.Buffer
	table := tabwriter.NewWriter(&text, 0, 0, 3, ' ', 0)
	writeCells(table, t.Header[:columns])
	for _, row := range t.Rows {
		writeCells(table, row.Cells[:columns])
	}
	if err := table.Flush(); err != nil {
		return err
	}
	paint := Painter(to)
	lines := strings.SplitAfter(text.String(), "\n")
	var out strings.Builder
	out.WriteString(lines[0])
	for i, row := range t.Rows {
		out.WriteString(lines[i+1])
		for _, note := range row.Notes {
			out.WriteString("  " + paint(Bad, note) + "\n")
		}
	}
	_, err := io.WriteString(to, out.String())
	return err
}

func writeCells(to io.Writer, cells []string) {
	for i, cell := range cells {
		if cell == "" {
			cell = "-"
		}
		if i < len(cells)-1 {
			cell += "\t"
		}
		io.WriteString(to, printers.EscapeTerminal(cell))
	}
	io.WriteString(to, "\n")
}

// Tone says how a text is meant.
type Tone string

// The tones, as SGR parameters of ECMA-48.
const (
	Good   Tone = "32" // green
	Bad    Tone = "31" // red
	Faint  Tone = "2"
	Strong Tone = "1"
)

// Painter colours texts that are written to a terminal with colours, and returns others as they are.
func Painter(to io.Writer) func(Tone, string) string {
	if !printers.AllowsColorOutput(to) {
		return func(_ Tone, text string) string { return printers.EscapeTerminal(text) }
	}
	return func(tone Tone, text string) string {
		return "\x1b[" + string(tone) + "m" + printers.EscapeTerminal(text) + "\x1b[0m"
	}
}
