// SPDX-License-Identifier: Apache-2.0

// Package keep keeps files in directories that other programs may empty while pods run, such as those
// below /run.
package keep

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Copies keeps a copy of each file that is written once, because its directory may be emptied while
// pods need the file: by hand, or by a reboot. The copies are in a directory of their own that
// keeps its files. The methods are safe for concurrent use, also by two processes.
type Copies struct {
	dir, copies string

	// mutex is held while a file and its copy differ, so that Restore brings no file back that is
	// being removed.
	mutex sync.Mutex
}

// NewCopies returns the Copies in a directory of the files in dir. Both directories are made when a
// file is written.
func NewCopies(dir, copies string) *Copies {
	return &Copies{dir: filepath.Clean(dir), copies: copies}
}

// Adopt copies the files of the directory that match the pattern and have no copy yet, as those of
// an agent that kept no copies. It goes on after an error.
func (c *Copies) Adopt(pattern string) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	have, err := filepath.Glob(filepath.Join(c.dir, pattern))
	if err != nil {
		return fmt.Errorf("copies of the files in %s: %w", c.dir, err)
	}

	var errs []error
	for _, path := range have {
		if err := c.adopt(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("copy of file %s: %w", path, err))
		}
	}

	return errors.Join(errs...)
}

// adopt copies a file that has no copy.
func (c *Copies) adopt(path string) error {
	if has, err := c.Has(path); has || err != nil {
		return err
	}

	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return c.writeCopy(path, data, 0o644)
}

func (c *Copies) writeCopy(path string, data []byte, perm os.FileMode) error {
	if err := os.MkdirAll(c.copies, 0o750); err != nil {
		return err
	}
	return writeAtomically(c.copyOf(path), data, perm)
}

// copyOf returns the path of the copy of a file.
func (c *Copies) copyOf(path string) string { return filepath.Join(c.copies, filepath.Base(path)) }

// isOurs reports whether a path is a file in the directory of which copies are kept.
func (c *Copies) isOurs(path string) bool { return filepath.Dir(path) == c.dir }

// WriteFile replaces a file atomically and durably, as its library does. The copy is written first.
// Files in other directories get no copy.
func (c *Copies) WriteFile(path string, data []byte, perm os.FileMode) error {
	if !c.isOurs(path) {
		return writeAtomically(path, data, perm)
	}

	c.mutex.Lock()
	defer c.mutex.Unlock()

	if err := c.writeCopy(path, data, perm); err != nil {
		return err
	}
	return writeAtomically(path, data, perm)
}

// Has reports whether the file with this name has a copy. The error says why that is not known.
func (c *Copies) Has(name string) (bool, error) {
	_, err := os.Stat(c.copyOf(name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Changed returns when the file with this name or its copy was written, whichever was later. It
// returns the zero time if there is neither.
func (c *Copies) Changed(name string) (last time.Time) {
	for _, path := range []string{filepath.Join(c.dir, name), c.copyOf(name)} {
		if info, err := os.Stat(path); err == nil && info.ModTime().After(last) {
			last = info.ModTime()
		}
	}
	return last
}

// Remove deletes a file and its copy. It succeeds if one of them is missing.
func (c *Copies) Remove(path string) error {
	if !c.isOurs(path) {
		return os.Remove(path)
	}

	c.mutex.Lock()
	defer c.mutex.Unlock()

	err := os.Remove(c.copyOf(path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if missing := os.Remove(path); err != nil || !errors.Is(missing, fs.ErrNotExist) {
		return missing
	}
	return nil
}

// ForgetReplaced deletes the copy of the file with this name if the file is there with other content,
// because somebody else has written it. It succeeds if there is no copy.
func (c *Copies) ForgetReplaced(name string) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	path := filepath.Join(c.dir, name)
	copied, err := os.ReadFile(c.copyOf(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	now, unread := os.ReadFile(path)
	if err != nil || unread != nil || bytes.Equal(now, copied) {
		return err
	}

	return os.Remove(c.copyOf(path))
}

// Glob returns the files that match a pattern, as [filepath.Glob] does, and those that have only a
// copy.
func (c *Copies) Glob(pattern string) ([]string, error) {
	found, err := filepath.Glob(pattern)
	if err != nil || !c.isOurs(pattern) {
		return found, err
	}

	copies, err := filepath.Glob(c.copyOf(pattern))
	for _, path := range copies {
		found = append(found, filepath.Join(c.dir, filepath.Base(path)))
	}
	slices.Sort(found)

	return slices.Compact(found), err
}

// Unfinished returns the files that killed processes have left in both directories while they wrote
// files that match the pattern.
func (c *Copies) Unfinished(pattern string) ([]string, error) {
	files, err1 := filepath.Glob(filepath.Join(c.dir, "."+pattern+".*.tmp"))
	copies, err2 := filepath.Glob(filepath.Join(c.copies, "."+pattern+".*.tmp"))
	return append(files, copies...), errors.Join(err1, err2)
}

// Restore writes the files again that are missing in their directory, and returns their names.
func (c *Copies) Restore() (restored []string, err error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	copies, err := os.ReadDir(c.copies)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("copies of the files in %s: %w", c.dir, err)
	}

	var errs []error
	for _, entry := range copies {
		path := filepath.Join(c.dir, entry.Name())
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) || isUnfinished(entry.Name()) {
			continue
		}

		data, err := os.ReadFile(filepath.Join(c.copies, entry.Name()))
		if errors.Is(err, fs.ErrNotExist) { // another process has removed both
			continue
		}
		if err == nil {
			err = errors.Join(os.MkdirAll(c.dir, 0o755), writeAtomically(path, data, 0o644))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("restore file %s: %w", path, err))
			continue
		}
		restored = append(restored, entry.Name())
	}

	return restored, errors.Join(errs...)
}

// isUnfinished reports whether a file is one of writeAtomically that was not finished.
func isUnfinished(name string) bool { return name[0] == '.' }

// writeAtomically replaces a file, so that it is complete after a crash. Its temporary file is named
// "." + name + ".*.tmp", as the library names such files, because the library removes what a killed
// process has left.
func writeAtomically(path string, data []byte, perm os.FileMode) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()

	_, err = file.Write(data)
	if err = errors.Join(err, file.Chmod(perm), file.Sync(), file.Close()); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), path); err != nil {
		return err
	}

	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
