// SPDX-License-Identifier: Apache-2.0

// Package dra offers the node's Functions through Dynamic Resource Allocation. It publishes the
// Functions in ResourceSlices, prepares the claims to which the scheduler allocated them, and
// reports the health of devices and the status of claims.
package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/attribute"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Lifecycle decides who owns a Function. The Manager of package lifecycle implements it.
type Lifecycle interface {
	Admit(ctx context.Context, want journal.Attachment) (have journal.Attachment, err error)
	Reserve(ctx context.Context, want journal.Attachment) error
	Unprepare(ctx context.Context, claim types.UID) error
}

const (
	// runtimeTimeout is how long one Prepare waits for a container runtime that is restarting.
	runtimeTimeout = 5 * time.Second
	// podInterval is how often a Prepare asks whether its pod is being deleted, because the kubelet
	// waits for the Prepare then.
	podInterval = time.Second
	// healthRefresh is the longest pause between two health reports. The kubelet considers the
	// health of a device unknown after healthTimeout.
	healthRefresh, healthTimeout = 10 * time.Second, 30 * time.Second
)

// Driver prepares claims. It implements [kubeletplugin.DRAPlugin].
type Driver struct {
	Journal   *journal.Journal
	Lifecycle Lifecycle
	// Function returns the current state of a Function of this node.
	Function func(function.ID) (f function.Function, exists bool)
	// DevicePool returns the spec of a DevicePool that selects this node.
	DevicePool func(name string) (spec v1alpha1.DevicePoolSpec, exists bool)
	// WaitForPort returns the Port of a Function that is allocated to a claim, once the xPU serves
	// it. If ctx ends first, the error says what is missing.
	WaitForPort func(
		ctx context.Context, c *resourceapi.ResourceClaim, f function.ID,
	) (*v1alpha1.XPUPort, error)
	// RuntimeConnected returns nil once the container runtime is connected and reports sandboxes.
	// If ctx ends first, the error says what to do.
	RuntimeConnected func(ctx context.Context) error
	// Report queues a write of the claim's status. It is called when a Function was chosen for the
	// claim.
	Report func(journal.Claim)
	// PodTerminating reports whether a pod is being deleted, or was deleted; see [API.Terminating].
	PodTerminating func(ctx context.Context, pod journal.Pod) (bool, error)
	CDI            *CDIFiles
	// Node is the node's name. Pools returns all of its pools, and Health checks their Functions.
	Node   string
	Pools  func() (pools []pool.Pool, known bool)
	Health *health.Checker
	// Changes returns a channel that receives a value when the health of a Function may have
	// changed, until ctx ends.
	Changes func(ctx context.Context) <-chan struct{}
	// ProvisionTimeout is how long one Prepare waits for the xPU and for the hooks of the
	// Functions' last owners. The kubelet ends a call after 45 s (pkg/kubelet/cm/dra).
	ProvisionTimeout time.Duration
	Metrics          *Metrics
	// Tracer records Prepares. It may be nil.
	Tracer *tracing.Tracer
	Log    logr.Logger

	// calls lets only one Prepare or Unprepare run at a time for each claim. A later call ends an
	// earlier Prepare, because the kubelet has given up on it.
	calls keylock.Locks[types.UID]
}

// Reasons for which a Prepare is ended.
var (
	errUnprepared    = errors.New("the claim is unprepared meanwhile")
	errPreparedAgain = errors.New("the claim is prepared again meanwhile")
)

