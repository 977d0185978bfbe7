// Package must ends a test where what it builds upon fails.
package must

import "testing"

// Succeed ends the test if there is an error.
func Succeed(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
