// SPDX-License-Identifier: Apache-2.0

// Package quirk lists the behaviours by which some drivers differ from the others, and holds the
// constants that the code needs for them.
//
// The code avoids to ask which driver it deals with. Where one driver needs special care, the code
// takes this care for all drivers, if it does no harm.
package quirk

import "slices"

// Quirk describes one unusual behaviour of a driver.
type Quirk struct {
	Driver       string // name of the kernel module
	Name         string // name by which comments in the code refer to the quirk
	Does, Answer string // what the driver does, and what this project does about it
	Source       string // place in the kernel that shows the behaviour
	Row          string // row of docs/reference/hardware.md that depends on the answer
}

// All returns the quirks of all drivers, sorted by driver.
func All() []Quirk {
	return slices.Concat(iavf, ice, igb, igbvf, mlx5, several, vfio, virtio)
}
