// SPDX-License-Identifier: Apache-2.0

// Package bind carries out a scheduling decision, like the scheduler's plugin dynamicresources: it
// allocates and reserves the claims, waits for the devices' binding conditions, and binds the pod
// to its node.
package bind

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	typedresourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"k8s.io/client-go/util/retry"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
)

// SchedulerName is the spec.schedulerName of the pods that may be bound. No other scheduler handles
// them.
const SchedulerName = "xpuctl"

// DefaultTimeout bounds the wait for binding conditions. It equals the default of kube-scheduler
// (bindingTimeout of the plugin's arguments).
const DefaultTimeout = 10 * time.Minute

// Binder binds pods.
type Binder struct {
	Pods typedcorev1.PodsGetter
	// Claims must use protobuf. JSON could write the opaque parameters of an allocation in another
	// form, which the API server rejects.
	Claims  typedresourcev1.ResourceClaimsGetter
	Timeout time.Duration
}

// Bind carries out the decision. If it fails, it releases the claims that it has reserved, unless the
// pod is bound all the same, or it is not known whether it is.
func (b Binder) Bind(ctx context.Context, d *schedule.Decision) (err error) {
	pod := d.Pod
	switch {
	case d.Node == "":
		return fmt.Errorf("pod %s/%s: no node takes it", pod.Namespace, pod.Name)
	case pod.Spec.SchedulerName != SchedulerName:
		return fmt.Errorf("pod %s/%s: spec.schedulerName: is %q, must be %s",
			pod.Namespace, pod.Name, pod.Spec.SchedulerName, SchedulerName)
	}

	for _, c := range d.Claims {
		if c.PodClaim == "" {
			return fmt.Errorf("pod %s/%s: asks for extended resources of DeviceClasses, for "+
				"which kube-scheduler alone makes claims: use "+
				"resourceClaims", pod.Namespace, pod.Name)
		}
		if c.Claim.UID == "" {
			return fmt.Errorf("pod %s/%s: the claim of template %s is not made yet; try again",
				pod.Namespace, pod.Name, c.Template)
		}
	}

	defer func() {
		if err != nil {
			err = fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
	}()

	var reserved []schedule.ClaimDecision
	for i := range d.Claims {
		wrote, err := b.reserve(ctx, pod, &d.Claims[i])
		if wrote {
			reserved = append(reserved, d.Claims[i])
		}
		if err != nil {
			return errors.Join(err, b.release(ctx, pod, reserved))
		}
	}

	if err := b.waitForConditions(ctx, d.Claims); err != nil {
		return errors.Join(err, b.release(ctx, pod, reserved))
	}

	binding := &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: d.Node},
	}
	err = b.Pods.Pods(pod.Namespace).Bind(ctx, binding, metav1.CreateOptions{})
	if err == nil {
		return nil
	}

	switch node, unknown := b.nodeOf(ctx, pod); {
	case unknown != nil:
		return errors.Join(err, fmt.Errorf("whether it is bound is not known, so its claims "+
			"stay: %w", unknown))
	case node == d.Node: // only the answer was lost
		return nil
	case node != "":
		return fmt.Errorf("is on node %s by now, so its claims stay: %w", node, err)
	}
	return errors.Join(err, b.release(ctx, pod, reserved))
}

// giveBackTime bounds what follows a failure, which has to be done after ctx has ended too.
const giveBackTime = 10 * time.Second

// nodeOf returns the node of a pod, or "" if the pod is gone or on none. It also works after ctx has
// ended.
func (b Binder) nodeOf(ctx context.Context, pod *corev1.Pod) (node string, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
	defer cancel()

	now, err := b.Pods.Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "", nil
	case err != nil:
		return "", err
	case now.UID != pod.UID:
		return "", nil
	}
	return now.Spec.NodeName, nil
}

// reserve allocates a claim, unless it is allocated already, and reserves it for the pod. wrote
// reports whether it did so, or may have. Otherwise what the claim has is from somebody else.
func (b Binder) reserve(
	ctx context.Context, pod *corev1.Pod, c *schedule.ClaimDecision,
) (wrote bool, err error) {
	api := b.Claims.ResourceClaims(pod.Namespace)
	err = retry.RetryOnConflict(retry.DefaultRetry, func() error {
		now, err := api.Get(ctx, c.Claim.Name, metav1.GetOptions{})
		switch {
		case err != nil:
			return err
		case now.UID != c.Claim.UID || now.DeletionTimestamp != nil:
			return errors.New("was deleted meanwhile")
		case c.New && now.Status.Allocation != nil:
			return errors.New("was allocated by somebody else meanwhile; try again")
		case !c.New && now.Status.Allocation == nil:
			return errors.New("lost its devices meanwhile; try again")
		case !c.New && resourceclaim.IsReservedForPod(pod, now, false):
			return nil
		}

		if c.New && !slices.Contains(now.Finalizers, resourceapi.Finalizer) {
			now.Finalizers = append(now.Finalizers, resourceapi.Finalizer)
			if now, err = api.Update(ctx, now, metav1.UpdateOptions{}); err != nil {
				return err
			}
		}

		if c.New {
			now.Status.Allocation = c.Claim.Status.Allocation.DeepCopy()
			now.Status.Allocation.AllocationTimestamp = ptr.To(metav1.Now())
		}

		if !resourceclaim.IsReservedForPod(pod, now, false) {
			now.Status.ReservedFor = append(now.Status.ReservedFor,
				resourceapi.ResourceClaimConsumerReference{
					Resource: "pods", Name: pod.Name, UID: pod.UID,
				})
		}

		_, err = api.UpdateStatus(ctx, now, metav1.UpdateOptions{})
		wrote = !apierrors.IsConflict(err)
		return err
	})

	if err != nil {
		return wrote, fmt.Errorf("claim %s: %w", c.Claim.Name, err)
	}

	return wrote, nil
}

