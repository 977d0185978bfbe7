// Package watchdir wakes whoever looks at a directory when something changed in it, or when the directory went or came.
package watchdir

import (
	"fmt"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
)

// Dir is a directory that is watched by inotify (inotify(7)). Close it after use.
type Dir struct {
	path    string
	watcher *fsnotify.Watcher
	changes chan struct{}
}

// Open prepares to watch; [Dir.Watch] begins. matters says which changes of the directory's entries are worth a look; nil
// is all. It is called from another goroutine. That the directory itself went or came always matters, and so does that
// events may have been lost.
func Open(path string, matters func(fsnotify.Event) bool) (*Dir, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch %s (does sysctl fs.inotify.max_user_instances allow another?): %w", path, err)
	}
	d := &Dir{path: filepath.Clean(path), watcher: watcher, changes: make(chan struct{}, 1)}
	go d.pump(matters)
	return d, nil
}

// Watch watches the directory, and its parent, by which it is seen that the directory goes and comes. Call it again when
// the directory may have been made anew, before looking at it.
func (d *Dir) Watch() error {
	for _, path := range []string{filepath.Dir(d.path), d.path} {
		if err := d.watcher.Add(path); err != nil {
			return fmt.Errorf("watch %s: %w", path, err)
		}
	}
	return nil
}

// Changes receives a value after something changed; several changes before it is received are one.
func (d *Dir) Changes() <-chan struct{} { return d.changes }

// Close ends the watch.
func (d *Dir) Close() error { return d.watcher.Close() }

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
		default: // whoever it is for has not looked yet
		}
	}
}

func (d *Dir) worthALook(event fsnotify.Event, matters func(fsnotify.Event) bool) bool {
	switch {
	case event.Name == d.path:
		return event.Has(fsnotify.Create) || event.Has(fsnotify.Remove) || event.Has(fsnotify.Rename)
	case filepath.Dir(event.Name) != d.path: // beside it
		return false
	}
	return matters == nil || matters(event)
}
