package nodeapi

import (
	"context"
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
)

// Wait returns the Port of a Function that is allocated to a claim, once the xPU serves it. When ctx ends before, the
// error says what is missing, in the words of whoever knows best: the Port, or the claim.
func (a *API) Wait(ctx context.Context, c *resourceapi.ResourceClaim, f inventory.ID) (*v1alpha1.XPUPort, error) {
	waiting, done := context.WithCancel(ctx)
	defer done()
	changes := a.changed.Subscribe(waiting)
	for {
		port, problem := a.port(ctx, c, f)
		if problem == nil {
			return port, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(problem, a.claimProblem(c))
		case <-changes:
		}
	}
}

func (a *API) port(ctx context.Context, c *resourceapi.ResourceClaim, f inventory.ID) (*v1alpha1.XPUPort, error) {
	name := claim.PortName(a.node, f)
	var port v1alpha1.XPUPort
	// The context of the caller may have ended; reads come from memory.
	err := a.cache.Get(context.WithoutCancel(ctx), types.NamespacedName{Namespace: c.Namespace, Name: name}, &port)
	if apierrors.IsNotFound(err) || err == nil && port.Spec.Claim.UID != c.UID {
		return nil, fmt.Errorf("the xPU is not provisioned: xpu-controller has not made XPUPort %s/%s for this claim yet", c.Namespace, name)
	}
	if err != nil {
		return nil, fmt.Errorf("XPUPort %s/%s: %w", c.Namespace, name, err)
	}
	ready := meta.FindStatusCondition(port.Status.Conditions, v1alpha1.ConditionReady)
	switch {
	case !port.DeletionTimestamp.IsZero():
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s/%s is being deleted", c.Namespace, name)
	case ready == nil:
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s/%s is waiting for xPU %s", c.Namespace, name, port.Spec.XPU)
	case !meta.IsStatusConditionTrue(port.Status.Conditions, v1alpha1.ConditionReady):
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s/%s: %s: %s", c.Namespace, name, ready.Reason, ready.Message)
	}
	return &port, nil
}

// claimProblem is what the controller wrote into the claim, if it could not make a Port.
func (a *API) claimProblem(c *resourceapi.ResourceClaim) error {
	for _, device := range c.Status.Devices {
		if device.Driver != v1alpha1.GroupName {
			continue
		}
		for _, conditionType := range []string{v1alpha1.ConditionProvisioned, v1alpha1.ConditionProvisionFailed} {
			condition := meta.FindStatusCondition(device.Conditions, conditionType)
			if condition != nil && condition.Reason != v1alpha1.ReasonUp && condition.Message != "" {
				return fmt.Errorf("%s: %s", condition.Reason, condition.Message)
			}
		}
	}
	return nil
}
