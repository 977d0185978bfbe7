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
	// pageSize is the page size of lists.
	pageSize = 50
	// watchBurst is how many watches of a kind may start at once, and watchPace the time until one
	// more may. The rate is limited because an API server can end each watch immediately.
	watchBurst = 10
	watchPace  = time.Second
)

// annotationBytes marks a cached object that exceeded Limits.ObjectBytes, so that only its metadata
// was kept. The value is the object's original size.
const annotationBytes = v1alpha1.GroupName + "/bytes"

// cacheLimiter limits the objects that are cached of one tenant's cluster. Safe for concurrent use.
type cacheLimiter struct {
	*traffic
	newRefusal chan struct{} // has an element after a new refusal

	mu       sync.Mutex
	bytes    int                      // of all kinds
	refusals map[string]*kindRefusals // by kind
}

// kindRefusals are the reasons why a kind could not be read.
type kindRefusals struct {
	list      error // error of the last list
	watch     error // error of the last refused watch, at watchedAt
	watchedAt time.Time
}

// kindLimiter limits the cached objects of one kind.
type kindLimiter struct {
	*cacheLimiter
	name      string // "XPUPorts"
	goType    reflect.Type
	sizes     map[types.NamespacedName]int // bytes of JSON
	watchRate *rate.Limiter                // limits how often a watch starts
	source    toolscache.ListerWatcherWithContext
}

func newCacheLimiter(t *traffic) *cacheLimiter {
	return &cacheLimiter{traffic: t, refusals: map[string]*kindRefusals{},
		newRefusal: make(chan struct{}, 1)}
}

// newInformer is a cache option that makes informers obey the limits.
func (s *cacheLimiter) newInformer(
	from toolscache.ListerWatcher, of runtime.Object, resync time.Duration,
	indexers toolscache.Indexers,
) toolscache.SharedIndexInformer {
	kind := &kindLimiter{
		cacheLimiter: s, name: kindOf(of), goType: reflect.TypeOf(of),
		source:    toolscache.ToListerWatcherWithContext(from),
		sizes:     map[types.NamespacedName]int{},
		watchRate: rate.NewLimiter(rate.Every(watchPace), watchBurst),
	}

	bounded := &pagedListWatch{ListWatch: &toolscache.ListWatch{
		ListWithContextFunc: kind.list, WatchFuncWithContext: kind.watch,
	}}
	return toolscache.NewSharedIndexInformer(bounded, of, resync, indexers)
}

// kindOf returns the plural of a kind, for messages.
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

// pagedListWatch makes informers list in pages. A list streamed by a watch could not be bounded.
type pagedListWatch struct{ *toolscache.ListWatch }

func (*pagedListWatch) IsWatchListSemanticsUnSupported() bool { return true }

// refusedWatchTTL is how long the refusal of a watch counts, because the list that follows may well
// succeed.
const refusedWatchTTL = time.Minute

// problem returns why a kind cannot be read, or nil if all can.
func (s *cacheLimiter) problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, kind := range slices.Sorted(maps.Keys(s.refusals)) {
		if err := s.refusals[kind].current(); err != nil {
			return err
		}
	}
	return nil
}

func (r *kindRefusals) current() error {
	if r.list == nil && time.Since(r.watchedAt) < refusedWatchTTL {
		return r.watch
	}
	return r.list
}

// recordResult records the result of a list or watch, and returns the error shortened for logs. It
// ignores errors that are not the API server's fault, because they are temporary.
func (k *kindLimiter) recordResult(err error, isList bool) error {
	r, isRefusal := errors.AsType[*refusal](err)
	if err != nil && !isRefusal {
		return brief(err)
	}

	k.mu.Lock()
	defer k.mu.Unlock()

	of := k.refusals[k.name]
	if of == nil {
		of = &kindRefusals{}
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
		of.watch, of.watchedAt = r, time.Now()
	}

	if !known {
		select {
		case k.newRefusal <- struct{}{}:
		default:
		}
	}

	return r
}

// list reads all objects of the kind.
func (k *kindLimiter) list(
	ctx context.Context, options metav1.ListOptions,
) (runtime.Object, error) {
	list, err := k.listPages(ctx, options)
	return list, k.recordResult(err, true)
}

// listPages reads the objects page by page. The resource version is left out, because with it an
// API server answers from its cache, all objects at once whatever the limit.
func (k *kindLimiter) listPages(
	ctx context.Context, options metav1.ListOptions,
) (runtime.Object, error) {
	options.ResourceVersion, options.ResourceVersionMatch = "", ""
	options.Limit, options.Continue = pageSize, ""
	sizes := map[types.NamespacedName]int{}
	var items []runtime.Object
	for {
		page, err := k.source.ListWithContext(ctx, options)
		if err != nil {
			return nil, err
		}

		at, err := meta.ListAccessor(page)
		if err != nil {
			return nil, err
		}

		admitted, err := k.admitPage(page, sizes)
		if err != nil {
			return nil, err
		}

		items = append(items, admitted...)
		options.Continue = at.GetContinue()
		switch {
		case options.Continue == "":
			at.SetRemainingItemCount(nil)
			if err := meta.SetList(page, items); err != nil {
				return nil, err
			}
			return page, k.replaceSizes(sizes)
		case len(admitted) == 0:
			return nil, misbehaves("the API server of tenant %s says that its list of %s goes "+
				"on, with an empty page; see what "+
				"is at the kubeconfig's server", k.tenant, k.name)
		case len(items) > k.limits.Objects:
			return nil, k.tooMany()
		}
	}
}

