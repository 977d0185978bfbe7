// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// debounce is how long the publisher waits for more changes after the first one, because VFs
	// appear one by one.
	debounce = 50 * time.Millisecond
	// firstRetry and slowestRetry bound the pauses between attempts to publish.
	firstRetry, slowestRetry = 500 * time.Millisecond, 30 * time.Second
)

// Publisher keeps the node's ResourceSlices equal to its pools. It writes only changes. While it has
// to wait for an attribute, what was published stays, also what an earlier agent published.
type Publisher struct {
	Node string
	// Pools returns the node's current pools. known is false until they have been read once.
	Pools  func() (pools []pool.Pool, known bool)
	Health *health.Checker
	// Ahead reports whether the xPU serves a Port of the Function in the network although no pod
	// has the Function.
	Ahead func(f function.ID, network string) bool
	// Features returns the features of the cluster. known is false until the cluster was asked.
	Features func() (features devicemodel.Features, known bool)
	// Losses adds the devices of Functions whose pods are to be deleted. It may be nil.
	Losses *Losses
	// Publish writes the ResourceSlices; see [SliceWriter.PublishResources].
	Publish func(ctx context.Context, resources resourceslice.DriverResources) error
	// Stale reports whether Publish must be called although nothing changed; see
	// [SliceWriter.Stale]. It may be nil.
	Stale   func() bool
	Metrics *Metrics
	Log     logr.Logger

	published *resourceslice.DriverResources // nil at first
}

// Run publishes at once and after every change, until ctx ends. It retries while the API server
// refuses.
func (p *Publisher) Run(ctx context.Context, changes <-chan struct{}) error {
	pauses := loop.Backoff(firstRetry, slowestRetry)
	for {
		// A pause of 0 waits for the next change.
		pause, err := p.publish(ctx)
		if err != nil && ctx.Err() == nil {
			pause = pauses.Step()
			p.Log.Error(err, "ResourceSlices are published later", "after", pause.String())
		} else {
			pauses = loop.Backoff(firstRetry, slowestRetry)
		}

		if !loop.Wait(ctx, changes, pause) || !loop.Sleep(ctx, debounce) {
			return nil
		}
	}
}

// publish returns after which time it must be called again although nothing changed; 0 for never.
func (p *Publisher) publish(ctx context.Context) (again time.Duration, err error) {
	pools, known := p.Pools()
	if !known {
		return 0, nil
	}

	features, known := p.Features()
	if !known || features.Awaits(pools) {
		return 0, nil
	}

	next := features.Reduce(
		devicemodel.Resources(p.Node, pools, p.Health.Problems, p.Ahead))
	again = p.Losses.mark(next, pools, features)
	stale := p.Stale != nil && p.Stale()
	if !stale && p.published != nil && equality.Semantic.DeepEqual(*p.published, next) {
		return again, nil
	}
	if err := p.Publish(ctx, next); err != nil {
		return again, err
	}

	p.published = &next
	devices, slices, tainted := 0, 0, 0
	for _, pool := range next.Pools {
		slices += len(pool.Slices)
		for _, slice := range pool.Slices {
			devices += len(slice.Devices)
			for _, device := range slice.Devices {
				if len(device.Taints) > 0 {
					tainted++
				}
			}
		}
	}

	p.Metrics.devices.Set(float64(devices))
	p.Metrics.tainted.Set(float64(tainted))
	p.Log.Info("Publishing devices", "devices", devices, "tainted", tainted, "pools",
		len(next.Pools), "slices", slices)

	return again, nil
}

const (
	// syncDelay is the time from a change by another client to the repair of the slices. The
	// kubelet deletes all slices of the node when it starts. With the library's default of 30 s,
	// the node would have no devices for so long.
	syncDelay = time.Second
	// parallelCreates bounds how many slices are created at once on a node without slices.
	parallelCreates = 8
)

