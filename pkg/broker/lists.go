// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

const (
	// pageSize is how many objects a list is asked for at a time.
	pageSize = 50
	// watchBurst is how many watches of a kind may begin at once, and watchPace how long it is
	// until one more may: an API server can end each as soon as it has begun.
	watchBurst = 10
	watchPace  = time.Second
)

// annotationBytes is on an object of a cache of which only the metadata was kept, since it has more
// than Limits.ObjectBytes: how many it has.
const annotationBytes = v1alpha1.GroupName + "/bytes"

// shelf is what is kept of the objects of one tenant's cluster. Safe for concurrent use.
type shelf struct {
	*traffic
	news chan struct{} // has an element when there is a new refusal

	mu       sync.Mutex
	bytes    int                 // of all kinds
	refusals map[string]*refused // by kind
}

// refused is why a kind could not be read.
type refused struct {
	list    error // of the last list
	watch   error // of the last watch that was refused, at this time
	watched time.Time
}

// shelfKind is what is kept of one kind.
type shelfKind struct {
	*shelf
	name   string // "XPUPorts"
	of     reflect.Type
	sizes  map[types.NamespacedName]int // in bytes of JSON
	begins *rate.Limiter                // of watches
	from   toolscache.ListerWatcherWithContext
}

func newShelf(t *traffic) *shelf {
	return &shelf{traffic: t, refusals: map[string]*refused{}, news: make(chan struct{}, 1)}
}

// newInformer is an option of the cache: the informer keeps what the limits allow.
func (s *shelf) newInformer(
	from toolscache.ListerWatcher, of runtime.Object, resync time.Duration,
	indexers toolscache.Indexers,
) toolscache.SharedIndexInformer {
	kind := &shelfKind{
		shelf: s, name: kindOf(of), of: reflect.TypeOf(of),
		from:   toolscache.ToListerWatcherWithContext(from),
		sizes:  map[types.NamespacedName]int{},
		begins: rate.NewLimiter(rate.Every(watchPace), watchBurst),
	}

	bounded := &listed{ListWatch: &toolscache.ListWatch{
		ListWithContextFunc: kind.list, WatchFuncWithContext: kind.watch,
	}}
	return toolscache.NewSharedIndexInformer(bounded, of, resync, indexers)
}

// kindOf is the plural of a kind, for messages.
func kindOf(o runtime.Object) string {
	switch o.(type) {
	case *v1alpha1.XPUPort:
		return "XPUPorts"
	case *v1alpha1.XPUNetwork:
		return "XPUNetworks"
	case *v1alpha1.XPUNode:
		return "XPUNodes"
	}
	return "XPUs"
}

// listed is a ListWatch whose lists come in pages. A list that comes as a watch has no end that one
// could ask for.
type listed struct{ *toolscache.ListWatch }

func (*listed) IsWatchListSemanticsUnSupported() bool { return true }

// rememberedFor is how long a watch counts that was refused: the list that follows may well be
// taken.
const rememberedFor = time.Minute

// problem is why some kind cannot be read, nil if all can.
func (s *shelf) problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, kind := range slices.Sorted(maps.Keys(s.refusals)) {
		if err := s.refusals[kind].current(); err != nil {
			return err
		}
	}
	return nil
}

func (r *refused) current() error {
	if r.list == nil && time.Since(r.watched) < rememberedFor {
		return r.watch
	}
	return r.list
}

// note records what became of a list or watch of the kind, and returns the error as it may be
// logged. Errors that the API server is not to blame for end by themselves, and change nothing.
func (k *shelfKind) note(err error, isList bool) error {
	r, isRefusal := errors.AsType[*refusal](err)
	if err != nil && !isRefusal {
		return brief(err)
	}

	k.mu.Lock()
	defer k.mu.Unlock()

	of := k.refusals[k.name]
	if of == nil {
		of = &refused{}
		k.refusals[k.name] = of
	}

	known := of.current() != nil
	switch {
	case err == nil:
		of.list = nil
		return nil
	case isList:
		of.list = r
	default:
		of.watch, of.watched = r, time.Now()
	}

	if !known {
		select {
		case k.news <- struct{}{}:
		default:
		}
	}

	return r
}

// list reads all objects of the kind as they are now.
func (k *shelfKind) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	list, err := k.pages(ctx, options)
	return list, k.note(err, true)
}

// pages reads a page at a time. With a resource version an API server would answer from its cache,
// with all at once whatever the limit.
func (k *shelfKind) pages(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	options.ResourceVersion, options.ResourceVersionMatch = "", ""
	options.Limit, options.Continue = pageSize, ""
	sizes := map[types.NamespacedName]int{}
	var items []runtime.Object
	for {
		page, err := k.from.ListWithContext(ctx, options)
		if err != nil {
			return nil, err
		}

		at, err := meta.ListAccessor(page)
		if err != nil {
			return nil, err
		}

		kept, err := k.keepAll(page, sizes)
		if err != nil {
			return nil, err
		}

		items = append(items, kept...)
		options.Continue = at.GetContinue()
		switch {
		case options.Continue == "":
			at.SetRemainingItemCount(nil)
			if err := meta.SetList(page, items); err != nil {
				return nil, err
			}
			return page, k.replace(sizes)
		case len(kept) == 0:
			return nil, misbehaves("the API server of tenant %s says that its list of %s goes "+
				"on, with an empty page; see what "+
				"is at the kubeconfig's server", k.tenant, k.name)
		case len(items) > k.limits.Objects:
			return nil, k.tooMany()
		}
	}
}

