// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// attacks are hostile texts, and how they are shown.
var attacks = map[string]struct{ text, shown string }{
	"nothing": {"", ""},
	"a name":  {"web-0 übergröße 網卡 ✓ ├──", "web-0 übergröße 網卡 ✓ ├──"},
	"quotes": {
		`device.attributes["a"].b == '\\'`, `device.attributes["a"].b == '\\'`,
	},
	"escaped before":            {`\x1b[2J`, `\x1b[2J`},
	"clear the screen":          {"\x1b[2J", `\x1b[2J`},
	"colours":                   {"\x1b[32mfine\x1b[0m", `\x1b[32mfine\x1b[0m`},
	"title of the window":       {"\x1b]0;root\a", `\x1b]0;root\a`},
	"CSI of 8 bits, as a byte":  {"\x9b31m", `\x9b31m`},
	"CSI of 8 bits, as a rune":  {"\u009b31m", `\u009b31m`},
	"back to the line's begin":  {"node1 fails\rnode1 OK   ", `node1 fails\rnode1 OK   `},
	"a row more":                {"node1\nnode2 OK", `node1\nnode2 OK`},
	"a column more":             {"node1\tOK", `node1\tOK`},
	"a cell of tabwriter's":     {"node1\vOK\f", `node1\vOK\f`},
	"backspace, delete and nul": {"a\bb\x7f\x00", `a\bb\x7f\x00`},
	"from right to left":        {"a\u202egnp\u2066", `a\u202egnp\u2066`},
	"without width":             {"no\u200bde\ufeff\u2060", `no\u200bde\ufeff\u2060`},
	"a blank that is none":      {"a\u00a0b\u2028", `a\u00a0b\u2028`},
	"tags":                      {"\U000e0041", `\U000e0041`},
	"half a character":          {"\xe2\x9c", `\xe2\x9c`},
	"the replacement":           {"\ufffd", "\ufffd"},
}

func TestEscape(t *testing.T) {
	for name, tt := range attacks {
		if got := Escape(tt.text); got != tt.shown {
			t.Errorf("%s: %q is shown as %q, want %q", name, tt.text, got, tt.shown)
		}
	}
}

func TestLine(t *testing.T) {
	for name, tt := range attacks {
		var out bytes.Buffer
		err := Line(&out, "pod %s: %v", tt.text, errors.New(tt.text))
		if want := "pod " + tt.shown + ": " + tt.shown + "\n"; err != nil || out.String() != want {
			t.Errorf("%s: %v, %q, want %q", name, err, out.String(), want)
		}
	}
}

func TestColumns(t *testing.T) {
	got := Columns(2, [][]string{
		{"NODE", "CLAIM", "DEVICE"},
		{"node1\nnode2", "a\tb", "d0\x1b[2J"},
		{"übergröße", "", "d1\n"},
		{},
		{"\xff\v", "\f"},
	})

	want := []string{
		"NODE          CLAIM  DEVICE\n",
		`node1\nnode2  a\tb   d0\x1b[2J` + "\n",
		`übergröße            d1\n` + "\n",
		"\n",
		`\xff\v  \f` + "\n",
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := Columns(2, nil); len(got) != 0 {
		t.Errorf("no rows are %q", got)
	}
}

func TestWriter(t *testing.T) {
	for name, tt := range attacks {
		var out bytes.Buffer
		text := "A\tB\n" + tt.text + "\n"
		n, err := NewWriter(&out).Write([]byte(text))
		shown := strings.NewReplacer(`\n`, "\n", `\t`, "\t").Replace(tt.shown)
		if want := "A\tB\n" + shown + "\n"; err != nil || n != len(text) || out.String() != want {
			t.Errorf("%s: %v, %d bytes, %q, want %q", name, err, n, out.String(), want)
		}
	}

	if n, err := NewWriter(full{}).Write([]byte("a")); !errors.Is(err, errFull) || n != 0 {
		t.Errorf("a writer that fails: %d bytes, %v", n, err)
	}
}

var errFull = errors.New("no space left")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

// TestColours checks that a terminal with colours gets the colours of a Painter, and no other
// escape sequence.
func TestColours(t *testing.T) {
	var out bytes.Buffer
	w := &Writer{to: &out, colours: true}
	paint := painter(true)
	text := paint(Good, "fine") + paint(Bad, "bad\x1b[2J\n") + "\x1b[2J\x1b[33m\n"
	if _, err := w.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}

	want := "\x1b[32mfine\x1b[0m\x1b[31mbad" + `\x1b[2J\n` + "\x1b[0m" + `\x1b[2J\x1b[33m` + "\n"
	if out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
	if got := NewPainter(NewWriter(&out))(Good, "fine\x1b[2J"); got != `fine\x1b[2J` {
		t.Errorf("painted for a file: %q", got)
	}
}

func TestRaw(t *testing.T) {
	var out bytes.Buffer
	if Raw(NewWriter(&out)) != &out || Raw(&out) != &out {
		t.Error("what programs read does not go to the writer below")
	}
}

func FuzzEscape(f *testing.F) {
	for _, tt := range attacks {
		f.Add(tt.text, "node2")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		escaped := Escape(a)
		unprintable(t, escaped, "")
		if again := Escape(escaped); again != escaped {
			t.Errorf("%q becomes %q when it is escaped again", escaped, again)
		}

		lines := Columns(2, [][]string{{"A", "B"}, {a, b}, {b, a}})
		if len(lines) != 3 {
			t.Errorf("3 rows become %d lines: %q", len(lines), lines)
		}

		for _, line := range lines {
			text, ended := strings.CutSuffix(line, "\n")
			unprintable(t, text, "")
			if !ended {
				t.Errorf("line %q has no end", line)
			}
		}

		var out bytes.Buffer
		if _, err := NewWriter(&out).Write([]byte(a)); err != nil {
			t.Fatal(err)
		}

		unprintable(t, out.String(), "\n\t")
		for _, kept := range []string{"\n", "\t"} {
			if strings.Count(out.String(), kept) != strings.Count(a, kept) {
				t.Errorf("%q has not the line breaks and tabs of %q", out.String(), a)
			}
		}
	})
}

// unprintable fails the test if the text contains unprintable characters other than the allowed
// ones.
func unprintable(t *testing.T, text, allowed string) {
	t.Helper()
	if strings.ToValidUTF8(text, "") != text {
		t.Errorf("%q is no UTF-8", text)
	}
	for _, r := range text {
		if !strconv.IsPrint(r) && !strings.ContainsRune(allowed, r) {
			t.Errorf("%q has %q", text, r)
		}
	}
}
