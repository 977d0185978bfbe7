// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// withinDeadline adapts a *problem to the Port's age and state. A Port that was up stays up while
// its agent is away, because the XPU's status reports the agent. A Port that never was up is
// refused after ProvisionTimeout. Other errors are returned unchanged.
func (r *base) withinDeadline(port *v1alpha1.XPUPort, err error) error {
	p, isProblem := errors.AsType[*problem](err)
	everUp := port.Status.BridgePort != ""
	switch {
	case !isProblem:
		return err
	case p.reason == "" && p.message == "":
		return p // an event comes, and there is nothing to say until then
	case everUp && p.reason == v1alpha1.ReasonXPUUnavailable:
		return &problem{retry: p.retry}
	case everUp || v1alpha1.Refused(p.reason):
		return p
	case port.Spec.Ahead, port.Status.Predecessor != "": // nobody waits for it
		return p
	case p.reason == v1alpha1.ReasonForbidden, p.reason == v1alpha1.ReasonInvalidConfig,
		p.reason == v1alpha1.ReasonNoFreeAddress:
		return p // no xPU has refused anything
	}

	if left := r.left(port); left > 0 {
		p.retry = smaller(p.retry, left)
		return p
	}

	p.reason, p.message = v1alpha1.ReasonFailed, fmt.Sprintf("not up %s after its creation: %s",
		r.ProvisionTimeout, p.message)
	return p
}

// left returns the time until a Port that never was up is refused. It is 0 or less if the time has
// passed, if the Port was up, or if no pod waits for it.
func (r *base) left(port *v1alpha1.XPUPort) time.Duration {
	if port.Status.BridgePort != "" || port.Spec.Ahead || port.Status.Predecessor != "" {
		return 0
	}
	return time.Until(port.CreationTimestamp.Add(r.ProvisionTimeout))
}
