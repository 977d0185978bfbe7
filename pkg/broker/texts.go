// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"strings"
	"unicode"
)

// maxText is how many bytes are kept of a text from a tenant's cluster, such as an error message. A
// condition holds at most 32 kB, and a status with a longer one cannot be written at all.
const maxText = 1024

// cut shortens a text from a tenant's cluster for conditions, events and logs: one line of
// printable characters, at most maxText bytes.
func cut(text string) string { return cutTo(text, maxText) }

// cutName shortens a name or value from a tenant's cluster for use in a sentence.
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

// briefError is an error from a tenant's cluster whose text is shortened.
type briefError struct{ error }

func (e briefError) Error() string { return cut(e.error.Error()) }

func (e briefError) Unwrap() error { return e.error }

// brief limits the text of an error to maxText bytes. The result still wraps err.
func brief(err error) error {
	if err == nil || cut(err.Error()) == err.Error() {
		return err
	}
	return briefError{err}
}
