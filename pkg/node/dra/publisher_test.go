// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// pools has a node's pools, which a test can change.
type pools struct {
	mutex sync.Mutex
	pools []pool.Pool
	known bool
}

func (p *pools) set(list ...pool.Pool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.pools, p.known = list, true
}

func (p *pools) Pools() ([]pool.Pool, bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.pools, p.known
}

// writes records what was published.
type writes struct {
	mutex sync.Mutex
	all   []resourceslice.DriverResources
	err   error
}

func (w *writes) PublishResources(_ context.Context, r resourceslice.DriverResources) error {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.all = append(w.all, r)
	return w.err
}

// last returns what was published last.
func (w *writes) last() resourceslice.DriverResources {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.all[len(w.all)-1]
}

func (w *writes) refuse(err error) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.err = err
}

func noProblems() *health.Checker {
	none := func(function.ID) string { return "" }
	return &health.Checker{ReleasePending: none, ProvisionFailed: none}
}

// TestPublisherAwaitsCards: what was published stays while a card is still to say which root complexes
// its NIC has, if the pool and the cluster use them. It may be what an earlier agent published.
func TestPublisherAwaitsCards(t *testing.T) {
	awaited := pooltest.VF(0x3b, 0)
	awaited.PCIeRoot, awaited.DataDirectAwaited = "pci0000:3a", true
	answered := awaited
	answered.DataDirectRoots, answered.DataDirectAwaited = []string{"pci0008:00"}, false
	offer := func(dataDirect bool, f function.Function) pool.Pool {
		p := pooltest.DRA("fast", f)
		p.Spec.DataDirect = dataDirect
		return p
	}
	for name, test := range map[string]struct {
		pool  pool.Pool
		lists bool
		want  int
	}{
		"awaited":                  {offer(true, awaited), true, 0},
		"answered":                 {offer(true, answered), true, 1},
		"the pool uses none":       {offer(false, awaited), true, 1},
		"the cluster has no lists": {offer(true, awaited), false, 1},
	} {
		t.Run(name, func(t *testing.T) {
			have, written := &pools{}, &writes{}
			have.set(test.pool)
			features := devicemodel.AllFeatures()
			features.Lists = test.lists
			p := &Publisher{
				Node: "node1", Pools: have.Pools, Health: noProblems(),
				Features: func() (devicemodel.Features, bool) { return features, true },
				Publish:  written.PublishResources, Metrics: NewMetrics(prometheus.NewRegistry()),
				Log: testr.New(t),
			}
			_, err := p.publish(t.Context())
			must.Succeed(t, err)
			if len(written.all) != test.want {
				t.Errorf("published %d times, want %d", len(written.all), test.want)
			}
		})
	}
}

func TestPublisher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		have, written, changes := &pools{}, &writes{}, make(chan struct{}, 1)
		p := &Publisher{
			Node: "node1", Pools: have.Pools, Health: noProblems(), Features: allFeatures,
			Publish: written.PublishResources, Metrics: NewMetrics(prometheus.NewRegistry()),
			Log: testr.New(t),
		}

		done := make(chan error)
		ctx, stop := context.WithCancel(t.Context())
		go func() { done <- p.Run(ctx, changes) }()

		expect := func(what string, want int) {
			t.Helper()
			synctest.Wait()
			if len(written.all) != want {
				t.Errorf("%s: published %d times, want %d", what, len(written.all), want)
			}
		}

		change := func() {
			changes <- struct{}{}
			time.Sleep(debounce)
		}

		expect("before the pools are known", 0)
		change()
		expect("woken before the pools are known", 0)
		have.set()
		change()
		expect("no pools, but known: old slices must go", 1)
		change()
		expect("nothing changed", 1)
		have.set(pooltest.DRA("fast", pooltest.VF(0x3b, 0)))
		change()
		expect("a Function came", 2)
		have.set(pooltest.DRA("fast", pooltest.VF(0x3b, 0)))
		change()
		expect("the same again", 2)

		down := pooltest.VF(0x3b, 0)
		down.LinkUp = false
		have.set(pooltest.DRA("fast", down))
		changes <- struct{}{}
		synctest.Wait()
		expect("a change may be followed by others", 2)
		have.set(pooltest.DRA("fast", pooltest.VF(0x3b, 0)))
		time.Sleep(debounce)
		expect("the link came back at once", 2)

		have.set(pooltest.DRA("fast", down, pooltest.VF(0x3b, 1)))
		change()
		expect("the link went", 3)
		if taints := written.all[2].Pools["node1/0000-3b-00-0/fast"].Slices[0].Devices[0].Taints; len(taints) != 1 {
			t.Errorf("taints are %v, want one", taints)
		}

		stop()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil when its context ends", err)
		}
	})
}

