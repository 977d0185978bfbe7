// SPDX-License-Identifier: Apache-2.0

// Package quirk names what single drivers do otherwise than the rest, and has what the code needs
// to know of it. The code does not ask which driver it meets where it can do without: what one
// driver needs is done for all, if it harms none.
package quirk

import "slices"

// Quirk is one thing that a driver does.
type Quirk struct {
	Driver       string // name of the kernel module
	Name         string // what the code's comments call it
	Does, Answer string // what the driver does, and what this project does about it
	Source       string // place in the kernel that shows it
	Row          string // row of docs/reference/hardware.md that counts on the answer
}

// All are the quirks of all drivers, sorted by driver.
func All() []Quirk {
	return slices.Concat(iavf, ice, igb, igbvf, mlx5, several, vfio, virtio)
}