// keepAll keeps the objects of a page, and adds their sizes.
func (k *shelfKind) keepAll(
	page runtime.Object, sizes map[types.NamespacedName]int,
) (items []runtime.Object, err error) {
	total := 0
	for _, size := range sizes {
		total += size
	}

	err = meta.EachListItem(page, func(item runtime.Object) error {
		o, ok := item.(client.Object)
		if !ok || reflect.TypeOf(item) != k.of {
			return fmt.Errorf("a list of %s has a %T", k.name, item)
		}

		size, err := k.keep(o)
		if err != nil {
			return err
		}

		sizes[client.ObjectKeyFromObject(o)] = size
		items = append(items, o)
		if total += size; total > k.limits.CacheBytes {
			return k.tooLarge()
		}
		if len(sizes) > k.limits.Objects {
			return k.tooMany()
		}

		return nil
	})

	return items, err
}

func (k *shelfKind) tooMany() error {
	return tooMuch("the cluster of tenant %s has more than %d %s; delete some there, or start "+
		"the broker with a larger "+
		"--tenant-objects", k.tenant, k.limits.Objects, k.name)
}

// keep leaves of an object what the broker needs, and of one that is too large the metadata and the
// condition Ready. It refuses those that no API server has.
func (k *shelfKind) keep(o client.Object) (size int, err error) {
	if err := k.checkIdentity(o); err != nil {
		return 0, err
	}

	trim(o)
	if size, err = sizeOf(o); err != nil || size <= k.limits.ObjectBytes {
		return size, err
	}

	large := size
	leaveOut(o)

	if size, err = sizeOf(o); err != nil || size > k.limits.ObjectBytes {
		return 0, misbehaves("%s %s of tenant %s has metadata of %d bytes, more than the %d that "+
			"--tenant-object-bytes allows; "+
			"delete it there", k.name, cutName(o.GetName()), k.tenant, size, k.limits.ObjectBytes)
	}

	o.SetAnnotations(map[string]string{annotationBytes: strconv.Itoa(large)})
	return size, nil
}

// sizeOf is how large an object is as JSON.
func sizeOf(o client.Object) (int, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return 0, fmt.Errorf("%T: %w", o, err)
	}
	return len(text), nil
}

// largeBytes is how many bytes an object has of which only the metadata was kept; 0 if all was.
func largeBytes(o client.Object) int {
	size, err := strconv.Atoi(o.GetAnnotations()[annotationBytes])
	if err != nil {
		return 0
	}
	return size
}

// trim leaves out what is not carried over.
func trim(o client.Object) {
	if node, ok := o.(*v1alpha1.XPUNode); ok {
		node.Status.Pools = nil
	}

	var labels map[string]string
	if tenant := o.GetLabels()[v1alpha1.LabelTenant]; tenant != "" {
		labels = map[string]string{v1alpha1.LabelTenant: tenant}
	}

	o.SetLabels(labels)
	o.SetAnnotations(nil)
	o.SetOwnerReferences(nil)
	o.SetManagedFields(nil)
}

// leaveOut leaves of an object its metadata, and what it says of itself.
func leaveOut(o client.Object) {
	ready := func(conditions []metav1.Condition) []metav1.Condition {
		condition := v1alpha1.ReadyOf(conditions)
		if condition.Type == "" {
			return nil
		}
		condition.Message, condition.Reason = cut(condition.Message), cutName(condition.Reason)
		return []metav1.Condition{condition}
	}
	switch o := o.(type) {
	case *v1alpha1.XPUPort:
		o.Spec = v1alpha1.XPUPortSpec{}
		o.Status = v1alpha1.XPUPortStatus{Conditions: ready(o.Status.Conditions)}
	case *v1alpha1.XPUNetwork:
		o.Spec = v1alpha1.XPUNetworkSpec{}
		o.Status = v1alpha1.XPUNetworkStatus{Conditions: ready(o.Status.Conditions)}
	case *v1alpha1.XPUNode:
		o.Status = v1alpha1.XPUNodeStatus{}
	case *v1alpha1.XPU:
		o.Spec, o.Status = v1alpha1.XPUSpec{}, v1alpha1.XPUStatus{}
	}
}

