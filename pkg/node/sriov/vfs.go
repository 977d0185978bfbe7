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
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// pause is the shortest time between two looks at one PF that is in use: pods come and go in crowds.
const pause = 200 * time.Millisecond

// retries is when a PF is looked at again that did not get its VFs, or whose VFs the inventory does not know yet. Not
// everything that frees a PF tells of it.
func retries() *wait.Backoff { return loop.Backoff(time.Second, time.Minute) }

// Snapshots knows all of the node's Functions.
type Snapshots interface {
	// Snapshot returns all Functions, sorted.
	Snapshot() []function.Function
}

// Pools knows the node's pools.
type Pools interface {
	// Pools returns the pools as they are now; known is false until they have been read once.
	Pools() (pools []pool.Pool, known bool)
}

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
	SysRoot     string
	Functions   Snapshots
	Pools       Pools
	Journal     Journal
	Assignments Assignments
	// NetdevUse says what the host does with a netdev, "" for nothing.
	NetdevUse func(netdev string) (string, error)
	// Changed, where set, is called when what [VFs.Supply] says has changed. It must not block.
	Changed func()
	// Writing, where set, is called before a number of VFs is written to a PF's sriov_numvfs.
	Writing func(pf pci.Address, n int)
	Metrics *Metrics
	Log     logr.Logger

	mutex    sync.RWMutex
	supplies map[string]pool.Supply // by DevicePool; replaced, never changed
}

