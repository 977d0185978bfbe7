// SPDX-License-Identifier: Apache-2.0

package inventory

// Rescan returns a function that scans everything, as after an event.
func Rescan(root string) func() (int, error) {
	s := newScanner(Options{SysRoot: root})
	return func() (int, error) {
		functions, err := s.scan()
		return len(functions), err
	}
}
