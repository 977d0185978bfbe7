// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// featuresEvery is how often the API server is asked again, because it may be upgraded while the
// agent runs.
const featuresEvery = 10 * time.Minute

// listsRefused is how long no lists are published after an API server refused a slice. One of
// several API servers may refuse what another one takes, and may be changed later.
const listsRefused = time.Hour

// Features finds out which fields of ResourceSlices the cluster stores. It uses dry runs, which
// store nothing: the answer lacks the fields whose feature gates are off. All fields except Changed
// must be set.
type Features struct {
	Client kubernetes.Interface
	Node   string
	// Changed is called when the features are known, and when they have changed.
	Changed func()
	Log     logr.Logger

	current  atomic.Pointer[devicemodel.Features]
	refused  atomic.Pointer[time.Time] // when an API server refused a slice with lists
	rechecks notify.Signal
}

// Current returns the features of the cluster. known is false until the first answer.
func (f *Features) Current() (features devicemodel.Features, known bool) {
	if current := f.current.Load(); current != nil {
		return *current, true
	}
	return devicemodel.Features{}, false
}

// Fallbacks returns what a pool gets in place of what its spec asks for; see
// [devicemodel.Features.Fallbacks].
func (f *Features) Fallbacks(p pool.Pool) []v1alpha1.Fallback {
	features, known := f.Current()
	if !known {
		return nil
	}
	return features.Fallbacks(p)
}

// Recheck makes Run ask the cluster again.
func (f *Features) Recheck() { f.rechecks.Notify() }

// Refused takes lists from the features for [listsRefused] if they have them. It is called after an
// API server refused a slice, which may be because of its lists: what else the slice says must not
// wait. The answer to Recheck may take longer, and another API server may give it.
func (f *Features) Refused() {
	current := f.current.Load()
	if current == nil || !current.Lists {
		return
	}

	f.refused.Store(new(time.Now()))
	without := *current
	without.Lists = false
	f.Log.Info("The API server refused a ResourceSlice with lists; attributes have one value for now",
		"again", listsRefused.String())
	if f.current.CompareAndSwap(current, &without) {
		f.Changed()
	}
}

// Run asks at once, regularly, and after Recheck, until ctx ends.
func (f *Features) Run(ctx context.Context) error {
	rechecks := f.rechecks.Subscribe(ctx)
	pauses := loop.Backoff(firstRetry, slowestRetry)
	for {
		pause := wait.Jitter(featuresEvery, 0.2)
		if err := f.check(ctx); err != nil && ctx.Err() == nil {
			pause = pauses.Step()
			f.Log.Error(err, "Cannot tell which features the cluster has", "retry", pause.String())
		} else {
			pauses = loop.Backoff(firstRetry, slowestRetry)
		}

		if !loop.Wait(ctx, rechecks, pause) || !loop.Sleep(ctx, debounce) {
			return nil
		}
	}
}

// check asks the cluster and stores the answer. An API server that refuses the question is assumed
// to have the features that new ones have by default, and not those of which a slice is refused or
// read wrongly where they are missing: lists and the effect None.
func (f *Features) check(ctx context.Context) error {
	features, err := f.ask(ctx)
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		f.Log.Error(err,
			"The API server does not tell which features it has; it is taken to have those that "+
				"are on by default from Kubernetes 1.36 on")
		features, err = devicemodel.DefaultFeatures(), nil
	}

	if err != nil {
		return err
	}
	if at := f.refused.Load(); at != nil && time.Since(*at) < listsRefused {
		features.Lists = false
	}

	before := f.current.Swap(&features)
	if before != nil && *before == features {
		return nil
	}

	if missing := features.Missing(); len(missing) > 0 {
		f.Log.Info("The cluster lacks feature gates, which are on by default from Kubernetes "+
			"1.36 on; pools that need them fall back, "+
			"as their condition Supported says", "featureGates", strings.Join(missing, ","))
	}

	f.Changed()
	return nil
}

