// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Change is a change of one XPUPort. Old is nil for a Port that was made, New is nil for one that
// is gone. A Port that has the name of an earlier one is another Port: the earlier one is gone
// before it is made, even if the API server's watch left out that the earlier one was deleted.
type Change struct {
	Old, New *v1alpha1.XPUPort
}

// Port is the changed Port as it is now, or as it was when it went.
func (c Change) Port() *v1alpha1.XPUPort {
	if c.New != nil {
		return c.New
	}
	return c.Old
}

// Made reports whether the Port was made.
func (c Change) Made() bool { return c.Old == nil }

// Gone reports whether the Port is gone.
func (c Change) Gone() bool { return c.New == nil }

// SpecChanged reports whether the Port was made, or its generation changed, which also changes when
// the deletion of an object begins.
func (c Change) SpecChanged() bool {
	return c.Made() || !c.Gone() && c.Old.Generation != c.New.Generation
}

// Ports are all XPUPorts that the cache has, with indexes. The Ports that its methods return are
// shared and must not be changed. Safe for concurrent use.
type Ports struct {
	mu      sync.RWMutex
	byName  map[types.NamespacedName]*entry
	indexes [numberOfIndexes]map[string][]*entry

	derived   []func(Change)
	listeners []func(Change)
	synced    func() bool
}

// entry is a Port, and where it is in the indexes.
type entry struct {
	port *v1alpha1.XPUPort
	// keys are those under which the Port is found. An index without a key does not have it.
	keys keys
	// at is its place in the list of each key.
	at [numberOfIndexes]int32
	// more are its entries for further networks.
	more []*entry
}

// NewPorts returns a model that is complete and has these Ports.
func NewPorts(ports ...*v1alpha1.XPUPort) *Ports {
	p := &Ports{
		byName: map[types.NamespacedName]*entry{}, synced: func() bool { return true },
	}
	for i := range p.indexes {
		p.indexes[i] = map[string][]*entry{}
	}
	for _, port := range ports {
		p.Set(port)
	}
	return p
}

// WatchPorts returns a model that follows the cache, which must not be restricted to some
// namespaces.
func WatchPorts(ctx context.Context, informers cache.Informers) (*Ports, error) {
	informer, err := informers.GetInformer(ctx, &v1alpha1.XPUPort{}, cache.BlockUntilSynced(false))
	if err != nil {
		return nil, fmt.Errorf("watch XPUPorts: %w", err)
	}

	p := NewPorts()
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { p.Set(o.(*v1alpha1.XPUPort)) },
		UpdateFunc: func(_, o any) { p.Set(o.(*v1alpha1.XPUPort)) },
		DeleteFunc: func(o any) {
			if unknown, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj
			}
			p.Remove(client.ObjectKeyFromObject(o.(*v1alpha1.XPUPort)))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch XPUPorts: %w", err)
	}

	p.synced = registration.HasSynced
	return p, nil
}

// Derive has update called for each change while the model is locked, before any listener is
// called, so that what it derives belongs to the model. update must not call the model. Derive is
// called before the first change.
func (p *Ports) Derive(update func(Change)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.derived = append(p.derived, update)
}

// Listen has listener called for each change from now on, one after the other, after it was called
// for each Port that there is.
func (p *Ports) Listen(listener func(Change)) {
	p.mu.Lock()
	p.listeners = append(p.listeners, listener)
	var present []*v1alpha1.XPUPort
	for _, e := range p.byName {
		present = append(present, e.port)
	}
	p.mu.Unlock()

	for _, port := range present {
		listener(Change{New: port})
	}
}

// Set makes or replaces a Port. Only one goroutine calls Set and Remove.
func (p *Ports) Set(port *v1alpha1.XPUPort) {
	p.mu.RLock()
	e := p.byName[client.ObjectKeyFromObject(port)]
	p.mu.RUnlock()

	change := Change{New: port}
	if e != nil {
		change.Old = e.port
		if change.Old.UID != port.UID {
			p.Remove(client.ObjectKeyFromObject(port))
			change.Old = nil
		}
	}
	p.apply(change)
}

// Remove ends a Port.
func (p *Ports) Remove(name types.NamespacedName) {
	p.mu.RLock()
	e := p.byName[name]
	p.mu.RUnlock()

	if e != nil {
		p.apply(Change{Old: e.port})
	}
}

