// SPDX-License-Identifier: Apache-2.0

// Package sriov makes the VFs and SFs that DevicePools ask for. Pools are published with the
// existing Functions, without waiting for new VFs and SFs.
package sriov

import (
	"cmp"
	"context"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// pause is the time from a change of pools, Functions or the journal until the next look at a
	// PF, because many pods often come at once.
	pause = 200 * time.Millisecond
	// firstRetry and slowestRetry bound the pauses before the next look at a PF that did not get
	// its VFs, because the agent does not see everything that frees a PF.
	firstRetry, slowestRetry = time.Second, time.Minute
)

// VFs gives the PFs of the node as many VFs as DevicePools ask for by spec.numVFs, and reports the
// PFs that cannot have them. VFs does not change a PF while the PF or one of its VFs is in use, and
// does not touch a PF that has the number already. DevicePools have the wanted numbers, the kernel
// has the present ones, and the journal has the numbers that PFs had before unfinished changes.
type VFs struct {
	SysRoot   string                                      // the host's sysfs, writable
	Functions interface{ Snapshot() []function.Function } // all Functions of the node, sorted
	Pools     interface{ Pools() ([]pool.Pool, bool) }    // see [pool.Tracker.Pools]
	// Journal knows the owner of each Function; see [journal.Journal].
	Journal interface {
		All() []journal.Attachment
		Lock(ctx context.Context, id function.ID) (unlock func(), err error)
		Subscribe(ctx context.Context) <-chan struct{}
		PutVFs(pf pci.Address, n int) error
		DeleteVFs(pf pci.Address) error
		VFs() map[pci.Address]int
	}
	// Assignments returns the Functions that the kubelet gave to pods; see
	// [podresources.Client.Assigned].
	Assignments interface {
		Assigned(ctx context.Context) (map[string]podresources.Assignment, error)
	}
	HostNetdevs func() (hostuse.Netdevs, error) // see [hostuse.Read]
	// Fault returns the error that a health reporter shows for a PF, or "". A card in error is not
	// changed. A nil Fault means that no error is ever shown.
	Fault func(pf function.Function) string
	// Changed is called when the result of [VFs.Supply] has changed. It must neither block nor call
	// methods of VFs.
	Changed func()
	// optional; called before n is written to a PF's sriov_numvfs
	Writing func(pf pci.Address, n int)
	Metrics *Metrics
	Log     logr.Logger

	queue workqueue.TypedRateLimitingInterface[pci.Address] // of PFs

	mutex    sync.Mutex
	demands  []demand // by priority; the first demand that names a PF decides
	pfs      map[pci.Address]*pfState
	inChange sets.Set[pci.Address]  // PFs whose VFs are being changed
	supplies map[string]pool.Supply // by DevicePool
}

// demand is a DevicePool with numVFs, and the PFs that it names. lacking are the PFs whose VFs
// exist but cannot serve pods.
type demand struct {
	pool    pool.Pool
	pfs     []function.Function
	lacking map[pci.Address]*problem
}

// pfState is the state of a PF with one driver and one wanted number of VFs. When the driver or the
// number changes, the PF gets a new pfState, because another driver may accept a number that the
// old one refused.
type pfState struct {
	numVFs   int
	driver   string
	pool     string   // the DevicePool that decides numVFs; "" if the PF gets back what it had
	making   *problem // not nil while the number of VFs changes
	answered bool     // the PF was looked at
	problem  *problem // the result of the last look; nil if the PF has its VFs
}

// Supply returns what a DevicePool with numVFs lacks on this node; known is false until its PFs
// have been looked at. It does not wait for work on PFs.
func (v *VFs) Supply(devicePool string) (s pool.Supply, known bool) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	s, known = v.supplies[devicePool]
	return s, known
}

// Describe implements [prometheus.Collector] for the shortages of all pools.
func (v *VFs) Describe(descs chan<- *prometheus.Desc) { descs <- shortagesDesc }

