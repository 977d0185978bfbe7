// SPDX-License-Identifier: Apache-2.0

package process

import (
	"bytes"
	"errors"
	"io"
	"os"
)

// Tail returns the last lines of a file, up to that number and from its last 64 KiB. A missing file
// has no lines.
func Tail(path string, lines int) (string, error) {
	const window = 64 << 10
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer f.Close()

	info, err := f.Stat()
	if err != nil {
		return "", err
	}

	content, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-window), window))
	if err != nil {
		return "", err
	}

	all := bytes.Split(bytes.TrimRight(content, "\n"), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n"))), nil
}

// OpenLog opens a log file for appending.
func OpenLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
}
