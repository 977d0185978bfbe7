package dra

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metaac "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceac "k8s.io/client-go/applyconfigurations/resource/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
)

// fieldManager owns the agent's part of ResourceClaim.status.devices: the Ready condition and the network data. The
// controller's conditions in the same entries stay its own.
const fieldManager = "xpu-agent"

// StatusReporter writes what became of claims' devices into ResourceClaim.status.devices (KEP-4817). It works from
// the journal and off the pod's way to running: what cannot be written now is written later.
type StatusReporter struct {
	claims  resourceclient.ResourceClaimsGetter
	journal Journal
	metrics *Metrics
	log     logr.Logger
	queue   workqueue.TypedRateLimitingInterface[journal.Claim]
}

// NewStatusReporter makes a reporter; [StatusReporter.Run] makes it work.
func NewStatusReporter(claims resourceclient.ResourceClaimsGetter, j Journal, metrics *Metrics, log logr.Logger) *StatusReporter {
	return &StatusReporter{
		claims: claims, journal: j, metrics: metrics, log: log,
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[journal.Claim]()),
	}
}

// Report asks for the claim's status to be written. It does not block.
func (r *StatusReporter) Report(c journal.Claim) {
	r.queue.Add(journal.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID})
}

// Run writes until ctx ends.
func (r *StatusReporter) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, r.queue.ShutDown)
	defer stop()
	for {
		c, shutdown := r.queue.Get()
		if shutdown {
			return nil
		}
		if err := r.write(ctx, c); err != nil {
			r.metrics.statusWrites.WithLabelValues("error").Inc()
			r.log.Error(err, "Status of claim is written later", "claim", klog.KRef(c.Namespace, c.Name))
			r.queue.AddRateLimited(c)
		} else {
			r.queue.Forget(c)
		}
		r.queue.Done(c)
	}
}

func (r *StatusReporter) write(ctx context.Context, c journal.Claim) error {
	status := resourceac.ResourceClaimStatus()
	for _, a := range r.journal.ByClaim(c.UID) {
		if a.State == journal.Attached {
			status.WithDevices(deviceStatus(a))
		}
	}
	if len(status.Devices) == 0 {
		return nil
	}
	// With the UID, a claim of the same name that came later is a conflict and not taken for this one.
	apply := resourceac.ResourceClaim(c.Name, c.Namespace).WithUID(c.UID).WithStatus(status)
	_, err := r.claims.ResourceClaims(c.Namespace).ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	switch {
	case err == nil:
		r.metrics.statusWrites.WithLabelValues("success").Inc()
		return nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err), apierrors.IsInvalid(err):
		// The claim is gone, or no longer has these devices.
		r.metrics.statusWrites.WithLabelValues("gone").Inc()
		r.log.V(1).Info("Claim changed before its status was written", "claim", klog.KRef(c.Namespace, c.Name), "reason", err.Error())
		return nil
	}
	return fmt.Errorf("write status of claim %s/%s: %w", c.Namespace, c.Name, err)
}

func deviceStatus(a journal.Attachment) *resourceac.AllocatedDeviceStatusApplyConfiguration {
	data := networkData(a)
	ready := metaac.Condition().
		WithType(v1alpha1.ConditionReady).
		WithStatus(metav1.ConditionTrue).
		WithReason(v1alpha1.ReasonAttached).
		WithMessage(fmt.Sprintf("Function %s is %s in pod %s", a.Function, a.Interface.Name, a.Pod.Name)).
		WithLastTransitionTime(metav1.NewTime(a.AttachedAt))
	return resourceac.AllocatedDeviceStatus().
		WithDriver(v1alpha1.GroupName).
		WithPool(a.Claim.Pool).
		WithDevice(a.Claim.Device).
		WithConditions(ready).
		WithNetworkData(resourceac.NetworkDeviceData().
			WithInterfaceName(data.InterfaceName).
			WithHardwareAddress(data.HardwareAddress).
			WithIPs(data.IPs...))
}