// Collect implements [prometheus.Collector].
func (v *VFs) Collect(metrics chan<- prometheus.Metric) {
	pools, _ := v.Pools.Pools()
	for _, p := range pools {
		supply, _ := v.Supply(p.Name)
		count := map[string]int{}
		for _, s := range slices.Concat(supply.Shortages, p.Shortages) {
			count[s.Reason]++
		}
		for reason, n := range count {
			metrics <- prometheus.MustNewConstMetric(shortagesDesc, prometheus.GaugeValue,
				float64(n), p.Name, reason)
		}
	}
}

// Run works until ctx ends. The channels functions and pools have a value when Functions or pools
// may have changed. PFs do not wait for each other, because one card takes a second and another a
// minute. A change that has begun is finished before Run returns.
func (v *VFs) Run(ctx context.Context, functions, pools <-chan struct{}) error {
	v.inChange = sets.New[pci.Address]()
	v.queue = workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[pci.Address](firstRetry, slowestRetry))
	var working sync.WaitGroup
	defer working.Wait()
	defer v.queue.ShutDown()

	working.Go(func() {
		for {
			pf, shutdown := v.queue.Get()
			if shutdown {
				return
			}
			working.Go(func() {
				defer v.queue.Done(pf)
				v.work(ctx, pf)
			})
		}
	})

	records := v.Journal.Subscribe(ctx)
	for {
		v.plan()
		select {
		case <-ctx.Done():
			return nil
		case <-functions:
		case <-pools:
		case <-records:
		}
	}
}

// plan decides how many VFs each PF must have, and queues the PFs that may need work.
func (v *VFs) plan() {
	pools, known := v.Pools.Pools()
	if !known {
		return
	}

	functions := v.Functions.Snapshot()
	v.mutex.Lock()
	defer v.mutex.Unlock()

	before := v.pfs
	v.pfs, v.demands = map[pci.Address]*pfState{}, nil
	for _, p := range slices.SortedFunc(slices.Values(pools), pool.Precedence) {
		if p.Spec.NumVFs == nil {
			continue
		}

		d := demand{p, p.NamedPFs(functions), v.lacking(p, functions)}
		for _, f := range d.pfs {
			if v.pfs[f.PF] == nil {
				v.pfs[f.PF] = v.planPF(f, before[f.PF], int(*p.Spec.NumVFs), p.Name)
			}
		}

		v.demands = append(v.demands, d)
	}

	v.planUnfinished(functions, before)
	v.publish()
}

// planUnfinished has PFs get back the VFs that they had before a change that was not finished, if no
// DevicePool names them any more. The caller must hold the mutex.
func (v *VFs) planUnfinished(
	functions []function.Function, before map[pci.Address]*pfState,
) {
	had := v.Journal.VFs()
	for _, f := range functions {
		n, unfinished := had[f.PF]
		if f.Kind != function.PF || !unfinished {
			continue
		}

		switch {
		case !v.inChange.Has(f.PF) && v.hasVFs(f.PF):
			v.finished(f.PF)
		case v.pfs[f.PF] == nil: // no DevicePool names it
			v.pfs[f.PF] = v.planPF(f, before[f.PF], n, "")
		}
	}
}

// hasVFs reports whether the kernel shows VFs of a PF now. The inventory may be behind: just after a
// change that failed, it still has the VFs that are gone.
func (v *VFs) hasVFs(pf pci.Address) bool {
	vfs, err := v.vfs(pf)
	return err == nil && len(vfs) > 0
}

// planPF queues a PF if it may need work. pf is the known state of the PF, or nil. planPF returns
// the new state. The caller must hold the mutex.
func (v *VFs) planPF(f function.Function, pf *pfState, want int, devicePool string) *pfState {
	if pf == nil || pf.numVFs != want || pf.driver != f.Driver {
		v.queue.Forget(f.PF)
		v.queue.Add(f.PF)
		return &pfState{numVFs: want, driver: f.Driver, pool: devicePool}
	}

	pf.pool = devicePool
	switch {
	case pf.making != nil:
	case f.NumVFs == want:
		pf.answered, pf.problem = true, nil
	case pf.problem == nil || !pf.problem.tried:
		// Another program changed the PF, or its users may be gone. A card that refused is asked
		// again only by the rate limiter.
		v.queue.AddAfter(f.PF, pause)
	}

	return pf
}

