// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"cmp"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Older reports whether a was created before b. If both were created in the same second, the object
// whose name sorts first counts as older.
func Older(a, b client.Object) bool {
	made, other := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	if !made.Equal(&other) {
		return made.Before(&other)
	}
	return cmp.Less(client.ObjectKeyFromObject(a).String(), client.ObjectKeyFromObject(b).String())
}

// OneLine makes a joined error fit a condition's message.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
