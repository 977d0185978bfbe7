// SPDX-License-Identifier: Apache-2.0

// Package watchdir reports that an entry of a directory changed, or that the directory itself was
// created or removed.
package watchdir

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
)

// Dir is a directory that is watched by inotify(7). The caller closes it.
type Dir struct {
	path    string
	watcher *fsnotify.Watcher
	changes chan struct{}
}

// Open returns a Dir that is not watched yet: see [Dir.Watch].
//
// matters reports which changes of the directory's entries are of interest, or is nil if all are.
// It is called on another goroutine. A change of the directory itself, and a possible loss of
// events, are always reported.
func Open(path string, matters func(fsnotify.Event) bool) (*Dir, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch %s (does sysctl fs.inotify.max_user_instances allow "+
			"another?): %w", path, err)
	}
	d := &Dir{path: filepath.Clean(path), watcher: watcher, changes: make(chan struct{}, 1)}
	go d.pump(matters)
	return d, nil
}

// Watch watches the directory, and its parent for changes of the directory itself. Call it again
// before reading a directory that may have been created anew.
func (d *Dir) Watch() error {
	for _, path := range []string{filepath.Dir(d.path), d.path} {
		if err := d.watcher.Add(path); err != nil {
			return fmt.Errorf("watch %s: %w", path, err)
		}
	}
	return nil
}

// Changes returns a channel that receives a value after one or more changes.
func (d *Dir) Changes() <-chan struct{} { return d.changes }

// Close ends the watch.
func (d *Dir) Close() error { return d.watcher.Close() }

// Notify sends on a channel when a directory has changed, and once at the beginning because of earlier
// changes. A send that would block is left out, so the channel needs a buffer of 1. Notify returns nil
// when ctx ends.
func Notify(ctx context.Context, dir string, changed chan<- struct{}) error {
	watcher, err := Open(dir, nil)
	if err != nil {
		return err
	}
	defer watcher.Close()

	for {
		if err := watcher.Watch(); err != nil {
			return err
		}

		select {
		case changed <- struct{}{}:
		default:
		}

		select {
		case <-ctx.Done():
			return nil
		case <-watcher.Changes():
		}
	}
}

func (d *Dir) pump(matters func(fsnotify.Event) bool) {
	for {
		select {
		case event, ok := <-d.watcher.Events:
			if !ok {
				return
			}
			if !d.worthALook(event, matters) {
				continue
			}
		case _, ok := <-d.watcher.Errors: // events may have been lost
			if !ok {
				return
			}
		}
		select {
		case d.changes <- struct{}{}:
		default: // the receiver has not taken the previous value yet
		}
	}
}

func (d *Dir) worthALook(event fsnotify.Event, matters func(fsnotify.Event) bool) bool {
	if event.Name == d.path {
		return event.Has(fsnotify.Create | fsnotify.Remove | fsnotify.Rename)
	}
	return filepath.Dir(event.Name) == d.path && (matters == nil || matters(event))
}
