// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"context"
	"os"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// watchRetry is the time until a directory that could not be watched, or a file that could not be
// written, is tried again.
const watchRetry = time.Minute

// Complete restores files of a directory at once and whenever files were removed from it, until ctx
// ends. restore returns the names of the files that it has written again.
func Complete(
	ctx context.Context, path string, log logr.Logger, restore func() ([]string, error),
) error {
	for {
		if err := complete(ctx, path, log, restore); err != nil {
			log.Error(err, "Files that somebody removes are not noticed", "dir", path, "retry",
				watchRetry.String())
		}
		if !loop.Sleep(ctx, watchRetry) {
			return nil
		}
	}
}

// complete returns nil when ctx ends.
func complete(
	ctx context.Context, path string, log logr.Logger, restore func() ([]string, error),
) error {
	removals, err := watchdir.Open(path, func(event fsnotify.Event) bool {
		return event.Has(fsnotify.Remove | fsnotify.Rename)
	})
	if err != nil {
		return err
	}
	defer removals.Close()

	for {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		if err := removals.Watch(); err != nil {
			return err
		}

		restored, err := restore()
		if len(restored) > 0 {
			log.Info("Files that somebody removed are there again", "dir", path, "files", restored)
		}
		pause := time.Duration(0)
		if err != nil { // the other files are watched on
			pause = watchRetry
			log.Error(err, "Some files are missing", "dir", path, "retry", pause.String())
		}

		if !loop.Wait(ctx, removals.Changes(), pause) {
			return nil
		}
	}
}