func (p *Ports) apply(change Change) {
	p.mu.Lock()
	p.index(change)
	for _, update := range p.derived {
		update(change)
	}
	listeners := p.listeners
	p.mu.Unlock()

	for _, listener := range listeners {
		listener(change)
	}
}

// index brings the indexes to a change.
func (p *Ports) index(change Change) {
	name := client.ObjectKeyFromObject(change.Port())
	e := p.byName[name]
	if e == nil {
		e = &entry{}
		p.byName[name] = e
	}

	all := []keys{{}}
	if change.Gone() {
		delete(p.byName, name)
	} else {
		all = keysOf(change.New)
	}

	for len(e.more) < len(all)-1 {
		e.more = append(e.more, &entry{})
	}
	p.place(e, change.New, all[0])
	for i, more := range e.more {
		var of keys
		if i+1 < len(all) {
			of = all[i+1]
		}
		p.place(more, change.New, of)
	}
	e.more = e.more[:len(all)-1]
}

// place brings an entry to these keys.
func (p *Ports) place(e *entry, port *v1alpha1.XPUPort, of keys) {
	e.port = port
	for i := range p.indexes {
		if e.keys[i] != of[i] {
			p.leave(i, e)
			e.keys[i] = of[i]
			p.join(i, e)
		}
	}
}

// join adds an entry to an index.
func (p *Ports) join(i int, e *entry) {
	key := e.keys[i]
	if key == "" {
		return
	}
	list := p.indexes[i][key]
	if len(list) > 0 {
		e.keys[i] = list[0].keys[i] // one string for all
	}
	e.at[i] = int32(len(list))
	p.indexes[i][key] = append(list, e)
}

// leave takes an entry from an index. The last one of the list takes its place.
func (p *Ports) leave(i int, e *entry) {
	key := e.keys[i]
	if key == "" {
		return
	}

	list := p.indexes[i][key]
	last := list[len(list)-1]
	list[e.at[i]], last.at[i] = last, e.at[i]
	list[len(list)-1] = nil
	if list = list[:len(list)-1]; len(list) == 0 {
		delete(p.indexes[i], key)
	} else {
		p.indexes[i][key] = list
	}
}

// View is the model at one time, for as long as a transaction lasts.
type View struct{ ports *Ports }

// Get returns a Port, nil if there is none of the name.
func (v View) Get(name types.NamespacedName) *v1alpha1.XPUPort {
	if e := v.ports.byName[name]; e != nil {
		return e.port
	}
	return nil
}

// By returns the Ports under a key of an index, in any order.
func (v View) By(index Index, key string) []*v1alpha1.XPUPort {
	list := v.ports.indexes[index][key]
	ports := make([]*v1alpha1.XPUPort, len(list))
	for i, e := range list {
		ports[i] = e.port
	}
	return ports
}

// Transact calls decide while neither the Ports nor what is derived from them change otherwise. It
// is for decisions that change what is derived. decide must be short, and must not call Ports.
func (p *Ports) Transact(ctx context.Context, decide func(View) error) error {
	if err := p.wait(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return decide(View{p})
}

// Get is [View.Get].
func (p *Ports) Get(ctx context.Context, name types.NamespacedName) (*v1alpha1.XPUPort, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	return View{p}.Get(name), nil
}

// By is [View.By].
func (p *Ports) By(ctx context.Context, index Index, key string) ([]*v1alpha1.XPUPort, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	return View{p}.By(index, key), nil
}

// Present is [Ports.By] for callers that run once the model is complete, as reconcilers do.
func (p *Ports) Present(index Index, key string) []*v1alpha1.XPUPort {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return View{p}.By(index, key)
}

// Count returns how many Ports there are under a key of an index, as far as the model is complete.
func (p *Ports) Count(index Index, key string) int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return len(p.indexes[index][key])
}

// All returns all Ports, in any order.
func (p *Ports) All(ctx context.Context) ([]*v1alpha1.XPUPort, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}

	p.mu.RLock()
	defer p.mu.RUnlock()

	ports := make([]*v1alpha1.XPUPort, 0, len(p.byName))
	for _, e := range p.byName {
		ports = append(ports, e.port)
	}

	return ports, nil
}

// wait returns once the model has all Ports that there were when the cache was started. What is
// missing before may exist.
func (p *Ports) wait(ctx context.Context) error {
	if p.synced() || toolscache.WaitForCacheSync(ctx.Done(), p.synced) {
		return nil
	}
	return fmt.Errorf("look up XPUPorts before the cache has them: %w", context.Cause(ctx))
}
