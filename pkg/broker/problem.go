// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// problem is the reason why an object is not copied, as the tenant reads it.
type problem struct {
	reason  string // one of the Reason constants of the API
	message string // one sentence: which object or field, and what would be right
}

func (p *problem) Error() string { return p.reason + ": " + p.message }

func problemf(reason, format string, args ...any) *problem {
	return &problem{reason: reason, message: cut(fmt.Sprintf(format, args...))}
}

func leavingProblem() *problem {
	return problemf(v1alpha1.ReasonLeaving, "the infra cluster does not serve this cluster any "+
		"more; delete it, or ask its administrator")
}