// Supply says what a DevicePool with numVFs lacks on this node; known is false until that has been looked at. It does
// not block.
func (v *VFs) Supply(devicePool string) (s pool.Supply, known bool) {
	v.mutex.RLock()
	defer v.mutex.RUnlock()
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

// vfs are the VFs of a PF, sorted by address.
func (v *VFs) vfs(pf pci.Address) ([]pci.Address, error) {
	links, err := v.device(pf).VFs()
	if err != nil {
		return nil, err
	}
	vfs := make([]pci.Address, 0, len(links))
	for _, link := range links {
		vfs = append(vfs, link.Address)
	}
	slices.Sort(vfs)
	return vfs, nil
}

// Run works until ctx ends. functions and pools have a value when Functions, or pools, may have changed. Each PF is
// changed by itself: one card takes a second, another a minute. What is being changed then, Run waits for.
func (v *VFs) Run(ctx context.Context, functions, pools <-chan struct{}) error {
	watching, stop := context.WithCancel(ctx)
	defer stop()
	records := v.Journal.Subscribe(watching)
	work := &work{vfs: v, pfs: map[pci.Address]*pfWork{}, results: make(chan result)}
	defer work.running.Wait()
	for news := true; ; {
		work.plan(news)
		next := work.start(ctx)
		news = false
		select {
		case <-ctx.Done():
			return nil
		case <-functions:
			news = true
		case <-pools:
			news = true
		case <-records:
			news = true
		case r := <-work.results:
			work.note(r)
		case <-next:
		}
	}
}

// work is what is done and to be done. It belongs to the goroutine of Run.
type work struct {
	vfs     *VFs
	pfs     map[pci.Address]*pfWork
	running sync.WaitGroup
	results chan result
}

// pfWork is about one PF.
type pfWork struct {
	want   int
	driver string // other drivers may say something else
	// running says that a goroutine works on it.
	running bool
	// answered says that problem is what came of want, nil if it has its VFs; touched, that the PF was changed, or that
	// this was tried.
	answered bool
	problem  *problem
	touched  bool
	ended    time.Time
	// due is when it is looked at next, zero for not at all. As long as it is for the same problem, or for none, delays
	// become longer; nil is for the shortest.
	due     time.Time
	pauses  *wait.Backoff
	delayed *problem
}

// result is what came of the work on a PF, or how far it is.
type result struct {
	pf      pci.Address
	want    int
	problem *problem
	// making says that the PF is just being changed.
	making bool
}

// plan finds out what is wanted of which PF, and says what is known of each DevicePool. news says that pools, Functions
// or the journal may have changed.
func (w *work) plan(news bool) {
	pools, known := w.vfs.Pools.Pools()
	if !known {
		return
	}
	demands := demandsOf(pools, w.vfs.Functions.Snapshot())
	now := time.Now()
	for address, d := range demands.pfs {
		pf := w.pfs[address]
		if pf == nil {
			pf = &pfWork{want: -1}
			w.pfs[address] = pf
		}
		pf.plan(d, now, news)
	}
	maps.DeleteFunc(w.pfs, func(address pci.Address, pf *pfWork) bool {
		_, wanted := demands.pfs[address]
		return !wanted && !pf.running
	})
	w.vfs.publish(w.supplies(demands))
}

// plan decides when the PF is looked at next.
func (p *pfWork) plan(d demand, now time.Time, news bool) {
	if p.want != d.want {
		p.answered, p.problem = false, nil
	}
	if p.want != d.want || p.driver != d.pf.Driver {
		p.want, p.driver = d.want, d.pf.Driver
		p.due, p.pauses, p.touched = now, nil, false
	}
	switch {
	case p.running:
	case d.pf.NumVFs == d.want:
		p.answered, p.problem, p.due, p.pauses = true, nil, time.Time{}, nil
	case p.problem == nil && p.due.IsZero():
		p.due = now // somebody else changed it
	case p.problem != nil && !p.touched && news:
		// Who had it may have it no more. What the card refused, it refuses until something else passes: time.
		if soon := p.ended.Add(pause); soon.Before(p.due) {
			p.due = soon
		}
	}
}

// start begins what is due, and returns a channel that says when more is.
func (w *work) start(ctx context.Context) <-chan time.Time {
	var next time.Time
	for address, pf := range w.pfs {
		switch {
		case pf.running || pf.due.IsZero():
		case !pf.due.After(time.Now()):
			pf.running, pf.touched = true, false
			want := pf.want
			w.running.Go(func() { w.give(ctx, address, want) })
		case next.IsZero() || pf.due.Before(next):
			next = pf.due
		}
	}
	if next.IsZero() {
		return nil
	}
	return time.After(time.Until(next))
}

func (w *work) give(ctx context.Context, pf pci.Address, want int) {
	p := w.vfs.give(ctx, pf, want, func(have int) {
		w.tell(ctx, result{pf: pf, want: want, making: true, problem: problemf(v1alpha1.ReasonMaking,
			"is being changed from %d to %d VFs", have, want)})
	})
	w.tell(ctx, result{pf: pf, want: want, problem: p})
}

func (w *work) tell(ctx context.Context, r result) {
	select {
	case w.results <- r:
	case <-ctx.Done():
	}
}

// note takes a result in.
func (w *work) note(r result) {
	pf := w.pfs[r.pf]
	if pf.touched = pf.touched || r.making; r.want == pf.want {
		pf.answered, pf.problem = true, r.problem
	}
	if r.making {
		return
	}
	pf.running, pf.ended = false, time.Now()
	switch {
	case r.want != pf.want:
		pf.due = pf.ended
	case r.problem != nil && r.problem.final:
		pf.due = time.Time{}
	default:
		if pf.pauses == nil || !reflect.DeepEqual(pf.delayed, r.problem) {
			pf.delayed, pf.pauses = r.problem, retries()
		}
		pf.due = pf.ended.Add(pf.pauses.Step())
	}
}

// supplies says what is known of each DevicePool.
func (w *work) supplies(d demands) map[string]pool.Supply {
	supplies := map[string]pool.Supply{}
	for name, named := range d.pools {
		s := pool.Supply{Generation: d.generations[name], PFs: len(named), Shortages: slices.Clone(d.conflicts[name])}
		known := true
		for _, address := range named {
			if pf, wanted := w.pfs[address], d.pfs[address]; !wanted.inConflict(name) {
				known = known && pf.answered
				if pf.problem != nil {
					s.Shortages = append(s.Shortages, pf.problem.shortage(address))
				}
			}
		}
		if before, was := w.vfs.Supply(name); !known && was {
			s, known = before, true
		}
		if known {
			slices.SortFunc(s.Shortages, func(a, b v1alpha1.Shortage) int { return cmp.Compare(a.PF, b.PF) })
			supplies[name] = s
		}
	}
	return supplies
}

// publish makes known what is new.
func (v *VFs) publish(supplies map[string]pool.Supply) {
	before := v.supplies // nobody else writes it
	if before != nil && reflect.DeepEqual(before, supplies) {
		return
	}
	v.mutex.Lock()
	v.supplies = supplies
	v.mutex.Unlock()
	for _, name := range slices.Sorted(maps.Keys(supplies)) {
		v.report(name, before[name].Shortages, supplies[name].Shortages)
	}
	if v.Changed != nil {
		v.Changed()
	}
}

// report logs what a DevicePool lacks that it did not lack before.
func (v *VFs) report(devicePool string, before, now []v1alpha1.Shortage) {
	for _, s := range now {
		if !slices.Contains(before, s) && s.Reason != v1alpha1.ReasonMaking {
			v.Log.Info("PF does not have the VFs that the DevicePool asks for", "devicePool", devicePool, "pf", s.PF,
				"reason", s.Reason, "message", s.Message)
		}
	}
}

// demands are what DevicePools ask for.
type demands struct {
	pfs map[pci.Address]demand
	// pools are the PFs that each DevicePool with numVFs names, conflicts those of which an earlier one wants another
	// number, and generations those of the DevicePools.
	pools       map[string][]pci.Address
	conflicts   map[string][]v1alpha1.Shortage
	generations map[string]int64
}

// demand is how many VFs are wanted of one PF.
type demand struct {
	pf   function.Function
	want int
	// pool is the DevicePool that decided, and losers are those that want another number.
	pool   string
	losers []string
}

func (d demand) inConflict(devicePool string) bool { return slices.Contains(d.losers, devicePool) }

// demandsOf reads what pools ask for. Where two want different numbers for a PF, the one counts that a Function would
// belong to which both select; see [pool.Assign].
func demandsOf(pools []pool.Pool, functions []function.Function) demands {
	d := demands{
		pfs: map[pci.Address]demand{}, pools: map[string][]pci.Address{}, conflicts: map[string][]v1alpha1.Shortage{},
		generations: map[string]int64{},
	}
	for _, p := range slices.SortedFunc(slices.Values(pools), func(a, b pool.Pool) int {
		return cmp.Or(-cmp.Compare(a.Spec.Priority, b.Spec.Priority), cmp.Compare(a.Name, b.Name))
	}) {
		if p.Spec.NumVFs == nil {
			continue
		}
		d.pools[p.Name], d.generations[p.Name] = []pci.Address{}, p.Generation
		for _, pf := range p.NamedPFs(functions) {
			d.pools[p.Name] = append(d.pools[p.Name], pf.PF)
			d.ask(p.Name, pf, int(*p.Spec.NumVFs))
		}
	}
	return d
}

func (d *demands) ask(devicePool string, pf function.Function, want int) {
	first, asked := d.pfs[pf.PF]
	switch {
	case !asked:
		d.pfs[pf.PF] = demand{pf: pf, want: want, pool: devicePool}
	case first.want != want:
		first.losers = append(first.losers, devicePool)
		d.pfs[pf.PF] = first
		p := problemf(v1alpha1.ReasonConflict, "is to have %d VFs by DevicePool %s, which comes first, and %d by this one: "+
			"make numVFs the same, or name the PF in one of them only", first.want, first.pool, want)
		d.conflicts[devicePool] = append(d.conflicts[devicePool], p.shortage(pf.PF))
	}
}
