// Package dra offers the node's Functions through Dynamic Resource Allocation: it publishes them in ResourceSlices,
// prepares those that the scheduler allocated, and reports their health and what became of them.
package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
)

// Ports knows the Ports of this node's Functions.
type Ports interface {
	// Wait returns the Port of a Function that is allocated to a claim, once the xPU serves it. It gives up when ctx
	// ends and says what is missing.
	Wait(ctx context.Context, c *resourceapi.ResourceClaim, f function.ID) (*v1alpha1.XPUPort, error)
}

// DevicePools knows what the administrator declared for this node.
type DevicePools interface {
	DevicePool(name string) (v1alpha1.DevicePoolSpec, bool)
}

// Functions knows the node's Functions.
type Functions interface {
	Get(function.ID) (function.Function, bool)
}

// Lifecycle decides who has a Function.
type Lifecycle interface {
	// Admit makes way for the claim: it waits until the Function is back from its last owner. It fails if somebody else
	// has the Function.
	Admit(ctx context.Context, want journal.Attachment) (lifecycle.Decision, error)
	// Reserve records durably that the Function belongs to the claim. It fails if it belongs to another one.
	Reserve(ctx context.Context, want journal.Attachment) error
	// Unprepare takes the claim's Functions from it, wherever they are by now.
	Unprepare(ctx context.Context, claim types.UID) error
}

// Runtime tells of pods' sandboxes, in which Functions are attached.
type Runtime interface {
	// AwaitConnected returns nil once the runtime would tell of sandboxes. The error says what to do if it does not
	// before ctx ends.
	AwaitConnected(ctx context.Context) error
}

// Pods knows pods at the API server.
type Pods interface {
	// Going says whether a pod is being deleted, or gone.
	Going(ctx context.Context, pod journal.Pod) (bool, error)
}

const (
	// runtimeTimeout is how long one Prepare waits for a runtime that is being started again.
	runtimeTimeout = 5 * time.Second
	// podInterval is how often it is asked whether a pod is going for which a Prepare waits. The kubelet does not tell:
	// it calls Unprepare after Prepare has returned, and nothing else of the pod goes on meanwhile.
	podInterval = time.Second
)

// DeviceNodes looks up which device nodes a container needs for a Function.
type DeviceNodes interface {
	Of(function.Function, devnode.Wish) (devnode.Set, error)
}

// Driver prepares claims. It implements [kubeletplugin.DRAPlugin].
type Driver struct {
	Functions   Functions
	DevicePools DevicePools
	Ports       Ports
	Journal     *journal.Journal
	Lifecycle   Lifecycle
	DeviceNodes DeviceNodes
	// Runtime and Pods may be nil: nothing is asked of them then.
	Runtime Runtime
	Pods    Pods
	CDI     *CDI
	Health  *HealthReporter
	Metrics *Metrics
	Log     logr.Logger

	// ProvisionTimeout is how long one Prepare waits for the xPU and for the hooks of the Functions' last users. The
	// kubelet gives a call 45 s (pkg/kubelet/cm/dra) and tries again.
	ProvisionTimeout time.Duration

	// preparing is what runs for claims.
	preparing preparing
}

var _ kubeletplugin.DRAPlugin = (*Driver)(nil)

