// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"errors"
	"fmt"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Refusal is an error that users see in conditions and events: why an object cannot have what it
// asks for now. See [Refuse].
type Refusal struct {
	Reason  string        // one of the Reason constants of the API
	Message string        // one sentence: which object or field, and what would be right
	Pause   time.Duration // before the next attempt; 0 means that an event will come
}

func (r *Refusal) Error() string { return r.Reason + ": " + r.Message }

// Refuse returns a refusal. Its pause depends on the reason.
func Refuse(reason, format string, args ...any) error {
	return &Refusal{
		Reason: reason, Message: fmt.Sprintf(format, args...), Pause: pauses[reason],
	}
}

// RetryAfter changes the pause of a refusal. It is for places where the usual event does not come.
// Other errors are returned unchanged.
func RetryAfter(err error, pause time.Duration) error {
	refusal, isRefusal := errors.AsType[*Refusal](err)
	if !isRefusal {
		return err
	}
	return &Refusal{Reason: refusal.Reason, Message: refusal.Message, Pause: pause}
}

// pauses has the usual pause before the next attempt for each reason, and which event ends the
// pause if it is 0.
var pauses = map[string]time.Duration{
	v1alpha1.ReasonAbandoned:        0, // the XPU's spec changes
	v1alpha1.ReasonBrokerAway:       0, // the broker's Lease changes
	v1alpha1.ReasonFailed:           0, // the spec changes; a call that failed has its own pause
	v1alpha1.ReasonFunctionBusy:     0, // the other Port of the Function is gone
	v1alpha1.ReasonInUse:            0, // the last XPUPort is gone
	v1alpha1.ReasonInvalidConfig:    0, // the spec of the object or of its network changes
	v1alpha1.ReasonInvalidTLSSecret: 0, // the Secret changes
	v1alpha1.ReasonNetworkNotFound:  0, // the network is created
	v1alpha1.ReasonNoFreeAddress:    0, // another Port of the network is gone
	v1alpha1.ReasonNoGateways:       0, // the XPU or the network changes
	v1alpha1.ReasonNoXPU:            0, // the XPU is created or changes
	v1alpha1.ReasonNoTrunks:         0, // the XPU changes; a call that failed has its own pause
	v1alpha1.ReasonProvisioning:     0, // a call to the agent has its own pause
	v1alpha1.ReasonQuotaExceeded:    0, // the quota changes, or a Port of the namespace is gone
	v1alpha1.ReasonReleasing:        0, // the session with the agent, or the bridge, changes
	v1alpha1.ReasonUnknown:          0, // a call to the agent has its own pause
	v1alpha1.ReasonXPUUnavailable:   0, // the session with the agent changes

	// The other object may change without an event for this one.
	v1alpha1.ReasonConflict: LastRetry,
	// No event comes when the labels of the pod's namespace or a quota change.
	v1alpha1.ReasonForbidden: LastRetry,
	// No event comes when another network gives its VLAN or VNI back.
	v1alpha1.ReasonNetworkNotReady: LastRetry,
	// An event comes when the predecessor is gone, but not when its addresses change.
	v1alpha1.ReasonStandby: LastRetry,
}