// PrepareResourceClaims waits until the xPU serves the Ports of each claim, and then reserves the
// claim's Functions, which sets them up for the pod. The interfaces are attached later, when the
// runtime makes the pod's sandbox.
func (d *Driver) PrepareResourceClaims(
	ctx context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	var mutex sync.Mutex
	var group sync.WaitGroup
	for _, c := range claims {
		group.Go(func() {
			begin := time.Now()
			ctx, end := d.Tracer.Stage(ctx, c.UID, "prepare claim",
				attribute.String("k8s.namespace.name", c.Namespace),
				attribute.String("k8s.node.name", d.Node), attribute.String("xpu.claim", c.Name))
			devices, err := d.prepare(ctx, c, claims)
			end(err)
			d.Metrics.prepare.observe(begin, err)
			log := d.Log.WithValues("claim", klog.KRef(c.Namespace, c.Name))
			if err != nil {
				log.Error(err, "Claim cannot be prepared")
			} else {
				log.V(1).Info("Claim prepared", "devices", len(devices))
			}

			mutex.Lock()
			defer mutex.Unlock()

			results[c.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
		})
	}

	group.Wait()
	return results, nil
}

// prepare prepares one claim. together has all claims that the kubelet passed in the same call.
func (d *Driver) prepare(
	ctx context.Context, c *resourceapi.ResourceClaim, together []*resourceapi.ResourceClaim,
) ([]kubeletplugin.Device, error) {
	devices, err := claim.Devices(c)
	if err != nil {
		return nil, err
	}

	ctx, end, err := d.calls.TakeOver(ctx, c.UID, errPreparedAgain)
	if err != nil {
		return nil, fmt.Errorf("claim %s/%s: wait for the claim's last call: %w", c.Namespace,
			c.Name, err)
	}
	defer end()

	prepared, devices, err := d.prepareAdminAccess(c, devices)
	if err != nil || len(devices) == 0 {
		return prepared, err
	}

	pod, err := consumer(c)
	if err != nil {
		return nil, err
	}

	ctx, stop := d.untilPodTerminates(ctx, pod)
	defer stop()

	forRuntime, cancel := context.WithTimeout(ctx, runtimeTimeout)
	defer cancel()

	if err := d.RuntimeConnected(forRuntime); err != nil {
		return nil, fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	if err := d.choose(ctx, c, pod, devices); err != nil {
		return nil, fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, loop.WithCause(ctx, err))
	}

	names := chooseNames(pod, together, d.Journal.ByPod(pod.UID))
	waiting, cancel := context.WithTimeout(ctx, d.ProvisionTimeout)
	defer cancel()

	for _, device := range devices {
		attachment, err := d.attachmentFor(waiting, c, pod, device, names[keyOf(c.UID, device)])
		if err == nil {
			err = d.Lifecycle.Reserve(ctx, attachment)
		}

		if err == nil {
			// Prepare fails if containers would not get their device nodes.
			_, err = d.CDI.deviceNodes(attachment)
		}
		if err != nil {
			return nil, fmt.Errorf("claim %s/%s, request %s, Function %s: %w",
				c.Namespace, c.Name, device.Request, device.Function, loop.WithCause(ctx, err))
		}

		ready := kubeletplugin.Device{
			Requests:   []string{device.Request},
			PoolName:   device.Pool,
			DeviceName: device.Name,
			CDIDeviceIDs: []string{claim.CDIKind + "=" +
				claim.CDIDeviceName(c.UID, device.Function.DeviceName())},
			Metadata: metadata(attachment),
		}

		if device.Share != "" {
			ready.ShareID = &device.Share
		}

		prepared = append(prepared, ready)
	}

	return prepared, nil
}

// untilPodTerminates returns a context that ends when the pod is being deleted. stop must be
// called.
func (d *Driver) untilPodTerminates(
	ctx context.Context, pod journal.Pod,
) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		for loop.Sleep(ctx, podInterval) {
			// An API server that does not answer says nothing about the pod.
			if terminating, err := d.PodTerminating(ctx, pod); err == nil && terminating {
				cancel(fmt.Errorf("pod %s/%s is being deleted", pod.Namespace, pod.Name))
			}
		}
	})

	return ctx, func() {
		cancel(nil)
		watching.Wait()
	}
}

// consumer returns the pod that the claim is reserved for. It fails if there are several, because
// an interface can be in one network namespace only. It fails for a group of pods for the same
// reason, and because the kubelet does not say which pods of the group use the claim (KEP-5729).
func consumer(c *resourceapi.ResourceClaim) (journal.Pod, error) {
	const only = "an interface can be in one pod only; give each pod its own claim, by a " +
		"ResourceClaimTemplate"
	var pods []resourceapi.ResourceClaimConsumerReference
	for _, r := range c.Status.ReservedFor {
		if r.APIGroup != "" || r.Resource != "pods" {
			return journal.Pod{}, fmt.Errorf("claim %s/%s is reserved for %s %s, but %s that only the "+
				"pods name", c.Namespace, c.Name, r.Resource, r.Name, only)
		}
		pods = append(pods, r)
	}

	if len(pods) != 1 {
		return journal.Pod{}, fmt.Errorf("claim %s/%s: %d pods share it, but %s", c.Namespace, c.Name,
			len(pods), only)
	}

	return journal.Pod{Namespace: c.Namespace, Name: pods[0].Name, UID: pods[0].UID}, nil
}

