// Package sriov makes the Functions that DevicePools ask for. It works between the declaration of pools, which it
// reads, and their publication, which waits for nothing: pools have the Functions that are there.
package sriov

import (
	"cmp"
	"context"
	"maps"
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
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// pause is the shortest time between two looks at one PF that is in use: pods come and go in crowds.
	pause = 200 * time.Millisecond
	// firstRetry and slowestRetry are the pauses before a PF is looked at again that did not get its VFs, or whose VFs the
	// inventory does not know yet. Not everything that frees a PF tells of it.
	firstRetry, slowestRetry = time.Second, time.Minute
)

// Journal knows who has which Function.
type Journal interface {
	All() []journal.Attachment
	// Lock makes the caller the only one to work on a Function until it calls unlock.
	Lock(ctx context.Context, id function.ID) (unlock func(), err error)
	// Subscribe returns a channel that receives a value after changes.
	Subscribe(ctx context.Context) <-chan struct{}
}

// VFs gives the PFs of the node as many VFs as DevicePools ask for by spec.numVFs, and tells of PFs that it cannot give
// them. A PF that somebody uses, or one of whose VFs somebody uses, is never changed; one that has as many already is
// not touched. It keeps no state on disk: what is wanted is in the DevicePools, what there is the kernel knows.
type VFs struct {
	// SysRoot is where the host's sysfs is, writable.
	SysRoot string
	// Functions are all of the node's, sorted.
	Functions interface{ Snapshot() []function.Function }
	// Pools are the node's; known is false until they have been read once.
	Pools interface {
		Pools() (pools []pool.Pool, known bool)
	}
	Journal Journal
	// Assignments are the Functions that the kubelet gave to pods, by [function.ID.String].
	Assignments interface {
		Assigned(ctx context.Context) (map[string]podresources.Assignment, error)
	}
	// NetdevUse says what the host does with a netdev, "" for nothing.
	NetdevUse func(netdev string) (string, error)
	// Changed, where set, is called when what [VFs.Supply] says has changed. It must neither block nor call methods of VFs.
	Changed func()
	// Writing, where set, is called before a number of VFs is written to a PF's sriov_numvfs.
	Writing func(pf pci.Address, n int)
	Metrics *Metrics
	Log     logr.Logger

	queue   workqueue.TypedRateLimitingInterface[pci.Address] // of PFs
	running sync.WaitGroup

	mutex    sync.Mutex
	pfs      map[pci.Address]*pfState // those that DevicePools with numVFs name
	supplies map[string]pool.Supply   // by DevicePool
}

// Supply says what a DevicePool with numVFs lacks on this node; known is false until that has been looked at. It does
// not wait for work on PFs.
func (v *VFs) Supply(devicePool string) (s pool.Supply, known bool) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	s, known = v.supplies[devicePool]
	return s, known
}

// Describe is that of a [prometheus.Collector], of what pools lack.
func (v *VFs) Describe(descs chan<- *prometheus.Desc) { descs <- shortagesDesc }

// Collect is that of a [prometheus.Collector].
func (v *VFs) Collect(metrics chan<- prometheus.Metric) {
	pools, _ := v.Pools.Pools()
	for _, p := range pools {
		supply, _ := v.Supply(p.Name)
		count := map[string]int{}
		for _, s := range slices.Concat(supply.Shortages, p.Shortages) {
			count[s.Reason]++
		}
		for reason, n := range count {
			metrics <- prometheus.MustNewConstMetric(shortagesDesc, prometheus.GaugeValue, float64(n), p.Name, reason)
		}
	}
}

// device is what the kernel shows of a PCI device.
func (v *VFs) device(a pci.Address) sysfs.Dir { return sysfs.Root(v.SysRoot).PCI(a) }

// vfs lists the VFs of a PF by index.
func (v *VFs) vfs(pf pci.Address) ([]pci.Address, error) {
	links, err := v.device(pf).VFs()
	if err != nil {
		return nil, err
	}
	vfs := make([]pci.Address, 0, len(links))
	for _, link := range links {
		vfs = append(vfs, link.Address)
	}
	return vfs, nil
}

// target is what a PF is to have. Another driver may accept a number that one refused.
type target struct {
	numVFs int
	driver string
}

// pfState is what is known of one PF.
type pfState struct {
	target target
	pool   string // the DevicePool that decided the target
	// due says that the PF is in the queue, or will be again after a pause.
	due bool
	// running says that a goroutine works on the PF. making is set while that changes the number of VFs.
	running bool
	making  *problem
	// answered says that problem is what came of the target: nil if the PF has its VFs.
	answered bool
	problem  *problem
	ended    time.Time // when the last work on the PF ended
}

// Run works until ctx ends. functions and pools have a value when Functions, or pools, may have changed. The queue ensures
// that one goroutine at a time works on a PF. PFs do not wait for each other: one card takes a second, another a minute. A
// change of a PF that has begun is finished before Run returns.
func (v *VFs) Run(ctx context.Context, functions, pools <-chan struct{}) error {
	v.pfs = map[pci.Address]*pfState{}
	v.queue = workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[pci.Address](firstRetry, slowestRetry))
	defer v.running.Wait()
	defer v.queue.ShutDown()
	records := v.Journal.Subscribe(ctx)
	v.running.Go(func() { v.follow(ctx) })
	for {
		v.update(true, func() {})
		select {
		case <-ctx.Done():
			return nil
		case <-functions:
		case <-pools:
		case <-records:
		}
	}
}

// follow works on the PFs of the queue until it is shut down.
func (v *VFs) follow(ctx context.Context) {
	for {
		pf, shutdown := v.queue.Get()
		if shutdown {
			return
		}
		v.running.Go(func() {
			defer v.queue.Done(pf)
			v.work(ctx, pf)
		})
	}
}

