// SPDX-License-Identifier: Apache-2.0

// Package connerror has the texts of errors of connections that are the same at each attempt. They
// are for conditions, which are written when their texts change.
package connerror

import "regexp"

// What differs from one attempt to the next: this side's address, which has another port each time
// (net.OpError), and the time at which a certificate was not valid (x509.Certificate.Verify).
var (
	ownAddress = regexp.MustCompile(`\btcp \S+->`)
	timeOfDay  = regexp.MustCompile(`\bcurrent time \S+ is `)
)

// Text returns the text of an error without what differs from one attempt to the next.
func Text(text string) string {
	text = ownAddress.ReplaceAllString(text, "tcp ")
	return timeOfDay.ReplaceAllString(text, "the current time is ")
}
