// SPDX-License-Identifier: Apache-2.0

package cast_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/cast"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// recorded returns the recordings of the documents.
func recorded(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../../docs/*/pictures/*.cast")
	must.Succeed(t, err)
	return files
}

// TestPicturesAreDrawn checks that the pictures in the documents are what their recordings give, and
// that they are fit for a README.
func TestPicturesAreDrawn(t *testing.T) {
	const most = 150_000 // bytes

	for _, file := range recorded(t) {
		content, err := os.ReadFile(file)
		must.Succeed(t, err)
		recording, err := cast.Read(bytes.NewReader(content))
		must.Succeed(t, err)
		want, err := recording.SVG()
		must.Succeed(t, err)
		wellFormed(t, want)

		path := strings.TrimSuffix(file, ".cast") + ".svg"
		got, err := os.ReadFile(path)
		must.Succeed(t, err)
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not drawn from %s: run go run ./test/cast/cmd/cast %[2]s", path, file)
		}
		if len(got) > most {
			t.Errorf("%s has %d bytes, want at most %d", path, len(got), most)
		}
		for _, want := range []string{
			"prefers-color-scheme:dark", "prefers-reduced-motion:no-preference", "<title>",
		} {
			if !bytes.Contains(got, []byte(want)) {
				t.Errorf("%s has no %s", path, want)
			}
		}
	}
}

func wellFormed(t *testing.T, svg []byte) {
	t.Helper()
	for decoder := xml.NewDecoder(bytes.NewReader(svg)); ; {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("the SVG is no XML: %v", err)
		}
	}
}

func TestDraw(t *testing.T) {
	recording := cast.Recording{Width: 10, Height: 2, Title: "a & b", Events: []cast.Event{
		{At: 0, Text: "$ "}, {At: time.Second, Text: "l"}, {At: 2 * time.Second, Text: "s\n"},
		{At: 5 * time.Second, Text: "<a>\nb\tcdefgh\n"},
	}}

	got, err := recording.SVG()
	must.Succeed(t, err)
	wellFormed(t, got)
	for _, want := range []string{
		"<title>a &amp; b</title>",
		// the command is typed
		`<tspan class="t0">$ </tspan><tspan class="t1000">l</tspan><tspan class="t2000">s</tspan>`,
		// the pause of 3 s is cut to one, so that 6 s later everything begins again after 9 s
		`<tspan class="t3000">&lt;a&gt;</tspan>`, "infinite", "scroll 9.00s",
		".t3000{animation-name:t3000}@keyframes t3000{0%{visibility:hidden}33.333%{visibility:visible}}",
		// the third line is broken at the width, and the last two of four lines are in sight
		`<tspan class="t3000">b       cd</tspan>`, `<tspan class="t3000">efgh</tspan>`,
		"33.333%{transform:translateY(-34px)}", ".screen{transform:translateY(-34px)}",
	} {
		if !strings.Contains(string(got), want) {
			t.Errorf("it has no %s:\n%s", want, got)
		}
	}

	recording.Events = append(recording.Events, cast.Event{At: time.Minute, Text: "\x1b[1m"})
	if _, err := recording.SVG(); err == nil || !strings.Contains(err.Error(), `'\x1b'`) {
		t.Errorf("an escape gives %v, want an error that names it", err)
	}
}

func TestRecord(t *testing.T) {
	var seen bytes.Buffer
	got, err := cast.Record(t.Context(), &seen, "greeting", 80, 24,
		[]string{"echo hello", "echo bye >&2"})
	must.Succeed(t, err)
	if want := "$ echo hello\nhello\n\n$ echo bye >&2\nbye\n"; seen.String() != want {
		t.Errorf("the screen shows %q, want %q", seen.String(), want)
	}

	var file bytes.Buffer
	must.Succeed(t, got.Write(&file))
	again, err := cast.Read(&file)
	must.Succeed(t, err)
	if diff := cmp.Diff(got, again); diff != "" {
		t.Errorf("what was written is read as another recording (-written +read):\n%s", diff)
	}

	if _, err := cast.Record(t.Context(), io.Discard, "", 80, 24,
		[]string{"exit 3", "echo never"}); err == nil || !strings.Contains(err.Error(), "exit 3") {
		t.Errorf("a command that fails gives %v, want an error that names it", err)
	}
}

func TestReadRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":              "empty",
		`{"version":1}`: "version 1",
		"{\"version\":2,\"width\":1,\"height\":1}\n[1,\"i\",\"x\"]":                "line 2",
		"{\"version\":2,\"width\":1,\"height\":1}\n[1,\"o\",\"\"]\n[0,\"o\",\"\"]": "line 3: is earlier",
	} {
		if _, err := cast.Read(strings.NewReader(text)); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", text, err, want)
		}
	}
}