// PrepareResourceClaims waits until the xPU serves each claim's Ports and reserves the Functions, which has them set up
// for the pod. Nothing else is touched yet: the interfaces are attached when the runtime makes the pod's network
// namespace.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	var mutex sync.Mutex
	var group sync.WaitGroup
	for _, c := range claims {
		group.Go(func() {
			stop := d.Metrics.prepare.start()
			devices, err := d.prepare(ctx, c, claims)
			stop(err)
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

// prepare prepares one of the claims that the kubelet wants prepared together: those of one pod.
func (d *Driver) prepare(ctx context.Context, c *resourceapi.ResourceClaim, together []*resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	pod, err := consumer(c)
	if err != nil {
		return nil, err
	}
	devices, err := claim.Devices(c)
	if err != nil {
		return nil, err
	}
	ctx, leave := d.preparing.enter(ctx, c.UID)
	defer leave()
	ctx, stop := d.whilePodStays(ctx, pod)
	defer stop()
	if err := d.awaitRuntime(ctx); err != nil {
		return nil, fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	names := chooseNames(claimsOf(pod, together), d.Journal.ByPod(pod.UID))
	deadline := time.Now().Add(d.ProvisionTimeout)
	var prepared []kubeletplugin.Device
	for _, device := range devices {
		attachment, err := d.reserve(ctx, c, pod, device, names, deadline)
		if err == nil {
			_, err = d.deviceNodes(attachment) // a container that could not get them is told now
		}
		if err != nil {
			return nil, fmt.Errorf("claim %s/%s, request %s, Function %s: %w", c.Namespace, c.Name, device.Request, device.Function,
				causeOf(ctx, err))
		}
		prepared = append(prepared, kubeletplugin.Device{
			Requests:     []string{device.Request},
			PoolName:     device.Pool,
			DeviceName:   device.Name,
			CDIDeviceIDs: []string{cdiDeviceID(attachment)},
			Metadata:     metadata(attachment),
		})
	}
	return prepared, nil
}

// awaitRuntime fails where the runtime would not tell of the pod's sandbox.
func (d *Driver) awaitRuntime(ctx context.Context) error {
	if d.Runtime == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, runtimeTimeout)
	defer cancel()
	return d.Runtime.AwaitConnected(ctx)
}

// whilePodStays is ctx until the pod is being deleted. stop ends the watch.
func (d *Driver) whilePodStays(ctx context.Context, pod journal.Pod) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	if d.Pods == nil {
		return ctx, func() { cancel(nil) }
	}
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(podInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			// An API server that does not answer says nothing about the pod.
			if going, err := d.Pods.Going(ctx, pod); err == nil && going {
				cancel(fmt.Errorf("pod %s/%s is being deleted", pod.Namespace, pod.Name))
			}
		}
	})
	return ctx, func() {
		cancel(nil)
		watching.Wait()
	}
}

// causeOf is an error with the reason that ctx ended for, where it did.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}

// deviceNodes are what a container gets of a Function, which is set up for it by now.
func (d *Driver) deviceNodes(a journal.Attachment) (devnode.Set, error) {
	function, known := d.Functions.Get(a.Function)
	if !known {
		return devnode.Set{}, errors.New("is gone from this node")
	}
	var wish devnode.Wish
	if id, err := claim.ParsePoolID(a.Claim.Pool); err == nil {
		spec, _ := d.DevicePools.DevicePool(id.DevicePool)
		options := pool.Pool{Name: id.DevicePool, Spec: spec}.Options(function)
		wish.RDMA, wish.VDPA = options.RDMA, options.VDPA != ""
	}
	return d.DeviceNodes.Of(function, wish)
}

// claimsOf leaves the claims of one pod.
func claimsOf(pod journal.Pod, claims []*resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
	return slices.DeleteFunc(slices.Clone(claims), func(c *resourceapi.ResourceClaim) bool {
		consumer, err := consumer(c)
		return err != nil || consumer.UID != pod.UID
	})
}

// consumer is the one pod that the claim is for: an interface can be in one network namespace only.
func consumer(c *resourceapi.ResourceClaim) (journal.Pod, error) {
	if len(c.Status.ReservedFor) != 1 {
		return journal.Pod{}, fmt.Errorf("claim %s/%s: %d pods share it, but an interface can be in one pod only; give each pod its own claim, by a ResourceClaimTemplate",
			c.Namespace, c.Name, len(c.Status.ReservedFor))
	}
	pod := c.Status.ReservedFor[0]
	if pod.APIGroup != "" || pod.Resource != "pods" {
		return journal.Pod{}, fmt.Errorf("claim %s/%s: reserved for %s %s, want a pod", c.Namespace, c.Name, pod.Resource, pod.Name)
	}
	return journal.Pod{Namespace: c.Namespace, Name: pod.Name, UID: pod.UID}, nil
}

// reserve waits until the deadline for the device's last user to be gone and for its Port, and records what its
// interface is to become.
func (d *Driver) reserve(ctx context.Context, c *resourceapi.ResourceClaim, pod journal.Pod, device claim.Device, names names, deadline time.Time) (journal.Attachment, error) {
	if device.ConfigErr != nil {
		return journal.Attachment{}, device.ConfigErr
	}
	waiting, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	owner := journal.Attachment{
		Function: device.Function, Pod: pod, Claim: journal.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID},
	}
	if _, err := d.Lifecycle.Admit(waiting, owner); err != nil {
		return journal.Attachment{}, err
	}
	// Not before: until then it may have the driver of its last owner.
	function, known := d.Functions.Get(device.Function)
	if !known {
		return journal.Attachment{}, errors.New("is gone from this node")
	}
	port, err := d.port(waiting, c, device)
	if err != nil {
		return journal.Attachment{}, err
	}
	attachment, err := d.reservation(c, device, function, port)
	if err != nil {
		return journal.Attachment{}, err
	}
	key := nameKey{c.UID, function.ID}
	if err := names.errs[key]; err != nil {
		return journal.Attachment{}, err
	}
	attachment.Pod, attachment.Interface.Name = pod, names.chosen[key]
	return attachment, d.Lifecycle.Reserve(ctx, attachment)
}

