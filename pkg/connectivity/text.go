// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"fmt"
	"strings"
)

// counted returns "1 pod" or "3 pods".
func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// mostListed bounds the names in a sentence.
const mostListed = 4

// listed returns "node a", "nodes a, b" or "12 nodes".
func listed(noun string, names []string) string {
	switch {
	case len(names) > mostListed:
		return counted(len(names), noun)
	case len(names) == 1:
		return noun + " " + names[0]
	}
	return noun + "s " + strings.Join(names, ", ")
}
