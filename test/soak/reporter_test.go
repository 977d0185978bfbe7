// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

// reporter repeats at the end of a test why it failed, because the reasons are far above in the
// output.
type reporter struct {
	testing.TB

	mutex   sync.Mutex
	reasons []string
}

func newReporter(t testing.TB) *reporter {
	r := &reporter{TB: t}
	t.Cleanup(func() {
		r.mutex.Lock()
		defer r.mutex.Unlock()
		if len(r.reasons) > 0 {
			t.Logf("failed because:\n%s", strings.Join(r.reasons, "\n"))
		}
	})
	return r
}

func (r *reporter) note(reason string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.reasons = append(r.reasons, reason)
}

func (r *reporter) Error(args ...any) {
	r.Helper()
	r.note(fmt.Sprintln(args...))
	r.TB.Error(args...)
}

func (r *reporter) Errorf(format string, args ...any) {
	r.Helper()
	r.note(fmt.Sprintf(format, args...))
	r.TB.Errorf(format, args...)
}

func (r *reporter) Fatal(args ...any) {
	r.Helper()
	r.note(fmt.Sprintln(args...))
	r.TB.Fatal(args...)
}

func (r *reporter) Fatalf(format string, args ...any) {
	r.Helper()
	r.note(fmt.Sprintf(format, args...))
	r.TB.Fatalf(format, args...)
}
