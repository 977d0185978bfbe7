package quirk

import (
	"errors"

	"golang.org/x/sys/unix"
)

// NotSupported says whether the kernel or a driver has no such thing. See "ENOTSUPP".
func NotSupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.Errno(524))
}

var several = []Quirk{{
	Driver: "several", Name: "ENOTSUPP",
	Does:   "return ENOTSUPP (524), which is not meant for programs and has no text, in place of EOPNOTSUPP",
	Answer: "both mean the same",
	Source: "include/linux/errno.h",
	Row:    "VFs made by `spec.numVFs`; EBUSY and ERANGE become a condition",
}}
