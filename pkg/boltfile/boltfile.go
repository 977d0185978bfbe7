// SPDX-License-Identifier: Apache-2.0

// Package boltfile keeps durable records of programs, each in one bbolt file.
//
// bbolt trusts its file: a damaged page can make it panic, read beyond the end, allocate all
// memory, or loop forever. Therefore [check] checks the whole file before bbolt opens it. Each
// transaction also writes a checksum of all records, called the seal, because a page can be intact
// and yet not be the one that was written.
package boltfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

const (
	lockTimeout = time.Second // for another process to release the file
	lockRetry   = 50 * time.Millisecond
)

var (
	// ErrLocked is returned if another process has the file open.
	ErrLocked = errors.New("is in use by another process; does the program run twice?")
	// ErrCorrupt is returned for a file with other content than was written. Its records are lost
	// when it is moved away.
	ErrCorrupt = errors.New("is corrupt")
)

// File is an open file. Its methods are safe for concurrent use.
type File struct {
	db *bolt.DB
	// sum is the checksum of the records when the file was opened. It is used until the file has a
	// seal. A new file has none, nor has one that a program without seals wrote.
	sum uint64
}

// Open opens a file, and creates it and its directory if needed. load reads the content in a
// read-only transaction. The error may be [ErrLocked] or [ErrCorrupt], which load may return too;
// it does not contain the path. Older programs, which do not know seals, can use the file as well.
func Open(path string, load func(*Tx) error) (*File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}

	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}

	found, err := lockAndCheck(file)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}

	// The list of free pages is kept in the file. Otherwise bbolt would read all pages to find it.
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		OpenFile: func(string, int, os.FileMode) (*os.File, error) { return file, nil },
	})
	if err != nil {
		return nil, err // bbolt has closed the file
	}

	f := &File{db: db, sum: found.sum}
	err = db.View(func(tx *bolt.Tx) error { return load(&Tx{tx: tx}) })
	if err == nil {
		err = syncDirectory(filepath.Dir(path)) // the file may be new
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}

	return f, nil
}

// lockAndCheck locks a file until it is closed, and checks its content.
func lockAndCheck(file *os.File) (contents, error) {
	if err := lock(file); err != nil {
		return contents{}, err
	}

	info, err := file.Stat()
	if err != nil || info.Size() == 0 { // bbolt initializes an empty file
		return contents{}, err
	}

	data := make([]byte, info.Size())
	if _, err := file.ReadAt(data, 0); err != nil {
		return contents{}, err
	}

	found, err := check(data)
	if err != nil {
		return contents{}, fmt.Errorf("%w (%w)", ErrCorrupt, err)
	}

	return found, nil
}

// lock waits for another process to release the file. bbolt locks the same open file again, which
// has no further effect.
func lock(file *os.File) error {
	for deadline := time.Now().Add(lockTimeout); ; time.Sleep(lockRetry) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock: %w", err)
		case time.Now().After(deadline):
			return ErrLocked
		}
	}
}

// Update applies change in one transaction. If it returns nil, all changes are on disk, and
// otherwise none.
func (f *File) Update(change func(*Tx) error) error {
	return f.db.Update(func(inner *bolt.Tx) error {
		tx := &Tx{tx: inner, sum: f.sum}
		if s, err := readSeal(inner); err == nil && s.transaction == uint64(inner.ID())-1 {
			tx.sum = s.sum
		}

		if err := change(tx); err != nil {
			return err
		}
		return seal{transaction: uint64(inner.ID()), sum: tx.sum}.write(inner)
	})
}

// Close closes and unlocks the file.
func (f *File) Close() error { return f.db.Close() }

// syncDirectory makes the name of a new file durable. Syncing the file alone does not.
func syncDirectory(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
