package kubeapi

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
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// Wait returns the Port of a Function that is allocated to a claim, once the xPU serves it. When ctx ends before, the
// error says what is missing, in the words of whoever knows best: the Port, or the claim.
func (a *API) Wait(ctx context.Context, c *resourceapi.ResourceClaim, f function.ID) (*v1alpha1.XPUPort, error) {
	var port *v1alpha1.XPUPort
	err := a.await(ctx, func() (err error) {
		port, err = a.port(ctx, c.Namespace, c.UID, f)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, a.claimProblem(c))
	}
	return port, nil
}

// Serves returns nil once the xPU serves the Port of a Function that a claim has, and at once where the claim has no Port.
// When ctx ends before, the error says what is missing.
func (a *API) Serves(ctx context.Context, namespace string, claim types.UID, f function.ID) error {
	return a.await(ctx, func() error {
		_, err := a.port(ctx, namespace, claim, f)
		if _, none := errors.AsType[noPortError](err); none {
			return nil
		}
		return err
	})
}

// await returns when nothing is wrong any more, or says what still is when ctx ends.
func (a *API) await(ctx context.Context, problem func() error) error {
	var err error
	_ = loop.Until(ctx, a.changed.Subscribe, func() bool { err = problem(); return err == nil })
	return err
}

// noPortError says that the controller made no Port for a claim, or not yet.
type noPortError struct{ port types.NamespacedName }

func (e noPortError) Error() string {
	return fmt.Sprintf("the xPU is not provisioned: xpu-controller has not made XPUPort %s for this claim yet", e.port)
}

func (a *API) port(ctx context.Context, namespace string, uid types.UID, f function.ID) (*v1alpha1.XPUPort, error) {
	name := types.NamespacedName{Namespace: namespace, Name: claim.PortName(a.node, f)}
	var port v1alpha1.XPUPort
	// The context of the caller may have ended; reads come from memory.
	err := a.cache.Get(context.WithoutCancel(ctx), name, &port)
	if apierrors.IsNotFound(err) || err == nil && port.Spec.Claim.UID != uid {
		return nil, noPortError{name}
	}
	if err != nil {
		return nil, fmt.Errorf("XPUPort %s: %w", name, err)
	}
	ready := meta.FindStatusCondition(port.Status.Conditions, v1alpha1.ConditionReady)
	switch {
	case !port.DeletionTimestamp.IsZero():
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s is being deleted", name)
	case ready == nil:
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s is waiting for xPU %s", name, port.Spec.XPU)
	case !meta.IsStatusConditionTrue(port.Status.Conditions, v1alpha1.ConditionReady):
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s: %s: %s", name, ready.Reason, ready.Message)
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
