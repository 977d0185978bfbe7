// SPDX-License-Identifier: Apache-2.0

// Package terminal writes what people read on a terminal. Names, selectors, messages of events and
// what drivers say come from others, who could have them move the cursor, hide text or forge a row
// of a table. So all that is not printable is escaped.
//
// Values are escaped where they enter a line, by [Escape], [Line], [Columns] or a [Painter]: only
// there it is known which line breaks are the program's. A [Writer] around the program's output
// escapes what was forgotten.
package terminal

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"k8s.io/cli-runtime/pkg/printers"
)

// Escape returns a text as one line: all that is not printable is as in a string of Go, such as \n,
// \x1b or \u202e. Printable is what [strconv.IsPrint] says: controls, marks of direction,
// characters without width and bytes that are no UTF-8 are not. A text that was escaped before
// stays as it is.
func Escape(text string) string {
	return escape(text, func(string) int { return 0 })
}

// escape leaves what is printable, and as many bytes at the begin of the rest as kept says.
func escape(text string, kept func(rest string) int) string {
	var out strings.Builder
	for len(text) > 0 {
		r, size := utf8.DecodeRuneInString(text)
		printable := strconv.IsPrint(r) && !(r == utf8.RuneError && size == 1)
		if n := kept(text); n > 0 {
			printable, size = true, n
		}

		if printable {
			out.WriteString(text[:size])
		} else {
			quoted := strconv.Quote(text[:size])
			out.WriteString(quoted[1 : len(quoted)-1])
		}

		text = text[size:]
	}

	return out.String()
}

// Line writes one line, whatever line breaks the values have. The format needs none at its end.
func Line(to io.Writer, format string, values ...any) error {
	_, err := io.WriteString(to, Escape(fmt.Sprintf(format, values...))+"\n")
	return err
}

// Columns aligns the cells of rows, with a gap of so many blanks between columns. It returns
// exactly one line for each row, with its line break, whatever line breaks and tabs the cells have.
func Columns(gap int, rows [][]string) []string {
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, gap, ' ', 0)
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = Escape(cell)
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}

	_ = table.Flush() // a strings.Builder takes everything

	lines := strings.SplitAfter(text.String(), "\n")
	return lines[:len(rows)]
}

// Writer escapes what is not printable, but for the line breaks and tabs that the program writes
// and, on a terminal with colours, the colours of a [Painter]. A character must not be split
// between two calls of Write, because its parts are escaped then.
type Writer struct {
	to      io.Writer
	colours bool
}

// NewWriter returns a Writer that writes to another.
func NewWriter(to io.Writer) *Writer {
	return &Writer{to: to, colours: printers.AllowsColorOutput(to)}
}

// Write writes the text, escaped. It counts the bytes as they were before.
func (w *Writer) Write(text []byte) (int, error) {
	if _, err := io.WriteString(w.to, escape(string(text), w.kept)); err != nil {
		return 0, err
	}
	return len(text), nil
}

func (w *Writer) kept(rest string) int {
	if rest[0] == '\n' || rest[0] == '\t' {
		return 1
	}
	if !w.colours {
		return 0
	}

	for _, tone := range []Tone{Good, Bad, Faint, Strong, plain} {
		if strings.HasPrefix(rest, tone.sequence()) {
			return len(tone.sequence())
		}
	}

	return 0
}

// Raw returns what a Writer writes to, and others as they are. It is for output that programs read,
// which has an encoding of its own.
func Raw(to io.Writer) io.Writer {
	if w, is := to.(*Writer); is {
		return w.to
	}
	return to
}

// Tone says how a text is meant.
type Tone string

// The tones, as SGR parameters of ECMA-48.
const (
	Good   Tone = "32" // green
	Bad    Tone = "31" // red
	Faint  Tone = "2"
	Strong Tone = "1"

	plain Tone = "0" // ends the others
)

func (t Tone) sequence() string { return "\x1b[" + string(t) + "m" }

// Painter returns a text escaped, in the colour of its tone where there are colours.
type Painter func(tone Tone, text string) string

// NewPainter returns a Painter for what is written to a terminal, or to something that has no
// colours.
func NewPainter(to io.Writer) Painter {
	return painter(printers.AllowsColorOutput(Raw(to)))
}

func painter(colours bool) Painter {
	if !colours {
		return func(_ Tone, text string) string { return Escape(text) }
	}
	return func(tone Tone, text string) string {
		return tone.sequence() + Escape(text) + plain.sequence()
	}
}