// release removes the pod's reservations and the allocations made for it. It also works after ctx
// has ended.
func (b Binder) release(
	ctx context.Context, pod *corev1.Pod, claims []schedule.ClaimDecision,
) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
	defer cancel()

	var errs []error
	for _, c := range claims {
		api := b.Claims.ResourceClaims(pod.Namespace)
		err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
			now, err := api.Get(ctx, c.Claim.Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			if err != nil {
				return err
			}
			// another claim of this name, not reserved, or reserved for others only
			if now.UID != c.Claim.UID || !resourceclaim.IsReservedForPod(pod, now, false) {
				return nil
			}

			now.Status.ReservedFor = slices.DeleteFunc(now.Status.ReservedFor,
				func(r resourceapi.ResourceClaimConsumerReference) bool {
					return r.UID == pod.UID
				})

			if c.New && len(now.Status.ReservedFor) == 0 {
				now.Status.Allocation, now.Status.Devices = nil, nil
			}

			_, err = api.UpdateStatus(ctx, now, metav1.UpdateOptions{})
			return err
		})

		if err != nil {
			errs = append(errs, fmt.Errorf("claim %s is not given back: %w", c.Claim.Name, err))
		}
	}

	return errors.Join(errs...)
}

// waitForConditions returns nil once the binding conditions of all devices are true.
func (b Binder) waitForConditions(ctx context.Context, claims []schedule.ClaimDecision) error {
	ctx, cancel := context.WithTimeoutCause(ctx, b.Timeout, fmt.Errorf("not within %s", b.Timeout))
	defer cancel()

	for _, c := range claims {
		if !slices.ContainsFunc(c.Claim.Status.Allocation.Devices.Results,
			func(r resourceapi.DeviceRequestAllocationResult) bool {
				return len(r.BindingConditions) > 0
			}) {
			continue
		}
		if err := b.waitForClaim(ctx,
			types.NamespacedName{Namespace: c.Claim.Namespace, Name: c.Claim.Name}); err != nil {
			return fmt.Errorf("claim %s: binding conditions: %w", c.Claim.Name, err)
		}
	}

	return nil
}

func (b Binder) waitForClaim(ctx context.Context, key types.NamespacedName) error {
	only := fields.OneTermEqualSelector(metav1.ObjectNameField, key.Name).String()
	api := b.Claims.ResourceClaims(key.Namespace)
	source := &cache.ListWatch{
		ListWithContextFunc: func(
			ctx context.Context, options metav1.ListOptions,
		) (runtime.Object, error) {
			options.FieldSelector = only
			return api.List(ctx, options)
		},
		WatchFuncWithContext: func(
			ctx context.Context, options metav1.ListOptions,
		) (watch.Interface, error) {
			options.FieldSelector = only
			return api.Watch(ctx, options)
		},
	}

	waitsFor := errors.New("the claim is not there")
	_, err := watchtools.UntilWithSync(ctx, source, &resourceapi.ResourceClaim{},
		nil, func(e watch.Event) (bool, error) {
			if e.Type == watch.Deleted {
				return false, errors.New("the claim was deleted")
			}
			var failed error
			waitsFor, failed = conditionErrors(e.Object.(*resourceapi.ResourceClaim))
			return waitsFor == nil && failed == nil, failed
		})

	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), waitsFor)
	}

	return err
}

// conditionErrors returns which binding condition is not true yet, or which failure condition is
// true.
func conditionErrors(c *resourceapi.ResourceClaim) (waitsFor, failed error) {
	if c.Status.Allocation == nil {
		return nil, errors.New("the claim has lost its devices")
	}

	for _, result := range c.Status.Allocation.Devices.Results {
		var conditions []metav1.Condition
		for _, status := range c.Status.Devices {
			if status.Driver == result.Driver && status.Pool == result.Pool &&
				status.Device == result.Device &&
				ptr.Deref(status.ShareID, "") == string(ptr.Deref(result.ShareID, "")) {
				conditions = status.Conditions
			}
		}

		for _, name := range result.BindingFailureConditions {
			if condition := meta.FindStatusCondition(conditions, name); condition != nil &&
				condition.Status == metav1.ConditionTrue {
				return nil, fmt.Errorf("device %s: %s: %s: %s", result.Device, name,
					condition.Reason, condition.Message)
			}
		}

		for _, name := range result.BindingConditions {
			if !meta.IsStatusConditionTrue(conditions, name) {
				waitsFor = fmt.Errorf("device %s: %s is not true", result.Device, name)
			}
		}
	}

	return waitsFor, nil
}
