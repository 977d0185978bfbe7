// Package boltfile opens the files that programs keep their durable records in, with bbolt, and finds out before anything else
// whether one is damaged: bbolt trusts the pages of its file, and reads a truncated one beyond its end.
package boltfile

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

const lockTimeout = time.Second // for another process to give the file up

var (
	// ErrLocked is returned if another process has the file open.
	ErrLocked = errors.New("is in use by another process; does the program run twice?")
	// ErrCorrupt is returned for a file that cannot be understood. What it knew is lost when it is moved away.
	ErrCorrupt = errors.New("is corrupt")
)

// Open opens a file, and makes it with its directory if it is missing. load reads what is in it, before all of it is checked: it must
// see every record, and not trust what it sees. The error may be [ErrLocked] or [ErrCorrupt], which load may return too, and does not
// tell the path.
func Open(path string, load func(*bolt.Tx) error) (_ *bolt.DB, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	var db *bolt.DB
	var file *os.File
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w (%v)", ErrCorrupt, r)
			if db == nil && file != nil {
				// bbolt leaves its mapping behind, and that keeps the lock although the file is closed.
				_ = unix.Flock(int(file.Fd()), unix.LOCK_UN)
				file.Close()
			}
		}
		if err != nil && db != nil {
			db.Close()
		}
	}()
	// The list of free pages stays in the file: bbolt would look for them in a goroutine of its own, where a damaged page
	// cannot be recovered from.
	db, err = bolt.Open(path, 0o600, &bolt.Options{
		Timeout: lockTimeout,
		OpenFile: func(name string, flag int, mode os.FileMode) (_ *os.File, err error) {
			file, err = os.OpenFile(name, flag, mode)
			return file, err
		},
	})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return nil, ErrLocked
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrChecksum), errors.Is(err, bolterrors.ErrVersionMismatch):
		return nil, fmt.Errorf("%w (%w)", ErrCorrupt, err)
	case err != nil:
		return nil, err
	}
	if err := db.View(func(tx *bolt.Tx) error { return check(tx, load(tx)) }); err != nil {
		return nil, err
	}
	return db, syncDirectory(filepath.Dir(path)) // the file may be new
}

// check comes after all pages were seen by load, as the library looks at them in a goroutine of its own. That one goes on reading
// until the channel is empty, even in a file that is closed.
func check(tx *bolt.Tx, err error) error {
	if err != nil {
		return err
	}
	for damage := range tx.Check() {
		err = cmp.Or(err, fmt.Errorf("%w (%w)", ErrCorrupt, damage))
	}
	return err
}

// syncDirectory makes the name of a new file durable, which syncing the file does not.
func syncDirectory(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
