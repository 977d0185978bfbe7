// SPDX-License-Identifier: Apache-2.0

package sysfs

import (
	"errors"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Attributes returns the texts of several files below the directory, each as [Dir.Attribute]
// returns it, and the errors of files that cannot be read. For many files it is several times as
// fast as [Dir.Attribute], because it opens the directory only once.
func (d Dir) Attributes(names ...string) (texts map[string]string, failed map[string]error) {
	texts, failed = make(map[string]string, len(names)), map[string]error{}
	if len(names) == 0 {
		return texts, failed
	}

	dir, err := unix.Open(string(d), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		for _, name := range names {
			failed[name] = err
		}
		return texts, failed
	}

	defer unix.Close(dir)

	var buf [maxAttribute + 1]byte
	for _, name := range names {
		text, err := attributeAt(dir, name, buf[:])
		if err != nil {
			failed[name] = err
			continue
		}
		texts[name] = text
	}

	return texts, failed
}

// attributeAt reads a file of the open directory dir. It uses buf for the text.
func attributeAt(dir int, name string, buf []byte) (string, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)

	n, err := unix.Read(fd, buf)
	switch {
	case err != nil:
		return "", err
	case n > maxAttribute || !utf8.Valid(buf[:n]):
		return "", errors.New("is not an attribute")
	}

	return strings.Trim(string(buf[:n]), " \t\r\n\x00"), nil
}
