// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestRemotesFile checks that a file of remotes is read again when it changes, and that a file that
// is wrong changes nothing.
func TestRemotesFile(t *testing.T) {
	f := &remotesFile{path: filepath.Join(t.TempDir(), "remotes.yaml")}
	write := func(text string) { must.Succeed(t, os.WriteFile(f.path, []byte(text), 0o600)) }
	write("remotes: [{addresses: [10.0.0.1]}]")
	first, changed, err := f.read()
	must.Succeed(t, err)
	if addresses, _ := first.For(1); !changed || len(addresses) != 1 {
		t.Errorf("read %s, %t", addresses, changed)
	}

	got := make(chan *plane.Remotes, 10)
	must.Run(t, func(ctx context.Context) error {
		return f.follow(ctx, logr.Discard(), func(_ context.Context, r *plane.Remotes) error {
			got <- r
			return nil
		})
	})

	write("remotes: [")
	write("remotes: [{addresses: [10.0.0.2, 10.0.0.3]}]")
	if addresses, _ := (<-got).For(1); len(addresses) != 2 {
		t.Errorf("read %s", addresses)
	}

	write(strings.Repeat("# long\n", maxRemotesFile))
	write("remotes: []")
	if _, named := (<-got).For(1); named {
		t.Error("a file without rules has one")
	}
}
