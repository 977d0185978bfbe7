// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// Table shows objects to people: a row for each object, followed by its notes.
type Table struct {
	Header []string
	Wide   int // how many of the last columns are shown only on request
	Rows   []Row
	Empty  string // text if there are no rows
}

// Row is the row of one object. An empty cell is shown as "-".
type Row struct {
	Cells []string
	Notes []string // problems of the object, each a sentence
	// Remarks say what else people should know of the object, and what is no problem: for example,
	// that the cluster lacks a feature.
	Remarks []string
}

// Write writes the table. Problems are coloured on a terminal with colours.
func (t Table) Write(to io.Writer, wide bool) error {
	if len(t.Rows) == 0 {
		_, err := fmt.Fprintln(to, t.Empty)
		return err
	}

	columns := len(t.Header)
	if !wide {
		columns -= t.Wide
	}

	rows := [][]string{shownCells(t.Header[:columns])}
	for _, row := range t.Rows {
		rows = append(rows, shownCells(row.Cells[:columns]))
	}

	lines := terminal.Columns(3, rows)

	paint := terminal.NewPainter(to)
	var out strings.Builder
	out.WriteString(lines[0])

	for i, row := range t.Rows {
		out.WriteString(lines[i+1])
		for _, note := range row.Notes {
			out.WriteString("  " + paint(terminal.Bad, note) + "\n")
		}
		for _, remark := range row.Remarks {
			out.WriteString("  " + terminal.Escape(remark) + "\n")
		}
	}

	_, err := io.WriteString(to, out.String())
	return err
}

func shownCells(cells []string) []string {
	shown := make([]string, len(cells))
	for i, cell := range cells {
		shown[i] = cmp.Or(cell, "-")
	}
	return shown
}
