// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"errors"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
)

// deadline is how long after its creation a Port that never was up is refused.
type deadline time.Duration

// apply adapts a refusal to the Port's age and state. A Port that never was up is refused as failed
// after the deadline. Other errors are returned unchanged.
func (d deadline) apply(port *v1alpha1.XPUPort, err error) error {
	refusal, isRefusal := errors.AsType[*reconciling.Refusal](err)
	if !isRefusal || !isAwaited(port) || v1alpha1.Refused(refusal.Reason) {
		return err
	}

	switch refusal.Reason { // no xPU has refused anything
	case v1alpha1.ReasonForbidden, v1alpha1.ReasonInvalidConfig, v1alpha1.ReasonNoFreeAddress,
		v1alpha1.ReasonQuotaExceeded, v1alpha1.ReasonBrokerAway:
		return err
	}

	if left := d.left(port); left > 0 {
		return reconciling.RetryAfter(err, optional.Min(refusal.Pause, left))
	}

	return reconciling.RetryAfter(d.late(refusal.Message), refusal.Pause)
}

// late is the refusal of a Port that was not up within the deadline.
func (d deadline) late(why string) error {
	return reconciling.Refuse(v1alpha1.ReasonFailed, "not up %s after its creation: %s",
		time.Duration(d), why)
}

// left returns the time until a Port that never was up is refused. It is 0 or less if the time has
// passed, if the Port was up, or if no pod waits for it.
func (d deadline) left(port *v1alpha1.XPUPort) time.Duration {
	if !isAwaited(port) {
		return 0
	}
	return time.Until(port.CreationTimestamp.Add(time.Duration(d)))
}

// isAwaited reports whether a pod waits for a Port that never was up.
func isAwaited(port *v1alpha1.XPUPort) bool {
	return port.Status.BridgePort == "" && !port.Spec.Ahead && port.Status.Predecessor == ""
}