// reservation is what the claim wants of a Function: all but the pod, and the interface's name.
func (d *Driver) reservation(c *resourceapi.ResourceClaim, device claim.Device, function function.Function, port *v1alpha1.XPUPort) (journal.Attachment, error) {
	spec, _ := d.DevicePools.DevicePool(device.ID.DevicePool)
	driver, err := d.ownersDriver(c, device, function, spec)
	if err != nil {
		return journal.Attachment{}, err
	}
	wanted, err := wantedInterface(device, driver != "" || function.Userspace(), port)
	if err != nil {
		return journal.Attachment{}, err
	}
	if known, ok := d.known(c.UID, function.ID); ok && port == nil {
		// The claim cannot change. What a Port said of it before its DevicePool changed, or went, the xPU still counts on.
		wanted = known
	}
	return journal.Attachment{
		Function: function.ID,
		PF:       function.PF,
		PFName:   function.PFName,
		VFIndex:  function.Index,
		Claim: journal.Claim{
			Namespace: c.Namespace, Name: c.Name, UID: c.UID,
			Request: device.Request, Pool: device.Pool, Device: device.Name,
			PodClaim: c.Annotations[resourceapi.PodResourceClaimAnnotation],
		},
		AnyName:   device.Interface.Name == "",
		Setup:     setup.Wanted(spec, function.ID, driver, wanted.MAC),
		Interface: wanted,
	}, nil
}

// ownersDriver is the one that claim or pool asks for, "" for the Function's own.
func (d *Driver) ownersDriver(c *resourceapi.ResourceClaim, device claim.Device, f function.Function, spec v1alpha1.DevicePoolSpec) (v1alpha1.FunctionDriver, error) {
	if bound := d.bound(c.UID, f.ID); bound != "" {
		return bound, nil
	}
	if device.Config.Driver != "" && spec.Driver == "" && f.Kind != function.SF && f.IOMMUGroup == "" {
		return "", fmt.Errorf("driver %s: there is no IOMMU, without which a program that has a Function can read and change "+
			"all of the node's memory: only spec.driver of DevicePool %s may ask for it, which is the administrator's",
			device.Config.Driver, device.ID.DevicePool)
	}
	return cmp.Or(device.Config.Driver, spec.Driver), nil
}

// bound is the driver that was bound for the claim, "" if none was. It stays until the claim is unprepared, whatever the
// pool says by now.
func (d *Driver) bound(claim types.UID, function function.ID) v1alpha1.FunctionDriver {
	for _, a := range d.Journal.ByClaim(claim) {
		if a.Function == function && a.Setup != nil {
			return v1alpha1.FunctionDriver(a.Setup.Driver)
		}
	}
	return ""
}

// known is the interface that an earlier Prepare of the claim reserved.
func (d *Driver) known(claim types.UID, f function.ID) (known function.Interface, ok bool) {
	for _, a := range d.Journal.ByClaim(claim) {
		if a.Function != f {
			continue
		}
		if a.CNI != nil && a.CNI.Claimed != nil {
			return *a.CNI.Claimed, true
		}
		return a.Interface, true
	}
	return function.Interface{}, false
}

// port waits for the device's Port; it is nil if neither the claim nor the pool names a network.
func (d *Driver) port(ctx context.Context, c *resourceapi.ResourceClaim, device claim.Device) (*v1alpha1.XPUPort, error) {
	if device.Config.Network == "" {
		if spec, _ := d.DevicePools.DevicePool(device.ID.DevicePool); spec.Network == "" {
			return nil, nil
		}
	}
	return d.Ports.Wait(ctx, c, device.Function)
}

