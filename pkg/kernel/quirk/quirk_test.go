// SPDX-License-Identifier: Apache-2.0

package quirk_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// TestAll checks that each quirk is complete and that the hardware page has the row that depends on
// it.
func TestAll(t *testing.T) {
	page, err := os.ReadFile("../../../docs/reference/hardware.md")
	if err != nil {
		t.Fatal(err)
	}

	seen := map[string]bool{}
	for _, q := range quirk.All() {
		if q.Driver == "" || q.Name == "" || q.Does == "" || q.Answer == "" || q.Source == "" {
			t.Errorf("%+v: something is missing", q)
		}

		if key := q.Driver + ": " + q.Name; seen[key] {
			t.Errorf("%s: is there twice", key)
		} else {
			seen[key] = true
		}

		if !strings.Contains(string(page), "\n| "+q.Row+" | ") {
			t.Errorf("%s: hardware.md has no row %q", q.Name, q.Row)
		}
	}
}

func TestNotSupported(t *testing.T) {
	for err, want := range map[error]bool{
		unix.EOPNOTSUPP: true, unix.Errno(524): true,
		fmt.Errorf("write: %w", unix.Errno(524)): true,
		unix.EINVAL:                              false, errors.New("other"): false, nil: false,
	} {
		if got := quirk.NotSupported(err); got != want {
			t.Errorf("%v: %t, want %t", err, got, want)
		}
	}
}
