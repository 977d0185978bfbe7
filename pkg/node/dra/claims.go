// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"slices"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// API reads claims and pods from the API server. It implements [lifecycle.Claims].
type API struct {
	Client kubernetes.Interface
}

// Consumers returns the UIDs of the pods that the claim is reserved for. A PodGroup that it is
// reserved for counts as a pod that is not on this node. isAllocated is false if the claim was
// deleted, or if the device is not allocated to it any more.
func (a API) Consumers(
	ctx context.Context, known journal.Claim,
) (pods []types.UID, isAllocated bool, err error) {
	object, err := a.Client.ResourceV1().ResourceClaims(known.Namespace).Get(ctx, known.Name,
		metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, false, nil
	case err != nil:
		return nil, false, fmt.Errorf("read claim %s/%s: %w", known.Namespace, known.Name, err)
	case object.UID != known.UID || !allocated(&object.Status, known):
		return nil, false, nil
	}

	for _, consumer := range object.Status.ReservedFor {
		pods = append(pods, consumer.UID)
	}

	return pods, true, nil
}

// Terminating reports whether the pod is being deleted or was deleted.
func (a API) Terminating(ctx context.Context, pod journal.Pod) (bool, error) {
	object, err := a.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("read pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return object.UID != pod.UID || object.DeletionTimestamp != nil, nil
}

// fieldManager is the agent's name in the managedFields of ResourceClaim.status.devices.
const fieldManager = "xpu-agent"

// StatusReporter writes the state of claims' devices, as the journal has it, into
// ResourceClaim.status.devices (KEP-4817). No pod waits for it. A write that fails is retried.
type StatusReporter struct {
	claims  resourceclient.ResourceClaimsGetter
	journal *journal.Journal
	metrics *Metrics
	log     logr.Logger
	queue   workqueue.TypedRateLimitingInterface[journal.Claim]
}

// NewStatusReporter returns a reporter, which writes nothing before [StatusReporter.Run].
func NewStatusReporter(
	claims resourceclient.ResourceClaimsGetter, j *journal.Journal, metrics *Metrics,
	log logr.Logger,
) *StatusReporter {
	return &StatusReporter{
		claims: claims, journal: j, metrics: metrics, log: log,
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.DefaultTypedControllerRateLimiter[journal.Claim](),
		),
	}
}

// Report queues a write of the claim's status. It does not block, and does nothing for a Function
// without a claim.
func (r *StatusReporter) Report(c journal.Claim) {
	if c.UID != "" {
		r.queue.Add(journal.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID})
	}
}

// Run writes queued statuses until ctx ends.
func (r *StatusReporter) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, r.queue.ShutDown)()
	for {
		c, shutdown := r.queue.Get()
		if shutdown {
			return nil
		}

		if err := r.write(ctx, c); err != nil && ctx.Err() == nil {
			r.metrics.statusWrites.WithLabelValues("error").Inc()
			r.log.Error(err, "Status of claim is written later", "claim",
				klog.KRef(c.Namespace, c.Name))
			r.queue.AddRateLimited(c)
		} else {
			r.queue.Forget(c)
		}

		r.queue.Done(c)
	}
}

// write brings the claim's status up to date. It uses Update, because a server-side apply changes
// the order of keys in the opaque parameters of the allocation, and the API server refuses that as
// a change of the allocation.
func (r *StatusReporter) write(ctx context.Context, c journal.Claim) error {
	claims := r.claims.ResourceClaims(c.Namespace)
	object, err := claims.Get(ctx, c.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && object.UID != c.UID {
		// the claim was deleted, and perhaps replaced by another claim of the same name
		return nil
	}
	if err != nil {
		return fmt.Errorf("read claim %s/%s: %w", c.Namespace, c.Name, err)
	}

	before := object.Status.DeepCopy()
	for _, a := range r.journal.ByClaim(c.UID) {
		if a.State != journal.Attached && a.State != journal.Lost && a.Claim.Share == "" {
			continue
		}
		if err := setDeviceStatus(&object.Status, a); err != nil {
			return fmt.Errorf("status of claim %s/%s: Function %s: %w", c.Namespace, c.Name,
				a.Function, err)
		}
	}

	if equality.Semantic.DeepEqual(before, &object.Status) {
		return nil
	}

	_, err = claims.UpdateStatus(ctx, object, metav1.UpdateOptions{FieldManager: fieldManager})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write status of claim %s/%s: %w", c.Namespace, c.Name, err)
	}

	r.metrics.statusWrites.WithLabelValues("success").Inc()
	return nil
}

// setDeviceStatus sets the status of a device that is still allocated to the claim. An attached
// device gets the Ready condition and network data. A share gets the name of the Function that was
// chosen for it, so that the controller can make its Port.
func setDeviceStatus(status *resourceapi.ResourceClaimStatus, a journal.Attachment) error {
	if !allocated(status, a.Claim) {
		return nil
	}

	i := slices.IndexFunc(status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		return claim.IsOf(&d, a.Claim.Pool, a.Claim.Device, a.Claim.Share)
	})
	if i < 0 {
		i = len(status.Devices)
		status.Devices = append(status.Devices,
			claim.NewEntry(a.Claim.Pool, a.Claim.Device, a.Claim.Share))
	}

	entry := &status.Devices[i]
	if a.Claim.Share != "" {
		data, err := claim.Choice{Function: a.Function}.Data()
		if err != nil {
			return err
		}
		entry.Data = data
	}

	if a.State == journal.Attached || a.State == journal.Lost {
		entry.NetworkData = networkData(a)
		meta.SetStatusCondition(&entry.Conditions, ready(a))
	}

	return nil
}

// ready returns the Ready condition of a device that is attached, or that the pod has lost.
func ready(a journal.Attachment) metav1.Condition {
	if a.State == journal.Attached {
		name := a.Interface.Name
		if bond := a.Interface.Bond; bond != nil {
			name += ", a port of " + bond.Name + ","
		}
		return metav1.Condition{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue,
			Reason:             v1alpha1.ReasonAttached,
			Message:            fmt.Sprintf("Function %s is %s in pod %s", a.Function, name, a.Pod.Name),
			LastTransitionTime: metav1.NewTime(a.AttachedAt),
		}
	}

	message := "pod %s lost Function %s with its device; it gets it back when the device is " +
		"there again"
	if a.Interface.Userspace {
		message = "pod %s lost Function %s with its device, and its program cannot get it back: " +
			"delete the pod"
	}

	return metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonLost,
		Message:            fmt.Sprintf(message, a.Pod.Name, a.Function),
		LastTransitionTime: metav1.NewTime(a.LostAt),
	}
}

func allocated(status *resourceapi.ResourceClaimStatus, c journal.Claim) bool {
	if status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(status.Allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool {
			return r.Driver == v1alpha1.GroupName && r.Pool == c.Pool && r.Device == c.Device &&
				ptr.Deref(r.ShareID, "") == c.Share
		})
}
