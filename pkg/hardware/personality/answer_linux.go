// SPDX-License-Identifier: Apache-2.0

package personality

import (
	"errors"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// AnswerOf returns the answer for an error of the kernel: "ok" for nil, and "EIO" for an errno that
// is not among the answers.
func AnswerOf(err error) string {
	if err == nil {
		return OK
	}

	errno := syscall.Errno(0)
	if !errors.As(err, &errno) {
		return "EIO"
	}

	name := unix.ErrnoName(errno)
	switch errno {
	case unix.EOPNOTSUPP:
		name = "EOPNOTSUPP" // not ENOTSUP, which has the same number
	case 524:
		name = "ENOTSUPP" // of include/linux/errno.h, which user space has no name for
	}

	if !slices.Contains(words[Answer], name) {
		return "EIO"
	}

	return name
}