// attachmentFor returns the attachment to reserve for a device of the claim, once the last owner
// has released the Function and the xPU serves its Port.
func (d *Driver) attachmentFor(
	ctx context.Context, c *resourceapi.ResourceClaim, pod journal.Pod, device claim.Device,
	name chosenName,
) (journal.Attachment, error) {
	if device.ConfigErr != nil {
		return journal.Attachment{}, device.ConfigErr
	}

	want := reservation(c, pod, device)
	want.AnyName = device.Interface.Name == ""
	if err := d.checkExclusive(device); err != nil {
		return want, err
	}
	if _, err := d.Lifecycle.Admit(ctx, want); err != nil {
		return want, err
	}

	// Before Admit returned, the Function may have had the driver of its last owner.
	function, known := d.Function(device.Function)
	if !known {
		return want, errGone
	}

	want.PF, want.PFName, want.VFIndex = function.PF, function.PFName, function.Index
	spec, exists := d.DevicePool(device.ID.DevicePool)
	var port *v1alpha1.XPUPort
	var err error
	earlier := d.preparedBefore(c.UID, device.Function)
	// An earlier Prepare stays valid, although the pool may have become stricter.
	if earlier.Claim.UID == "" {
		if !exists {
			return want, fmt.Errorf("DevicePool %s does not exist any more, or does not select this "+
				"node, so it is not known which network, driver and settings the Function may have: "+
				"make the pool again, or delete the pod", device.ID.DevicePool)
		}
		if err := errors.Join(device.Allowed(spec), device.CheckBond(spec)); err != nil {
			return want, err
		}
	}

	want.Devices = earlier.Devices
	if want.Devices == nil && exists {
		of := pool.Pool{Name: device.ID.DevicePool, Spec: spec}
		promised := journal.Devices(of.Options(function))
		want.Devices = &promised
	}

	networks := device.NetworkNames(spec)
	network := strings.Join(networks, ", ")
	if err := function.CheckLinkType(device.Interface, network); err != nil {
		return want, err
	}
	if len(networks) > 0 {
		if port, err = d.WaitForPort(ctx, c, device.Function); err != nil {
			return want, err
		}
	}

	driver, err := wantedDriver(earlier, device, function, spec)
	if err != nil {
		return want, err
	}

	want.Interface, err = wantedInterface(device, driver != "" || function.Userspace(), port)
	if err != nil {
		return want, err
	}

	if port == nil && earlier.Claim.UID != "" {
		// The DevicePool was changed or deleted after the earlier Prepare. The xPU still relies on
		// what the Port said then.
		want.Interface = earlier.BackToReserved().Interface
	}

	want.Setup = setup.Wanted(spec, function.ID, driver, want.Interface.MAC)
	want.Interface.Name = name.name
	return want, name.err
}

// reservation returns an attachment that has only the Function and its owner.
func reservation(
	c *resourceapi.ResourceClaim, pod journal.Pod, device claim.Device,
) journal.Attachment {
	return journal.Attachment{
		Function: device.Function, Pod: pod,
		Claim: journal.Claim{
			Namespace: c.Namespace, Name: c.Name, UID: c.UID,
			Request: device.Request, Pool: device.Pool, Device: device.Name, Share: device.Share,
			PodClaim: c.Annotations[resourceapi.PodResourceClaimAnnotation],
		},
	}
}

// errGone is returned for a Function that the node does not have.
var errGone = errors.New("is gone from this node")

// preparedBefore returns the reservation of an earlier Prepare of the claim. It is empty if there
// was no earlier Prepare, or if the Function was only chosen for a share.
func (d *Driver) preparedBefore(claim types.UID, id function.ID) journal.Attachment {
	if a, _ := d.Journal.Get(id); a.Claim.UID == claim && a.Interface.Name != "" {
		return a
	}
	return journal.Attachment{}
}