func (f *Features) ask(ctx context.Context) (devicemodel.Features, error) {
	ports := resourceapi.QualifiedName("ports")
	device := resourceapi.Device{
		Name: "question",
		Taints: []resourceapi.DeviceTaint{
			{Key: v1alpha1.TaintLinkDown, Effect: resourceapi.DeviceTaintEffectNoSchedule},
		},
		BindingConditions:        []string{v1alpha1.ConditionProvisioned},
		BindingFailureConditions: []string{v1alpha1.ConditionProvisionFailed},
		AllowMultipleAllocations: new(true),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{ports: {
			Value: resource.MustParse("2"),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default:     new(resource.MustParse("1")),
				ValidValues: []resource.Quantity{resource.MustParse("1")},
			},
		}},
	}

	kept, err := f.create(ctx, device)
	if err != nil {
		return devicemodel.Features{}, err
	}

	features := devicemodel.Features{
		Taints: len(kept.Taints) > 0, BindingConditions: len(kept.BindingConditions) > 0,
		SharedCapacity: kept.AllowMultipleAllocations != nil,
	}

	if features.EffectNone, err = f.takesNone(ctx); err != nil {
		return devicemodel.Features{}, err
	}
	if features.Counters, err = f.takesCounters(ctx); err != nil {
		return devicemodel.Features{}, err
	}
	if features.Lists, err = f.takesLists(ctx); err != nil {
		return devicemodel.Features{}, err
	}
	if !features.Counters && !features.Lists {
		return features, nil
	}

	version, err := f.version(ctx)
	if err != nil {
		return devicemodel.Features{}, err
	}

	if features.Counters {
		features.CountersHarm = devicemodel.CountersHarm(version)
		features.Counters = features.CountersHarm == ""
	}
	if features.Lists {
		features.ListsHarm = devicemodel.ListsHarm(version)
		features.Lists = features.ListsHarm == ""
	}
	return features, nil
}

// takesCounters reports whether the API server stores counters of another slice, which the driver
// uses. Kubernetes 1.34 refuses them.
func (f *Features) takesCounters(ctx context.Context) (bool, error) {
	kept, err := f.create(ctx,
		resourceapi.Device{Name: "question",
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
				CounterSet: "pf",
				Counters: map[string]resourceapi.Counter{
					"functions": {Value: resource.MustParse("1")},
				},
			}}})
	if apierrors.IsInvalid(err) {
		return false, nil
	}
	return err == nil && len(kept.ConsumesCounters) > 0, err
}

// takesLists reports whether the API server stores attributes with several values (KEP-5491)
// unchanged. One without the feature gate drops the values and refuses the empty attribute. One that
// does not know the fields may refuse the question as a bad request. A policy that forbids lists
// says nothing of the other features.
func (f *Features) takesLists(ctx context.Context) (bool, error) {
	lists := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		deviceattribute.StandardDeviceAttributeNUMANode: {IntValues: []int64{1, 0}},
		deviceattribute.StandardDeviceAttributePCIeRoot: {
			StringValues: []string{"pci0000:00", "pci0008:00"},
		},
	}

	kept, err := f.create(ctx,
		resourceapi.Device{Name: "question", Attributes: maps.Clone(lists)})
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsForbidden(err) {
		return false, nil
	}
	return err == nil && equality.Semantic.DeepEqual(lists, kept.Attributes), err
}

// takesNone reports whether the API server takes taints with the effect None. Kubernetes 1.34
// refuses a slice that has one.
func (f *Features) takesNone(ctx context.Context) (bool, error) {
	kept, err := f.create(ctx, resourceapi.Device{
		Name: "question",
		Taints: []resourceapi.DeviceTaint{
			{Key: v1alpha1.TaintLinkDown, Effect: resourceapi.DeviceTaintEffectNone},
		},
	})
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		return false, nil
	}
	return err == nil && len(kept.Taints) == 1 &&
		kept.Taints[0].Effect == resourceapi.DeviceTaintEffectNone, err
}

// version returns the version of the API server, "" if it may not be read.
func (f *Features) version(ctx context.Context) (string, error) {
	info, err := f.Client.Discovery().ServerVersionWithContext(ctx)
	switch {
	case apierrors.IsForbidden(err), apierrors.IsNotFound(err):
		f.Log.Error(err, "The API server does not tell its version; it is taken to have no known "+
			"faults, but gets no lists")
		return "", nil
	case err != nil:
		return "", fmt.Errorf("version of the API server: %w", err)
	}
	return info.GitVersion, nil
}

// create returns what the API server would store of a device.
func (f *Features) create(
	ctx context.Context, device resourceapi.Device,
) (resourceapi.Device, error) {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "xpu-question-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: v1alpha1.GroupName, NodeName: &f.Node,
			Pool: resourceapi.ResourcePool{
				Name: f.Node + "/question", Generation: 1, ResourceSliceCount: 1,
			},
			Devices: []resourceapi.Device{device},
		},
	}

	kept, err := f.Client.ResourceV1().ResourceSlices().Create(ctx, slice,
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return resourceapi.Device{}, fmt.Errorf("dry run of a ResourceSlice: %w", err)
	}
	if len(kept.Spec.Devices) != 1 {
		return resourceapi.Device{}, fmt.Errorf("dry run of a ResourceSlice: %d devices came back",
			len(kept.Spec.Devices))
	}

	return kept.Spec.Devices[0], nil
}
