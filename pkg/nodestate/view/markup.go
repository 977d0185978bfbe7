// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"html"
	"io"
	"strings"
)

// markup is text in HTML or SVG. It is made without html/template, because the linker keeps every
// method of a program that executes templates, which makes xpuctl larger by half.
type markup struct {
	text strings.Builder
}

// add appends lines that are formatted with the values. It escapes every value that is no number,
// so that no value gets into the markup. Values may be in quoted attributes and in text only.
func (m *markup) add(format string, values ...any) {
	for i, value := range values {
		if _, number := value.(int); !number {
			values[i] = html.EscapeString(fmt.Sprint(value))
		}
	}
	fmt.Fprintf(&m.text, format, values...)
}

func (m *markup) writeTo(to io.Writer) error {
	_, err := io.WriteString(to, m.text.String())
	return err
}

const pageStyle = `<style>
body { font: 14px sans-serif; margin: 16px; color: #1f2933 }
table { border-collapse: collapse; margin-top: 16px }
th, td { text-align: left; padding: 3px 10px; border-bottom: 1px solid #e4e7eb; vertical-align: top }
tr.troubled td { color: #b83232 }
tr.used td { color: #1f4f86 }
tr.releasing td { color: #7a5a05 }
</style>
`

const pictureStyle = `<style>
text { font: 12px sans-serif; fill: #1f2933 }
.head { font-weight: bold; font-size: 14px }
.detail { fill: #52606d }
.page { fill: #ffffff }
.card { fill: #f5f7fa; stroke: #9aa5b1 }
.pf { fill: #ffffff; stroke: #cbd2d9 }
path { pointer-events: all }
path.free { fill: none; stroke: #3f8f50 }
path.used { fill: #7fb1e6; stroke: #2f6fb3 }
path.releasing { fill: #f4c95d; stroke: #b5860b; stroke-linejoin: round }
path.troubled { fill: none; stroke: #b83232; stroke-width: 1.5 }
path.unoffered { fill: #7b8794 }
text.troubled { fill: #b83232 }
text.used { fill: #1f4f86 }
text.releasing { fill: #7a5a05 }
</style>
`

// page appends a document with the picture and the table of Functions.
func (m *markup) page(p picture) {
	m.add(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>%s</title>
`, p.Title)
	m.add(pageStyle)
	m.add("</head>\n<body>\n")
	m.picture(p)

	m.add(`
<table>
<thead><tr><th>Function</th><th></th><th>netdev</th><th>driver</th><th>pool</th>` +
		`<th>who has it</th><th>what is wrong</th></tr></thead>
<tbody>`)
	for _, f := range p.Functions {
		m.add("\n<tr class=\"%s\"><td>%s</td><td>%s</td><td>%s</td><td>%s</td><td>%s</td>"+
			"<td>%s</td><td>", f.Condition, f.ID, f.Name, f.Netdev, f.Driver, f.Pool, f.Who)
		for _, trouble := range f.Troubles {
			m.add("%s ", trouble)
		}
		m.add("</td></tr>")
	}
	m.add("\n</tbody>\n</table>\n</body>\n</html>\n")
}

// picture appends the drawing of the node.
func (m *markup) picture(p picture) {
	m.add("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "+
		"viewBox=\"0 0 %d %d\" role=\"img\">\n<title>%s</title>\n",
		p.Width, p.Height, p.Width, p.Height, p.Title)
	m.add(pictureStyle)
	m.add(`<rect class="page" width="%d" height="%d"/>
<text class="head" x="16" y="22">%s</text>`, p.Width, p.Height, p.Title)

	for _, l := range p.Legend {
		m.add("\n<path class=\"%s\" transform=\"translate(%d 32) scale(1.5)\" d=\"%s\"/>"+
			"<text x=\"%d\" dx=\"18\" y=\"43\">%s</text>", l.Condition, l.X, shapeOf(l.Condition), l.X,
			l.Text)
	}
	for _, c := range p.Cards {
		m.card(c)
	}
	m.add("\n</svg>\n")
}

// card appends the box of a card with those of its PFs.
func (m *markup) card(c cardBox) {
	m.add(`
<rect class="card" x="16" y="%d" width="868" height="%d" rx="6"/>
<text class="head" x="28" y="%d">%s<title>%s</title></text>`, c.Y, c.Height, c.TitleY, c.Title,
		c.Whole)

	for _, pf := range c.PFs {
		m.add(`
<rect class="pf" x="%d" y="%d" width="%d" height="%d" rx="4"/>
<text x="40" y="%d">%s</text>
<text class="detail" x="40" y="%d">%s</text>`, c.InnerX, pf.Y, c.Wide, pf.Height,
			pf.TitleY, pf.Title, pf.DetailY, pf.Detail)

		for _, s := range pf.Squares {
			m.add("\n<path class=\"%s\" transform=\"translate(%d %d) scale(2)\" d=\"%s\">"+
				"<title>%s</title></path>", s.Condition, s.X, s.Y, shapeOf(s.Condition), s.Title)
		}
		for _, e := range pf.Entries {
			m.add("\n<text class=\"%s\" x=\"%d\" y=\"%d\">%s<title>%s</title></text>",
				e.Condition, e.X, e.Y, e.Text, e.Whole)
		}
	}
}
