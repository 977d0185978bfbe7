package controller

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// problem is why something cannot go on, as it is told to people in conditions and events.
type problem struct {
	reason  string // one of the Reason constants of the API
	message string // one sentence: which object or field, and what would be right
}

func (p *problem) Error() string { return p.reason + ": " + p.message }

func problemf(reason, format string, args ...any) *problem {
	return &problem{reason: reason, message: fmt.Sprintf(format, args...)}
}

// refused tells whether a Port with this reason is refused for good.
func refused(reason string) bool {
	return reason == v1alpha1.ReasonConflict || reason == v1alpha1.ReasonFailed
}
