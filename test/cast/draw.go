// SPDX-License-Identifier: Apache-2.0

package cast

import (
	"fmt"
	"html"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// longestPause is how long nothing happens at most. Longer pauses of a recording are cut.
	longestPause = time.Second
	// hold is how long the last screen stays before the animation begins again.
	hold = 6 * time.Second

	// charWidth and lineHeight are in user units of the SVG. Characters of 13 units are at most 8
	// wide in the usual fonts.
	charWidth, lineHeight = 8, 17
	margin, bar           = 14, 30
)

// fragment is text that appears at once, within a line.
type fragment struct {
	at   time.Duration
	text string
}

// screen is a terminal that only ever gets longer.
type screen struct {
	width int
	lines [][]fragment
	// column is where the next character goes, in the last line.
	column int
}

// SVG draws a recording. The terminal's only control characters are tabs and ends of lines; others
// are an error.
func (r Recording) SVG() ([]byte, error) {
	s := &screen{width: r.Width, lines: make([][]fragment, 1)}
	var at, before time.Duration
	for _, event := range r.Events {
		at += min(event.At-before, longestPause)
		before = event.At
		if err := s.print(at, event.Text); err != nil {
			return nil, fmt.Errorf("at %s: %w", event.At, err)
		}
	}

	if len(s.lines[len(s.lines)-1]) == 0 {
		s.lines = s.lines[:len(s.lines)-1]
	}

	return []byte(r.draw(s, at+hold)), nil
}

func (s *screen) print(at time.Duration, text string) error {
	for _, char := range text {
		switch {
		case char == '\n':
			s.lines, s.column = append(s.lines, nil), 0
		case char == '\r':
			// of \r\n
		case char == '\t':
			s.put(at, strings.Repeat(" ", 8-s.column%8))
		case char < ' ' || char == 0x7f:
			return fmt.Errorf("the control character %q cannot be drawn", char)
		default:
			s.put(at, string(char))
		}
	}

	return nil
}

// put appends text to the last line, which is broken at the width of the terminal.
func (s *screen) put(at time.Duration, text string) {
	for _, char := range text {
		if s.column == s.width {
			s.lines, s.column = append(s.lines, nil), 0
		}
		s.column++

		line := &s.lines[len(s.lines)-1]
		if n := len(*line); n > 0 && (*line)[n-1].at == at {
			(*line)[n-1].text += string(char)
			continue
		}
		*line = append(*line, fragment{at, string(char)})
	}
}

// style has the colours of both modes. Without motion, everything is there from the beginning.
const style = `
svg{--back:#f6f8fa;--bar:#d8dee4;--text:#1f2328;--command:#0550ae;font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media(prefers-color-scheme:dark){svg{--back:#0d1117;--bar:#30363d;--text:#e6edf3;--command:#79c0ff}}
.back{fill:var(--back);stroke:var(--bar)}.bar{fill:var(--bar)}
text{fill:var(--text);white-space:pre}.command{fill:var(--command);font-weight:600}
`

// draw returns the SVG of a screen that is repeated after the time total.
func (r Recording) draw(s *screen, total time.Duration) string {
	height := min(r.Height, len(s.lines))
	w, h := r.Width*charWidth+2*margin, height*lineHeight+2*margin+bar
	times := map[time.Duration]bool{}
	var text strings.Builder
	for i, line := range s.lines {
		drawLine(&text, i, line, times)
	}

	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" `+
		`width="%[1]d" height="%[2]d" role="img">`+"\n", w, h)
	fmt.Fprintf(&out, "<title>%s</title>\n<style>%s", html.EscapeString(r.Title), style)
	fmt.Fprintf(&out, ".screen{transform:translateY(%dpx)}\n", -s.scrolled(len(s.lines), height))
	out.WriteString("@media(prefers-reduced-motion:no-preference){\n")
	fmt.Fprintf(&out, "[class^=t],.screen{animation:scroll %.2fs step-end infinite}\n",
		total.Seconds())
	out.WriteString(s.scrolling(height, total))
	for _, at := range slices.Sorted(maps.Keys(times)) {
		fmt.Fprintf(&out, ".%[1]s{animation-name:%[1]s}@keyframes %[1]s{0%%{visibility:hidden}"+
			"%[2]s%%{visibility:visible}}\n", class(at), percent(at, total))
	}

	out.WriteString("}\n</style>\n")
	fmt.Fprintf(&out, `<rect class="back" x=".5" y=".5" width="%d" height="%d" rx="8"/>`+"\n", w-1,
		h-1)
	for i := range 3 {
		fmt.Fprintf(&out, `<circle class="bar" cx="%d" cy="16" r="5"/>`, margin+6+i*16)
	}
	fmt.Fprintf(&out, "\n"+`<svg x="%d" y="%d" width="%d" height="%d"><g class="screen">`+"\n",
		margin, bar, w-2*margin, height*lineHeight+margin/2)
	out.WriteString(text.String())
	out.WriteString("</g></svg>\n</svg>\n")

	return out.String()
}

// drawLine draws a line, and notes the times at which its fragments appear.
func drawLine(out *strings.Builder, number int, line []fragment, times map[time.Duration]bool) {
	if len(line) == 0 {
		return
	}

	kind := ""
	if strings.HasPrefix(line[0].text, "$") {
		kind = ` class="command"`
	}

	fmt.Fprintf(out, `<text y="%d"%s>`, (number+1)*lineHeight-4, kind)
	for _, f := range line {
		times[f.at] = true
		fmt.Fprintf(out, `<tspan class="%s">%s</tspan>`, class(f.at),
			html.EscapeString(f.text))
	}
	out.WriteString("</text>\n")
}

// scrolling returns the keyframes by which the screen shows the last line at any time.
func (s *screen) scrolling(height int, total time.Duration) string {
	var out strings.Builder
	out.WriteString("@keyframes scroll{0%{transform:none}")
	var last time.Duration = -1
	frame := ""
	for i, line := range s.lines {
		if len(line) == 0 || s.scrolled(i+1, height) == 0 {
			continue
		}
		if line[0].at != last {
			out.WriteString(frame)
		}
		last = line[0].at
		frame = fmt.Sprintf("%s%%{transform:translateY(%dpx)}", percent(last, total),
			-s.scrolled(i+1, height))
	}

	return out.String() + frame + "}\n"
}

// scrolled returns how far the first lines are out of sight when so many are printed.
func (s *screen) scrolled(lines, height int) int { return max(lines-height, 0) * lineHeight }

func class(at time.Duration) string { return fmt.Sprintf("t%d", at.Milliseconds()) }

func percent(at, total time.Duration) string {
	text := fmt.Sprintf("%.3f", 100*at.Seconds()/total.Seconds())
	return strings.TrimRight(strings.TrimRight(text, "0"), ".")
}
