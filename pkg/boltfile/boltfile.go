// SPDX-License-Identifier: Apache-2.0

// Package boltfile keeps the durable records of programs, each in one file of bbolt. bbolt trusts
// its file: a damaged page makes it panic, read beyond the end, allocate all memory, or go round in
// circles. Therefore the whole file is checked, by [check], before bbolt gets it; and each
// transaction writes a sum of all records, so that records which are whole as a page, and yet not
// the ones that were written, are found as well.
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
	lockTimeout = time.Second // for another process to give the file up
	lockRetry   = 50 * time.Millisecond
)

var (
	// ErrLocked is returned if another process has the file open.
	ErrLocked = errors.New("is in use by another process; does the program run twice?")
	// ErrCorrupt is returned for a file that is not what was written. What it knew is lost when it
	// is moved away.
	ErrCorrupt = errors.New("is corrupt")
)

// File is an open file. Its methods may be called by several goroutines at once.
type File struct {
	db *bolt.DB
	// sum is the sum of the records when the file was opened. It counts until the file has a seal,
	// which is missing in a new file and in one that a program without seals wrote.
	sum uint64
}

// Open opens a file, and makes it with its directory if it is missing. load reads what is in it, in
// a transaction that cannot write. The error may be [ErrLocked] or [ErrCorrupt], which load may
// return too, and does not contain the path. A program that knows no seals, which is one of before
// this package wrote them, can use the file as well.
func Open(path string, load func(*Tx) error) (*File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}

	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}

	found, err := take(file)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}

	// The list of free pages stays in the file, because bbolt would look for them by reading all
	// others.
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

// take locks a file, which lasts until it is closed, and checks what is in it.
func take(file *os.File) (contents, error) {
	if err := lock(file); err != nil {
		return contents{}, err
	}

	info, err := file.Stat()
	if err != nil || info.Size() == 0 { // bbolt makes a file of an empty one
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

// lock waits for another process to give the file up. bbolt locks the same open file once more,
// which is no second lock.
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

// Update writes what change does, in one transaction: all of it is on the disk when Update returns
// nil, and nothing of it otherwise.
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

// Close gives the file up.
func (f *File) Close() error { return f.db.Close() }

// syncDirectory makes the name of a new file durable, which syncing the file does not.
func syncDirectory(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
