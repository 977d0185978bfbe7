// SPDX-License-Identifier: Apache-2.0

package refusal_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestReason(t *testing.T) {
	busy := refusal.New(codes.DeadlineExceeded, refusal.Busy, "object %s", "net-a")
	for name, test := range map[string]struct {
		err  error
		want refusal.Reason
		text string
	}{
		"a reason":        {busy, refusal.Busy, "object net-a"},
		"a code":          {status.Error(codes.InvalidArgument, "no"), "INVALID_ARGUMENT", "no"},
		"a code alone":    {status.Error(codes.Internal, ""), "INTERNAL", ""},
		"no status":       {errors.New("broken"), "UNKNOWN", "broken"},
		"a wrapped error": {fmt.Errorf("call: %w", busy), refusal.Busy, "call: "},
	} {
		t.Run(name, func(t *testing.T) {
			got := refusal.Complete(test.err)
			if reason := refusal.Of(got); reason != test.want {
				t.Errorf("reason %q, want %q", reason, test.want)
			}
			if status.Code(got) != status.Code(test.err) ||
				!strings.Contains(got.Error(), test.text) {
				t.Errorf("%v became %v", test.err, got)
			}
		})
	}

	if err := refusal.Complete(nil); err != nil {
		t.Errorf("success became %v", err)
	}
}

// TestDocumented checks that the reference has each reason.
func TestDocumented(t *testing.T) {
	reference, err := os.ReadFile("../../../docs/reference/opi-bridge.md")
	must.Succeed(t, err)
	file, err := parser.ParseFile(token.NewFileSet(), "refusal.go", nil, 0)
	must.Succeed(t, err)

	reasons := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, is := n.(*ast.ValueSpec)
		if !is || fmt.Sprint(spec.Type) != "Reason" {
			return true
		}
		reasons++
		reason, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		must.Succeed(t, err)
		if !strings.Contains(string(reference), "`"+reason+"`") {
			t.Errorf("docs/reference/opi-bridge.md does not have `%s`", reason)
		}
		return true
	})

	if reasons < 20 {
		t.Errorf("found %d reasons", reasons)
	}
}