// admitPage admits the objects of a page and adds their sizes to sizes.
func (k *kindLimiter) admitPage(
	page runtime.Object, sizes map[types.NamespacedName]int,
) (items []runtime.Object, err error) {
	total := 0
	for _, size := range sizes {
		total += size
	}

	err = meta.EachListItem(page, func(item runtime.Object) error {
		o, ok := item.(client.Object)
		if !ok || reflect.TypeOf(item) != k.goType {
			return fmt.Errorf("a list of %s has a %T", k.name, item)
		}

		size, err := k.admitObject(o)
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

func (k *kindLimiter) tooMany() error {
	return tooMuch("the cluster of tenant %s has more than %d %s; delete some there, or start "+
		"the broker with a larger "+
		"--tenant-objects", k.tenant, k.limits.Objects, k.name)
}

// admitObject removes from an object what the broker does not need. From an object that is too
// large it removes all but the metadata and the condition Ready. It refuses objects that no correct
// API server has.
func (k *kindLimiter) admitObject(o client.Object) (size int, err error) {
	if err := k.checkIdentity(o); err != nil {
		return 0, err
	}

	trim(o)
	if size, err = sizeOf(o); err != nil || size <= k.limits.ObjectBytes {
		return size, err
	}

	large := size
	stripToMetadata(o)

	if size, err = sizeOf(o); err != nil || size > k.limits.ObjectBytes {
		return 0, misbehaves("%s %s of tenant %s has metadata of %d bytes, more than the %d that "+
			"--tenant-object-bytes allows; "+
			"delete it there", k.name, cutName(o.GetName()), k.tenant, size, k.limits.ObjectBytes)
	}

	o.SetAnnotations(map[string]string{annotationBytes: strconv.Itoa(large)})
	return size, nil
}

// sizeOf returns the size of an object as JSON.
func sizeOf(o client.Object) (int, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return 0, fmt.Errorf("%T: %w", o, err)
	}
	return len(text), nil
}

// originalBytes returns the original size of an object of which only the metadata was kept, or 0.
func originalBytes(o client.Object) int {
	size, err := strconv.Atoi(o.GetAnnotations()[annotationBytes])
	if err != nil {
		return 0
	}
	return size
}

// trim removes the fields that are not copied.
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

// stripToMetadata removes all of an object but its metadata and its condition Ready.
func stripToMetadata(o client.Object) {
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

// checkIdentity refuses names, namespaces and UIDs that no object can have, because they would not
// identify it.
func (k *kindLimiter) checkIdentity(o client.Object) error {
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

// replaceSizes replaces the sizes of all objects of the kind after a list.
func (k *kindLimiter) replaceSizes(sizes map[types.NamespacedName]int) error {
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

func (k *kindLimiter) tooLarge() error {
	return tooMuch("the XPUPorts, XPUNetworks, XPUNodes and XPUs of tenant %s have more than %d "+
		"bytes together; delete some "+
		"there, or start the broker with a larger --tenant-cache-bytes", k.tenant,
		k.limits.CacheBytes)
}

// setSize records the size of one object. Size 0 means that the object is gone.
func (k *kindLimiter) setSize(key types.NamespacedName, size int) error {
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

// watch watches the kind. It ends with an error when a limit is exceeded.
func (k *kindLimiter) watch(
	ctx context.Context, options metav1.ListOptions,
) (watch.Interface, error) {
	if err := k.watchRate.Wait(ctx); err != nil {
		return nil, fmt.Errorf("wait to watch %s of tenant %s: %w", k.name, k.tenant, err)
	}

	ctx, stop := context.WithCancel(reporting(ctx,
		func(err error) { _ = k.recordResult(err, false) }))
	from, err := k.source.WatchWithContext(ctx, options)
	if err != nil {
		stop()
		return nil, k.recordResult(err, false)
	}

	w := &filteredWatch{source: from, result: make(chan watch.Event), ctx: ctx, stop: stop}
	go w.run(func(event watch.Event) watch.Event {
		if k.events.Wait(ctx) != nil { // the watch was stopped
			return event
		}
		return k.admitEvent(event)
	})

	return w, nil
}

// admitEvent returns the event to pass to the cache.
func (k *kindLimiter) admitEvent(event watch.Event) watch.Event {
	if status, ok := event.Object.(*metav1.Status); ok {
		cutStatus(status)
		return event
	}
	if event.Type == watch.Bookmark {
		return event
	}

	o, ok := event.Object.(client.Object)
	if !ok || reflect.TypeOf(event.Object) != k.goType {
		return k.failure(misbehaves("the API server of tenant %s has a %T in its watch of %s; "+
			"see what is at the kubeconfig's "+
			"server", k.tenant, event.Object, k.name))
	}

	size, err := k.admitObject(o)
	if event.Type == watch.Deleted {
		size = 0
	}

	if err == nil {
		err = k.setSize(client.ObjectKeyFromObject(o), size)
	}
	if err != nil {
		return k.failure(err)
	}

	return event
}

// failure returns the event that ends a refused watch.
func (k *kindLimiter) failure(err error) watch.Event {
	return watch.Event{Type: watch.Error, Object: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusRequestEntityTooLarge,
		Reason:  metav1.StatusReasonRequestEntityTooLarge,
		Message: k.recordResult(err, false).Error(),
	}}
}

// filteredWatch is a watch whose events pass through a function.
type filteredWatch struct {
	source watch.Interface
	result chan watch.Event
	ctx    context.Context // ends when the watch is stopped
	stop   func()
}

func (w *filteredWatch) ResultChan() <-chan watch.Event { return w.result }

func (w *filteredWatch) Stop() {
	w.stop()
	w.source.Stop()
}

// run passes events on until the watch ends, is stopped, or has an error.
func (w *filteredWatch) run(filter func(watch.Event) watch.Event) {
	defer close(w.result)
	defer w.Stop()

	for event := range w.source.ResultChan() {
		event = filter(event)
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
