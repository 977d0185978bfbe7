// SPDX-License-Identifier: Apache-2.0

// Package terminal writes text for people to a terminal. Names, selectors, event messages and texts
// of drivers come from others, who could use them to move the cursor, hide text or forge a row of a
// table. So everything that is not printable is escaped.
//
// Values are escaped where they enter a line, by [Escape], [Line], [Columns] or a [Painter],
// because only there it is known which line breaks are the program's. A [Writer] around the
// program's output escapes whatever was forgotten.
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

// Escape returns the text as one line, with everything unprintable escaped as in a Go string, such
// as \n, \x1b or \u202e. [strconv.IsPrint] decides what is printable. Control characters, direction
// marks, characters without width and invalid UTF-8 are not. Escaping twice changes nothing.
func Escape(text string) string {
	return escape(text, func(string) int { return 0 })
}

// escape escapes everything unprintable, except as many bytes at the start of rest as kept returns.
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

// Line writes exactly one line, even if values contain line breaks. The format needs no line break
// at its end.
func Line(to io.Writer, format string, values ...any) error {
	_, err := io.WriteString(to, Escape(fmt.Sprintf(format, values...))+"\n")
	return err
}

// Columns aligns the cells of rows, with a gap of that many spaces between columns. It returns
// exactly one line for each row, including its line break, even if cells contain line breaks or
// tabs.
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

	_ = table.Flush() // a strings.Builder never fails

	lines := strings.SplitAfter(text.String(), "\n")
	return lines[:len(rows)]
}

// Writer escapes everything unprintable, except line breaks and tabs, and, on a terminal with
// colours, the colours of a [Painter]. A character must not be split between two calls of Write,
// because its parts would be escaped.
type Writer struct {
	to      io.Writer
	colours bool
}

// NewWriter returns a Writer that writes to to.
func NewWriter(to io.Writer) *Writer {
	return &Writer{to: to, colours: printers.AllowsColorOutput(to)}
}

// Write writes the escaped text. It returns the number of bytes before escaping.
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

// Raw returns the writer behind a Writer, and any other writer unchanged. It is for output that
// programs read, which has its own encoding.
func Raw(to io.Writer) io.Writer {
	if w, is := to.(*Writer); is {
		return w.to
	}
	return to
}

// Tone is the meaning of a text, which determines its colour.
type Tone string

// Tones, as SGR parameters of ECMA-48.
const (
	Good   Tone = "32" // green
	Bad    Tone = "31" // red
	Faint  Tone = "2"
	Strong Tone = "1"

	plain Tone = "0" // ends the others
)

func (t Tone) sequence() string { return "\x1b[" + string(t) + "m" }

// Painter escapes a text and adds the colour of its tone, if there are colours.
type Painter func(tone Tone, text string) string

// NewPainter returns a Painter for output to to. It uses colours only if to is a terminal that has
// them.
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