// work gives a PF the VFs that are wanted now. It drops the result if the PF has got a new pfState
// meanwhile. It also drops the result after ctx has ended, because the error may only say that.
func (v *VFs) work(ctx context.Context, address pci.Address) {
	v.mutex.Lock()
	pf := v.pfs[address]
	needless := pf == nil || pf.problem != nil && pf.problem.final
	v.mutex.Unlock()
	if needless || ctx.Err() != nil {
		return
	}

	p := v.give(ctx, address, pf.numVFs, func(have int) {
		v.note(func() {
			pf.answered = true
			pf.making = problemf(v1alpha1.ReasonMaking, "is being changed from %d to %d VFs",
				have, pf.numVFs)
		})
	})

	if ctx.Err() != nil {
		return
	}

	v.note(func() {
		if v.pfs[address] != pf {
			return
		}

		if !reflect.DeepEqual(pf.problem, p) {
			v.queue.Forget(address) // pauses become longer while the problem stays the same
			if p != nil && pf.pool == "" {
				v.Log.Info("PF does not get back the VFs that it had before a change", "pf", address,
					"vfs", pf.numVFs, "message", p.message)
			}
		}

		pf.making, pf.answered, pf.problem = nil, true, p
		if p != nil && !p.final {
			v.queue.AddRateLimited(address)
		}
	})
}

// note changes the states of PFs, and publishes the result for DevicePools.
func (v *VFs) note(change func()) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	change()
	v.publish()
}

// publish publishes what DevicePools lack, if that has changed. The caller must hold the mutex.
func (v *VFs) publish() {
	supplies := map[string]pool.Supply{}
	for _, d := range v.demands {
		name := d.pool.Name
		before, was := v.supplies[name]
		s, known := v.supply(d)
		if !known && was {
			s, known = before, true // belongs to an older spec
		}
		if !known {
			continue
		}

		supplies[name] = s
		for _, shortage := range s.Shortages {
			if shortage.Reason != v1alpha1.ReasonMaking &&
				!slices.Contains(before.Shortages, shortage) {
				v.Log.Info("PF does not have the VFs that the DevicePool asks for", "devicePool",
					name, "pf", shortage.PF,
					"reason", shortage.Reason, "message", shortage.Message)
			}
		}
	}

	if v.supplies != nil && reflect.DeepEqual(v.supplies, supplies) {
		return
	}

	v.supplies = supplies
	v.Changed()
}

// supply returns what a DevicePool lacks. known is false until each PF for which the DevicePool
// decides has been looked at. The caller must hold the mutex.
func (v *VFs) supply(d demand) (s pool.Supply, known bool) {
	s, known = pool.Supply{Generation: d.pool.Generation, PFs: len(d.pfs)}, true
	want := int(*d.pool.Spec.NumVFs)
	for _, f := range d.pfs {
		pf := v.pfs[f.PF]
		shortage := cmp.Or(pf.making, pf.problem)
		if want != pf.numVFs {
			shortage = problemf(v1alpha1.ReasonConflict,
				"is to have %d VFs by DevicePool %s, which comes first, and %d by this one: "+
					"make numVFs the same, or name the PF in one of them only", pf.numVFs,
				pf.pool, want)
		} else {
			known = known && pf.answered
			shortage = cmp.Or(shortage, d.lacking[f.PF])
		}

		if shortage != nil {
			s.Shortages = append(s.Shortages, shortage.shortage(f.PF))
		}
	}

	return s, known
}

func (v *VFs) device(a pci.Address) sysfs.Dir { return sysfs.Root(v.SysRoot).PCI(a) }