// wantedDriver returns the driver that the claim or its pool asks for, or "" for the Function's own
// driver. A driver that an earlier Prepare of the claim bound stays, even if the pool has changed.
func wantedDriver(
	earlier journal.Attachment, device claim.Device, f function.Function,
	spec v1alpha1.DevicePoolSpec,
) (v1alpha1.FunctionDriver, error) {
	if earlier.Setup != nil && earlier.Setup.Driver != "" {
		return v1alpha1.FunctionDriver(earlier.Setup.Driver), nil
	}

	if device.Config.Driver != "" && spec.Driver == "" && f.Kind != function.SF &&
		f.IOMMUGroup == "" {
		return "", fmt.Errorf("driver %s: there is no IOMMU, without which a program that has a "+
			"Function can read and change "+
			"all of the node's memory: only spec.driver of DevicePool %s may ask for it, which "+
			"is the administrator's",
			device.Config.Driver, device.ID.DevicePool)
	}

	return cmp.Or(device.Config.Driver, spec.Driver), nil
}

// UnprepareResourceClaims takes the claims' Functions back. The kubelet repeats the call until it
// succeeds.
func (d *Driver) UnprepareResourceClaims(
	ctx context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, c := range claims {
		begin := time.Now()
		err := d.unprepare(ctx, c.UID)
		d.Metrics.unprepare.observe(begin, err)
		if err != nil {
			err = fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
			d.Log.Error(err, "Claim cannot be unprepared", "claim", klog.KRef(c.Namespace, c.Name))
		}
		results[c.UID] = err
	}

	return results, nil
}

func (d *Driver) unprepare(ctx context.Context, claim types.UID) error {
	// The context of TakeOver is not used, because a later Prepare must not end an Unprepare.
	_, end, err := d.calls.TakeOver(ctx, claim, errUnprepared)
	if err != nil {
		return fmt.Errorf("wait for the claim's last call: %w", err)
	}
	defer end()

	if err := d.Lifecycle.Unprepare(ctx, claim); err != nil {
		return err
	}
	if err := d.Journal.DeleteAdminAccess(claim); err != nil {
		return err
	}

	return d.CDI.remove(claim)
}

// WatchHealthStatus sends the health of devices to the kubelet (KEP-4680): at once, on every
// change, and every healthRefresh.
func (d *Driver) WatchHealthStatus(
	ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport,
) error {
	changes := d.Changes(ctx)
	for {
		select {
		case <-ctx.Done():
			return nil
		case reports <- d.healthReport():
		}
		if !loop.Wait(ctx, changes, healthRefresh) {
			return nil
		}
	}
}

func (d *Driver) healthReport() kubeletplugin.DeviceHealthReport {
	now := time.Now()
	var out kubeletplugin.DeviceHealthReport
	pools, _ := d.Pools()
	for _, p := range pools {
		for _, f := range devicemodel.Devices(p) {
			device := kubeletplugin.DeviceHealth{
				PoolName: claim.PoolID{
					Node: d.Node, PF: f.PF, DevicePool: p.Name,
				}.String(),
				DeviceName:         f.ID.DeviceName(),
				Health:             kubeletplugin.HealthStatusHealthy,
				LastUpdated:        now,
				HealthCheckTimeout: healthTimeout,
			}

			var messages []string
			for _, problem := range devicemodel.Problems(p, f, d.Health.Problems) {
				if problem.Taint == v1alpha1.TaintCordoned { // pods that have the Function keep it
					continue
				}
				device.Health = kubeletplugin.HealthStatusUnhealthy
				messages = append(messages, problem.Message)
			}

			device.Message = strings.Join(messages, "; ")
			out.Devices = append(out.Devices, device)
		}
	}

	return out
}

// HandleError logs an error of a background task. Fields of ResourceSlices that the API server
// drops belong to features that the cluster lacks.
func (d *Driver) HandleError(_ context.Context, err error, msg string) {
	if dropped, ok := errors.AsType[*resourceslice.DroppedFieldsError](err); ok {
		d.Log.Error(err, "This cluster ignores parts of the ResourceSlices: it lacks features",
			"features", dropped.DisabledFeatures())
		return
	}
	d.Metrics.backgroundErrors.Inc()
	d.Log.Error(err, msg)
}