// work gives a PF the VFs that are wanted now, if it is still due. After ctx has ended the answer is dropped, as it may be
// about the end of ctx.
func (v *VFs) work(ctx context.Context, address pci.Address) {
	pf, target := v.begin(address)
	if pf == nil || ctx.Err() != nil {
		return
	}
	p := v.give(ctx, address, target.numVFs, func(have int) {
		v.update(false, func() {
			if pf.target == target {
				pf.answered = true
				pf.making = problemf(v1alpha1.ReasonMaking, "is being changed from %d to %d VFs", have, target.numVFs)
			}
		})
	})
	if ctx.Err() != nil {
		return
	}
	v.update(false, func() {
		pf.running, pf.making, pf.ended = false, nil, time.Now()
		if pf.target != target {
			return // the PF becomes due for its new target
		}
		if !reflect.DeepEqual(pf.problem, p) {
			v.queue.Forget(address) // pauses become longer while the problem stays the same
		}
		pf.answered, pf.problem, pf.due = true, p, p == nil || !p.final
		if pf.due {
			v.queue.AddRateLimited(address)
		}
	})
}

// begin returns a PF that is worked on from now on, and its target; nil if the PF is not due.
func (v *VFs) begin(address pci.Address) (*pfState, target) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	pf := v.pfs[address]
	if pf == nil || !pf.due {
		return nil, target{}
	}
	pf.running = true
	return pf, pf.target
}

// update changes what is known of PFs, queues those that are due, and publishes what follows for DevicePools. news says
// that pools, Functions or the journal may have changed.
func (v *VFs) update(news bool, change func()) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	change()
	pools, known := v.Pools.Pools()
	if !known {
		return
	}
	functions := v.Functions.Snapshot()
	named := sets.New[pci.Address]()
	supplies := map[string]pool.Supply{}
	// Of two that want different numbers for a PF, the one counts that a Function would belong to which both select; see
	// [pool.Assign].
	for _, p := range slices.SortedFunc(slices.Values(pools), func(a, b pool.Pool) int {
		return cmp.Or(-cmp.Compare(a.Spec.Priority, b.Spec.Priority), cmp.Compare(a.Name, b.Name))
	}) {
		if p.Spec.NumVFs == nil {
			continue
		}
		pfs := p.NamedPFs(functions)
		for _, pf := range pfs {
			if !named.Has(pf.PF) {
				named.Insert(pf.PF)
				v.plan(p, pf, news)
			}
		}
		if s, known := v.supply(p, pfs); known {
			supplies[p.Name] = s
		}
	}
	maps.DeleteFunc(v.pfs, func(address pci.Address, pf *pfState) bool { return !named.Has(address) && !pf.running })
	v.publish(supplies)
}

// plan sets what a DevicePool wants of a PF, and queues the PF if it is due. The caller has the mutex.
func (v *VFs) plan(p pool.Pool, f function.Function, news bool) {
	pf := v.pfs[f.PF]
	if pf == nil {
		pf = &pfState{target: target{numVFs: -1}}
		v.pfs[f.PF] = pf
	}
	if wanted := (target{int(*p.Spec.NumVFs), f.Driver}); pf.target != wanted {
		*pf = pfState{target: wanted, running: pf.running, ended: pf.ended}
		v.queue.Forget(f.PF)
	}
	pf.pool = p.Name
	switch {
	case pf.running:
	case f.NumVFs == pf.target.numVFs:
		pf.answered, pf.problem, pf.due = true, nil, false
		v.queue.Forget(f.PF)
	case pf.problem == nil && !pf.due: // the target is new, or somebody else changed the PF
		pf.due = true
		v.queue.Add(f.PF)
	case pf.problem != nil && pf.due && !pf.problem.tried && news:
		// Who had it may have it no more. What the card refused, it refuses until something else passes: time.
		v.queue.AddAfter(f.PF, time.Until(pf.ended.Add(pause)))
	}
}

// supply says what a DevicePool has, by the PFs that it names. What is known of an older spec stands until all of them
// have been looked at for the new one. The caller has the mutex.
func (v *VFs) supply(p pool.Pool, pfs []function.Function) (s pool.Supply, known bool) {
	s, known = pool.Supply{Generation: p.Generation, PFs: len(pfs)}, true
	for _, f := range pfs {
		pf := v.pfs[f.PF]
		shortage := cmp.Or(pf.making, pf.problem)
		if want := int(*p.Spec.NumVFs); want != pf.target.numVFs {
			shortage = problemf(v1alpha1.ReasonConflict, "is to have %d VFs by DevicePool %s, which comes first, and %d by this one: "+
				"make numVFs the same, or name the PF in one of them only", pf.target.numVFs, pf.pool, want)
		} else {
			known = known && pf.answered
		}
		if shortage != nil {
			s.Shortages = append(s.Shortages, shortage.shortage(f.PF))
		}
	}
	if before, was := v.supplies[p.Name]; !known && was {
		return before, true
	}
	return s, known
}

// publish makes known what is new. The caller has the mutex.
func (v *VFs) publish(supplies map[string]pool.Supply) {
	before := v.supplies
	if before != nil && reflect.DeepEqual(before, supplies) {
		return
	}
	v.supplies = supplies
	for _, name := range slices.Sorted(maps.Keys(supplies)) {
		for _, s := range supplies[name].Shortages {
			if !slices.Contains(before[name].Shortages, s) && s.Reason != v1alpha1.ReasonMaking {
				v.Log.Info("PF does not have the VFs that the DevicePool asks for", "devicePool", name, "pf", s.PF,
					"reason", s.Reason, "message", s.Message)
			}
		}
	}
	if v.Changed != nil {
		v.Changed()
	}
}