// checkIdentity refuses names that no object can have, by which it could not be told from others.
func (k *shelfKind) checkIdentity(o client.Object) error {
	name, namespace := o.GetName(), o.GetNamespace()
	_, isNamespaced := o.(*v1alpha1.XPUPort)
	switch {
	case len(validation.IsDNS1123Subdomain(name)) > 0:
		return misbehaves("the API server of tenant %s has %s with the name %q, which no object "+
			"can have; see what is at the "+
			"kubeconfig's server", k.tenant, k.name, cutName(name))
	case isNamespaced && len(validation.IsDNS1123Label(namespace)) > 0,
		!isNamespaced && namespace != "":
		return misbehaves("the API server of tenant %s has %s in the namespace %q, which they "+
			"cannot be in; see what is at "+
			"the kubeconfig's server", k.tenant, k.name, cutName(namespace))
	case o.GetUID() == "", len(o.GetUID()) > 64, len(o.GetResourceVersion()) > 64:
		return misbehaves("the API server of tenant %s has %s %s with the UID %q and the "+
			"resource version %q; an object has "+
			"both, with 64 characters at most", k.tenant, k.name, name, cutName(string(o.GetUID())),
			cutName(o.GetResourceVersion()))
	}

	return nil
}

// replace has the kind be what was listed.
func (k *shelfKind) replace(sizes map[types.NamespacedName]int) error {
	k.mu.Lock()
	defer k.mu.Unlock()

	before, after := 0, 0
	for _, size := range k.sizes {
		before += size
	}

	for _, size := range sizes {
		after += size
	}

	if k.bytes-before+after > k.limits.CacheBytes {
		return k.tooLarge()
	}

	k.bytes += after - before
	k.sizes = sizes

	return nil
}

func (k *shelfKind) tooLarge() error {
	return tooMuch("the XPUPorts, XPUNetworks, XPUNodes and XPUs of tenant %s have more than %d "+
		"bytes together; delete some "+
		"there, or start the broker with a larger --tenant-cache-bytes", k.tenant,
		k.limits.CacheBytes)
}

// change has one object of the kind be of another size; it is gone if that is 0.
func (k *shelfKind) change(key types.NamespacedName, size int) error {
	k.mu.Lock()
	defer k.mu.Unlock()

	before, has := k.sizes[key]
	switch {
	case size > 0 && !has && len(k.sizes) >= k.limits.Objects:
		return k.tooMany()
	case size > before && k.bytes-before+size > k.limits.CacheBytes:
		return k.tooLarge()
	}

	k.bytes += size - before
	if k.sizes[key] = size; size == 0 {
		delete(k.sizes, key)
	}

	return nil
}

// watch follows the kind. It ends with an error once that is more than the limits allow.
func (k *shelfKind) watch(
	ctx context.Context, options metav1.ListOptions,
) (watch.Interface, error) {
	if err := k.begins.Wait(ctx); err != nil {
		return nil, fmt.Errorf("wait to watch %s of tenant %s: %w", k.name, k.tenant, err)
	}

	ctx, stop := context.WithCancel(reporting(ctx, func(err error) { _ = k.note(err, false) }))
	from, err := k.from.WatchWithContext(ctx, options)
	if err != nil {
		stop()
		return nil, k.note(err, false)
	}

	w := &watching{from: from, result: make(chan watch.Event), ctx: ctx, stop: stop}
	go w.run(func(event watch.Event) watch.Event {
		if k.events.Wait(ctx) != nil { // it was stopped
			return event
		}
		return k.admit(event)
	})

	return w, nil
}

// admit is an event as the cache may have it.
func (k *shelfKind) admit(event watch.Event) watch.Event {
	if status, ok := event.Object.(*metav1.Status); ok {
		cutStatus(status)
		return event
	}
	if event.Type == watch.Bookmark {
		return event
	}

	o, ok := event.Object.(client.Object)
	if !ok || reflect.TypeOf(event.Object) != k.of {
		return k.failure(misbehaves("the API server of tenant %s has a %T in its watch of %s; "+
			"see what is at the kubeconfig's "+
			"server", k.tenant, event.Object, k.name))
	}

	size, err := k.keep(o)
	if event.Type == watch.Deleted {
		size = 0
	}

	if err == nil {
		err = k.change(client.ObjectKeyFromObject(o), size)
	}
	if err != nil {
		return k.failure(err)
	}

	return event
}

// failure is the event by which a watch ends that was refused.
func (k *shelfKind) failure(err error) watch.Event {
	return watch.Event{Type: watch.Error, Object: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusRequestEntityTooLarge,
		Reason:  metav1.StatusReasonRequestEntityTooLarge,
		Message: k.note(err, false).Error(),
	}}
}

// watching is a watch whose events pass through a function.
type watching struct {
	from   watch.Interface
	result chan watch.Event
	ctx    context.Context // ends when it is stopped
	stop   func()
}

func (w *watching) ResultChan() <-chan watch.Event { return w.result }

func (w *watching) Stop() {
	w.stop()
	w.from.Stop()
}

// run passes events on until the watch ends, is stopped, or has an error.
func (w *watching) run(through func(watch.Event) watch.Event) {
	defer close(w.result)
	defer w.Stop()

	for event := range w.from.ResultChan() {
		event = through(event)
		select {
		case w.result <- event:
		case <-w.ctx.Done():
			return
		}

		if event.Type == watch.Error {
			return
		}
	}
}
