// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Verification is a comparison of the inventory with sriovnet, a library that reads the same kernel
// by other code. Each property of each Function counts once: as Same, Different or Unknown.
type Verification struct {
	Time time.Time `json:"time"` // when the comparison began
	// Skipped is why there is no result: nothing could be compared, or the comparison did not end
	// and found no difference until then. It is empty if there is a result.
	Skipped string `json:"skipped,omitempty"`
	// Same, Different and Unknown are numbers of properties. A property is unknown if the inventory
	// or sriovnet cannot say what it is.
	Same      int `json:"same"`
	Different int `json:"different"`
	Unknown   int `json:"unknown"`
	// Differences are the first differences, at most [MaxDifferences].
	Differences []Difference `json:"differences,omitempty"`
	// Unknowns has an entry for each property that is unknown of some Functions, sorted by name.
	Unknowns []Unverified `json:"unknowns,omitempty"`
}

// MaxDifferences is how many differences a [Verification] lists.
const MaxDifferences = 32

// Difference is a property of a Function that sriovnet reads otherwise than the inventory.
type Difference struct {
	Function  function.ID `json:"function"`
	Property  string      `json:"property"`
	Inventory string      `json:"inventory"` // what the inventory says
	Sriovnet  string      `json:"sriovnet"`  // what sriovnet says
	// Look is a shell command that shows on the node what the kernel itself says.
	Look string `json:"look"`
}

// Unverified is a property that is unknown of some Functions.
type Unverified struct {
	Property  string      `json:"property"`
	Functions int         `json:"functions"` // how many Functions the property is unknown of
	First     function.ID `json:"first"`
	Reason    string      `json:"reason"` // for the first Function
}
