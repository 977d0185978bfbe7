// SPDX-License-Identifier: Apache-2.0

package eventnote

import (
	"strings"
	"testing"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
)

func TestRecorder(t *testing.T) {
	for name, test := range map[string]struct {
		note string
		args []any
		want string
	}{
		"short":             {"Port %d", []any{7}, "Port 7"},
		"a percent sign":    {"%s", []any{"100 %s"}, "100 %s"},
		"not UTF-8":         {"%s", []any{"a\xffb"}, "a\uFFFDb"},
		"as long as it may": {"%s", []any{strings.Repeat("x", Max)}, strings.Repeat("x", Max)},
		"too long": {"%s", []any{strings.Repeat("x", Max+1)},
			strings.Repeat("x", Max-len("...")) + "..."},
		"cut within a letter": {"x%s", []any{strings.Repeat("ü", Max)},
			"x" + strings.Repeat("ü", (Max-len("x..."))/2) + "..."},
	} {
		t.Run(name, func(t *testing.T) {
			sent := events.NewFakeRecorder(1)
			Recorder{sent}.Eventf(nil, nil, corev1.EventTypeWarning, "Failed", "Provision", test.note,
				test.args...)

			got := strings.TrimPrefix(<-sent.Events, "Warning Failed ")
			if got != test.want || len(got) > Max || !utf8.ValidString(got) {
				t.Errorf("note of %d bytes %q, want %q", len(got), got, test.want)
			}
		})
	}
}