// UnprepareResourceClaims takes the claims' Functions back. The kubelet calls it after the pod's sandbox is stopped,
// and again until it succeeds.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, c := range claims {
		stop := d.Metrics.unprepare.start()
		err := d.unprepare(ctx, c)
		stop(err)
		if err != nil {
			d.Log.Error(err, "Claim cannot be unprepared", "claim", klog.KRef(c.Namespace, c.Name))
		}
		results[c.UID] = err
	}
	return results, nil
}

func (d *Driver) unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	leave, err := d.preparing.end(ctx, c.UID)
	if err != nil {
		return fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	defer leave()
	if err := d.Lifecycle.Unprepare(ctx, c.UID); err != nil {
		return fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	return d.CDI.Remove(c.UID)
}

// HandleError logs what went wrong in the background. A slice that the API server refuses or cuts down is a mistake
// of this driver or a cluster too old for it; both are said, and the rest of the node goes on.
func (d *Driver) HandleError(_ context.Context, err error, msg string) {
	if dropped := (*resourceslice.DroppedFieldsError)(nil); errors.As(err, &dropped) {
		d.Log.Error(err, "This cluster ignores parts of the ResourceSlices: it lacks features", "features", dropped.DisabledFeatures())
		return
	}
	d.Metrics.backgroundErrors.Inc()
	d.Log.Error(err, msg)
}

// WatchHealthStatus reports the health of all devices until ctx ends.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	return d.Health.Run(ctx, reports)
}

// Offer lets containers get a Function that is attached: it is in the claim's CDI file from then on. Without it the
// runtime refuses to make the container. It is called when the journal says so, and may be called again.
func (d *Driver) Offer(a journal.Attachment) error { return d.writeCDI(a.Claim.UID) }

// Withdraw takes that back. What cannot be looked up anew of the claim's other Functions goes with it.
func (d *Driver) Withdraw(a journal.Attachment) error {
	err := d.writeCDI(a.Claim.UID)
	if err != nil {
		d.Log.Error(err, "Containers of the claim cannot start until it is attached again", "claim", klog.KRef(a.Claim.Namespace, a.Claim.Name))
		err = d.CDI.Remove(a.Claim.UID)
	}
	return err
}

// writeCDI brings the claim's file up to date: it has the Functions that are attached.
func (d *Driver) writeCDI(uid types.UID) error {
	if uid == "" {
		return nil
	}
	d.CDI.mutex.Lock()
	defer d.CDI.mutex.Unlock()
	var contents []content
	for _, a := range d.Journal.ByClaim(uid) {
		if a.State != journal.Attached {
			continue
		}
		set, err := d.attachedNodes(a)
		if err != nil {
			return fmt.Errorf("CDI file of claim %s/%s: Function %s: %w", a.Claim.Namespace, a.Claim.Name, a.Function, err)
		}
		contents = append(contents, content{attachment: a, Set: set, claims: d.claimsOfPod(a)})
	}
	if len(contents) == 0 {
		return d.CDI.Remove(uid)
	}
	return d.CDI.Write(uid, contents)
}

// attachedNodes are what a container gets of a Function that must have the driver that was bound for it.
func (d *Driver) attachedNodes(a journal.Attachment) (devnode.Set, error) {
	if o := a.Setup; o != nil && o.Driver != "" {
		if f, _ := d.Functions.Get(a.Function); f.Driver != o.Driver {
			return devnode.Set{}, fmt.Errorf("has driver %s, not %s, which its claim wants", f.Driver, o.Driver)
		}
	}
	return d.deviceNodes(a)
}

// claimsOfPod are the attachments of all claims of the attachment's pod.
func (d *Driver) claimsOfPod(a journal.Attachment) []journal.Attachment {
	if a.Pod.UID == "" {
		return []journal.Attachment{a}
	}
	return d.Journal.ByPod(a.Pod.UID)
}

// Recover makes sure that attached claims have their CDI files, and no others, as the agent may have ended before it wrote
// one. What it cannot look up, as a Function is no more what its claim wants, keeps no other claim from its file.
func (d *Driver) Recover(all []journal.Attachment) {
	for _, a := range all {
		outdated := a.State == journal.Lost || a.State == journal.Attached && !d.CDI.Has(a.Claim.UID)
		if a.Claim.UID == "" || !outdated {
			continue
		}
		if err := d.writeCDI(a.Claim.UID); err != nil {
			d.Log.Error(err, "Containers of the claim cannot start", "claim", klog.KRef(a.Claim.Namespace, a.Claim.Name))
		}
	}
}