// TestPublisherTriesAgain: an API server that refuses ends neither the publisher nor the agent.
func TestPublisherTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		have, written := &pools{}, &writes{err: errors.New("refused")}
		have.set()

		p := &Publisher{
			Node: "node1", Pools: have.Pools, Health: noProblems(), Features: allFeatures,
			Publish: written.PublishResources, Metrics: NewMetrics(prometheus.NewRegistry()),
			Log: testr.New(t),
		}

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx, nil) }()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if got := len(written.all); got < 3 || got > 6 {
			t.Errorf("tried %d times in 5 s, want pauses that grow", got)
		}

		written.refuse(nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		before := len(written.all)
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(written.all) != before {
			t.Errorf("published %d times more although nothing changed", len(written.all)-before)
		}

		stop()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil when its context ends", err)
		}
	})
}

func TestHealthReporter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		have, changes, reports := &pools{}, make(chan struct{},
			1), make(chan kubeletplugin.DeviceHealthReport)
		down := pooltest.VF(0x3b, 1)
		down.LinkUp = false
		have.set(pooltest.DRA("fast", pooltest.VF(0x3b, 0), down))
		checker := noProblems()
		checker.ReleasePending = func(id function.ID) string {
			if id == down.ID {
				return "not back yet"
			}
			return ""
		}

		r := &Driver{
			Node: "node1", Pools: have.Pools, Health: checker,
			Changes: func(context.Context) <-chan struct{} { return changes },
		}

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.WatchHealthStatus(ctx, reports) }()

		first := <-reports
		want := []kubeletplugin.DeviceHealth{
			{PoolName: "node1/0000-3b-00-0/fast", DeviceName: "0000-3b-00-2",
				Health: kubeletplugin.HealthStatusHealthy, LastUpdated: time.Now(),
				HealthCheckTimeout: healthTimeout},
			{PoolName: "node1/0000-3b-00-0/fast", DeviceName: "0000-3b-00-3",
				Health: kubeletplugin.HealthStatusUnhealthy, LastUpdated: time.Now(),
				HealthCheckTimeout: healthTimeout,
				Message: "PF ens59f0 (0000:3b:00.0) has no link: check its cable and the xPU; " +
					"not back yet"},
		}

		if len(first.Devices) != 2 || first.Devices[0] != want[0] || first.Devices[1] != want[1] {
			t.Errorf("first report is %+v, want %+v", first.Devices, want)
		}

		have.set(pooltest.DRA("fast", pooltest.VF(0x3b, 0)))
		changes <- struct{}{}
		begin := time.Now()
		if report := <-reports; len(report.Devices) != 1 || time.Since(begin) != 0 {
			t.Errorf("report of a change has %d devices after %s, want 1 at once",
				len(report.Devices), time.Since(begin))
		}

		<-reports
		if refreshed := time.Since(begin); refreshed == 0 || refreshed >= healthTimeout/2 {
			t.Errorf("refreshed after %s, want well before %s", refreshed, healthTimeout)
		}

		stop()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil when its context ends", err)
		}
	})
}

// TestHealthReporterStops: the reporter stops even if the report is not read.
func TestHealthReporterStops(t *testing.T) {
	have := &pools{}
	have.set()
	ctx, stop := context.WithCancel(t.Context())
	stop()
	r := &Driver{Node: "node1", Pools: have.Pools, Health: noProblems(),
		Changes: func(context.Context) <-chan struct{} { return nil }}
	if err := r.WatchHealthStatus(ctx, make(chan kubeletplugin.DeviceHealthReport)); err != nil {
		t.Errorf("Run = %v, want nil when its context ends", err)
	}
}

// TestFirstSlice: a slice is owned by the Node, like a slice of the library's controller.
func TestFirstSlice(t *testing.T) {
	owner := resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "node1", UID: "node1-uid"}
	slice := firstSlice(owner, "p", resourceslice.Pool{Slices: make([]resourceslice.Slice, 2)}, 1)
	want := []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Node", Name: "node1", UID: "node1-uid", Controller: new(true)},
	}
	if diff := gocmp.Diff(want, slice.OwnerReferences); diff != "" {
		t.Errorf("owner (-want +got):\n%s", diff)
	}
	if slice.Spec.Pool.ResourceSliceCount != 2 || *slice.Spec.NodeName != "node1" ||
		slice.Spec.Driver != v1alpha1.GroupName {
		t.Errorf("slice %+v", slice.Spec)
	}
}

// allFeatures returns the features of a cluster that has them all.
func allFeatures() (devicemodel.Features, bool) { return devicemodel.AllFeatures(), true }
