package quirk_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// TestPage: each row of the page says everything, and the row that counts on it is in the hardware page.
func TestPage(t *testing.T) {
	page, err := os.ReadFile("../../../docs/reference/quirks.md")
	if err != nil {
		t.Fatal(err)
	}
	hardware, err := os.ReadFile("../../../docs/reference/hardware.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rows, found := strings.Cut(string(page), "\n| --- | --- | --- | --- | --- | --- |\n")
	if !found {
		t.Fatal("the page has no table of six columns")
	}
	seen := map[string]bool{}
	for row := range strings.Lines(rows) {
		cells := strings.Split(strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(row), "| "), " |"), " | ")
		if len(cells) != 6 || slices.Contains(cells, "") {
			t.Errorf("%q: something is missing", row)
			continue
		}
		driver, name, counted := cells[0], cells[1], cells[5]
		if key := driver + ": " + name; seen[key] {
			t.Errorf("%s: is there twice", key)
		} else {
			seen[key] = true
		}
		if !strings.Contains(string(hardware), "\n| "+counted+" | ") {
			t.Errorf("%s: hardware.md has no row %q", name, counted)
		}
	}
	if len(seen) == 0 {
		t.Error("the table is empty")
	}
}

func TestNotSupported(t *testing.T) {
	for err, want := range map[error]bool{
		unix.EOPNOTSUPP: true, unix.Errno(524): true, fmt.Errorf("write: %w", unix.Errno(524)): true,
		unix.EINVAL: false, errors.New("other"): false, nil: false,
	} {
		if got := quirk.NotSupported(err); got != want {
			t.Errorf("%v: %t, want %t", err, got, want)
		}
	}
}
