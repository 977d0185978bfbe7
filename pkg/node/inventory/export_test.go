// SPDX-License-Identifier: Apache-2.0

package inventory

// Rescan makes a function that reads everything, as an event does.
func Rescan(root string) func() (int, error) {
	s := newScanner(Options{SysRoot: root})
	return func() (int, error) {
		functions, err := s.scan()
		return len(functions), err
	}
}
