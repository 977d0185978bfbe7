// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"strings"
	"unicode"
)

// maxText is how many bytes of a text of a tenant's cluster are kept: its errors, and what it calls
// things. A condition may have 32 kB, and a status with a longer one cannot be written at all.
const maxText = 1024

// cut is a text of a tenant's cluster as conditions, events and logs have it: one line, of maxText
// bytes at most, all of it printable.
func cut(text string) string { return cutTo(text, maxText) }

// cutName is a name or value of a tenant's cluster as a sentence has it.
func cutName(text string) string { return cutTo(text, 128) }

func cutTo(text string, most int) string {
	const end = "... (cut)"
	long := len(text) > most
	if long {
		text = text[:most]
	}

	text = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case r == unicode.ReplacementChar || !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, text)

	if long {
		text = strings.TrimRight(strings.ToValidUTF8(text[:min(len(text), most-len(end))], ""),
			" ") + end
	}

	return text
}

// briefError is an error of a tenant's cluster whose text is cut.
type briefError struct{ error }

func (e briefError) Error() string { return cut(e.error.Error()) }

func (e briefError) Unwrap() error { return e.error }

// brief has an error say no more than maxText bytes. It is still what it was.
func brief(err error) error {
	if err == nil || cut(err.Error()) == err.Error() {
		return err
	}
	return briefError{err}
}