// SliceWriter keeps the node's ResourceSlices in the API server, by the library's controller. It
// differs from [kubeletplugin.Helper] in two ways: it repairs the slices after syncDelay, and it
// creates the first slices of a node itself, in parallel, because the controller creates them only
// after a second.
type SliceWriter struct {
	Client kubernetes.Interface
	Node   string
	// HandleError is called for errors of the background task; see [Driver.HandleError].
	HandleError func(ctx context.Context, err error, msg string)
	// NodeUID returns the UID of the Node object as the agent knows it, or "" if it is not known. It
	// may be nil.
	NodeUID func() types.UID

	controller *resourceslice.Controller
	nodeUID    types.UID // of the Node object when the controller was made
}

// Stale reports whether the slices belong to a Node object that is gone, because another one has its
// name. The garbage collector deletes such slices, as often as they are written.
func (w *SliceWriter) Stale() bool {
	now := w.knownUID()
	return w.controller != nil && now != "" && now != w.nodeUID
}

func (w *SliceWriter) knownUID() types.UID {
	if w.NodeUID == nil {
		return ""
	}
	return w.NodeUID()
}

// PublishResources writes the slices, now or in a background task, which ends with the context of
// the first call. The slices get the present Node object as owner, also if it was deleted and created
// again since. PublishResources must not be called from several goroutines at once.
func (w *SliceWriter) PublishResources(
	ctx context.Context, resources resourceslice.DriverResources,
) error {
	if w.controller != nil && !w.Stale() {
		w.controller.Update(&resources)
		return nil
	}

	nodeUID := w.knownUID()
	node, err := w.Client.CoreV1().Nodes().Get(ctx, w.Node, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("node %s: %w", w.Node, err)
	}

	w.Stop()
	owner := resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}
	if err := w.createFirst(ctx, owner, resources); err != nil {
		w.HandleError(ctx, err, "ResourceSlices are created later")
	}

	w.nodeUID = cmp.Or(nodeUID, node.UID)
	w.controller, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   v1alpha1.GroupName,
		KubeClient:   w.Client,
		Owner:        &owner,
		Resources:    &resources,
		SyncDelay:    new(syncDelay),
		ErrorHandler: w.HandleError,
	})

	return err
}

// Stop ends the background task. The slices stay.
func (w *SliceWriter) Stop() { w.controller.Stop() }

// createFirst creates the slices of a node that has none. The controller adopts them.
func (w *SliceWriter) createFirst(
	ctx context.Context, owner resourceslice.Owner, resources resourceslice.DriverResources,
) error {
	existing, err := w.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.Set{
			resourceapi.ResourceSliceSelectorDriver:   v1alpha1.GroupName,
			resourceapi.ResourceSliceSelectorNodeName: w.Node,
		}.String(),
		Limit: 1,
	})

	if err != nil || len(existing.Items) > 0 {
		return err
	}

	creates, ctx := errgroup.WithContext(ctx)
	creates.SetLimit(parallelCreates)

	for name, pool := range resources.Pools {
		for index := range pool.Slices {
			slice := firstSlice(owner, name, pool, index)
			creates.Go(func() error {
				_, err := w.Client.ResourceV1().ResourceSlices().Create(ctx, slice,
					metav1.CreateOptions{})
				return err
			})
		}
	}

	return creates.Wait()
}

// firstSlice returns the slice that the library's controller would create. The controller replaces
// any slice that differs from it.
func firstSlice(
	owner resourceslice.Owner, poolName string, pool resourceslice.Pool, index int,
) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: fmt.Sprintf("%05x-%s-%s-", index, v1alpha1.GroupName, owner.Name),
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: owner.APIVersion, Kind: owner.Kind, Name: owner.Name, UID: owner.UID,
				Controller: new(true),
			}},
		},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   v1alpha1.GroupName,
			NodeName: new(owner.Name),
			Pool: resourceapi.ResourcePool{
				Name: poolName, Generation: 1, ResourceSliceCount: int64(len(pool.Slices)),
			},
			Devices:        pool.Slices[index].Devices,
			SharedCounters: pool.Slices[index].SharedCounters,
		},
	}
}
