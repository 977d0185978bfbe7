// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// remotesFile is the file of --remotes as it was last read without an error.
type remotesFile struct {
	path    string
	content []byte
}

// maxRemotesFile is the largest file that is read, in bytes.
const maxRemotesFile = 1 << 20

// read reads the file, and reports whether it has changed.
func (f *remotesFile) read() (remotes *plane.Remotes, changed bool, err error) {
	info, err := os.Stat(f.path)
	if err == nil && info.Size() > maxRemotesFile {
		err = fmt.Errorf("%s: has %d bytes, must have at most %d", f.path, info.Size(),
			maxRemotesFile)
	}
	if err != nil {
		return nil, false, err
	}

	content, err := os.ReadFile(f.path)
	if err != nil || f.content != nil && bytes.Equal(content, f.content) {
		return nil, false, err
	}
	if remotes, err = plane.ParseRemotes(content); err != nil {
		return nil, false, fmt.Errorf("%s: %w", f.path, err)
	}

	f.content = content

	return remotes, true, nil
}

// follow calls set with the remotes whenever the file changes, until ctx ends. An error is logged,
// and the remotes stay as they are.
func (f *remotesFile) follow(
	ctx context.Context, log logr.Logger, set func(context.Context, *plane.Remotes) error,
) error {
	all, ctx := errgroup.WithContext(ctx)
	changes := make(chan struct{}, 1)
	all.Go(func() error { return watchdir.Notify(ctx, filepath.Dir(f.path), changes) })
	all.Go(func() error {
		for failed := ""; loop.Wait(ctx, changes, 0); {
			loop.Debounce(ctx, changes, 100*time.Millisecond, time.Second)
			remotes, changed, err := f.read()
			if err == nil && changed {
				if err = set(ctx, remotes); err != nil {
					return nil // because ctx has ended
				}
				log.Info("remotes read", "rules", len(remotes.Rules))
			}

			switch {
			case err == nil:
				failed = ""
			case err.Error() != failed:
				failed = err.Error()
				log.Error(err, "remotes stay as they were")
			}
		}
		return nil
	})

	if err := all.Wait(); err != nil {
		return fmt.Errorf("--remotes: %w", err)
	}

	return nil
}
