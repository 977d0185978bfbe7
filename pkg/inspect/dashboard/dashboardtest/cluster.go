// SPDX-License-Identifier: Apache-2.0

// Package dashboardtest has a cluster for tests of the dashboard: objects in memory, which can be
// watched, and an API server that refuses or goes away when a test says so.
package dashboardtest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Cluster is a cluster in memory. It can list and watch only. Its methods are for concurrent use.
type Cluster struct {
	client.WithWatch // nil: other methods are not for the dashboard

	mu       sync.Mutex
	version  int
	objects  map[string]map[client.ObjectKey]client.Object // by kind
	watchers map[*watcher]struct{}
	refusals map[string]error // by kind, or by "kind namespace"
	down     error
}

// watcher is a watch of a kind in a namespace, or in all for "".
type watcher struct {
	kind, namespace string
	events          *watch.RaceFreeFakeWatcher
}

// NewCluster returns a cluster with objects.
func NewCluster(objects ...client.Object) *Cluster {
	c := &Cluster{
		objects:  map[string]map[client.ObjectKey]client.Object{},
		watchers: map[*watcher]struct{}{}, refusals: map[string]error{},
	}
	c.Put(objects...)
	return c
}

// IsWatchListSemanticsUnSupported makes reflectors list first.
func (c *Cluster) IsWatchListSemanticsUnSupported() bool { return true }

// kindOf returns the kind of an object or list: "Pod".
func kindOf(o any) string {
	name := fmt.Sprintf("%T", o)
	return strings.TrimSuffix(name[strings.LastIndex(name, ".")+1:], "List")
}

// Put creates objects, or replaces those of the same names.
func (c *Cluster) Put(objects ...client.Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range objects {
		c.version++
		o.SetResourceVersion(fmt.Sprint(c.version))
		kind, key := kindOf(o), client.ObjectKeyFromObject(o)
		event := watch.Modified
		if c.objects[kind] == nil {
			c.objects[kind] = map[client.ObjectKey]client.Object{}
		}
		if c.objects[kind][key] == nil {
			event = watch.Added
		}
		c.objects[kind][key] = o
		c.send(event, o)
	}
}

// Remove deletes an object.
func (c *Cluster) Remove(o client.Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.objects[kindOf(o)], client.ObjectKeyFromObject(o))
	c.send(watch.Deleted, o)
}

func (c *Cluster) send(event watch.EventType, o client.Object) {
	for w := range c.watchers {
		if w.kind == kindOf(o) && (w.namespace == "" || w.namespace == o.GetNamespace()) {
			w.events.Action(event, o.DeepCopyObject())
		}
	}
}

// Refuse makes requests for a kind fail: in a namespace, or for "" those for all namespaces. The kind
// is "Pod". Nil lets them succeed again.
func (c *Cluster) Refuse(kind, namespace string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refusals[kind+" "+namespace] = err
}

// Down makes the API server go away: watches end, and requests fail. With nil it is back.
func (c *Cluster) Down(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = err
	for w := range c.watchers {
		w.events.Stop()
		delete(c.watchers, w)
	}
}

func (c *Cluster) refusal(kind, namespace string) error {
	return cmp.Or(c.down, c.refusals[kind+" "+namespace])
}

// List implements [client.Reader].
func (c *Cluster) List(
	_ context.Context, list client.ObjectList, options ...client.ListOption,
) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.refusal(kindOf(list), o.Namespace); err != nil {
		return err
	}

	found := []runtime.Object{}
	for _, key := range slices.SortedFunc(maps.Keys(c.objects[kindOf(list)]),
		func(a, b client.ObjectKey) int { return strings.Compare(a.String(), b.String()) }) {
		if o.Namespace == "" || o.Namespace == key.Namespace {
			found = append(found, c.objects[kindOf(list)][key].DeepCopyObject())
		}
	}
	list.SetResourceVersion(fmt.Sprint(c.version))
	return meta.SetList(list, found)
}

// Watch implements [client.WithWatch]. It sends first what changed after the version of the options.
func (c *Cluster) Watch(
	_ context.Context, list client.ObjectList, options ...client.ListOption,
) (watch.Interface, error) {
	var o client.ListOptions
	o.ApplyOptions(options)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.refusal(kindOf(list), o.Namespace); err != nil {
		return nil, err
	}

	w := &watcher{kindOf(list), o.Namespace, watch.NewRaceFreeFake()}
	c.watchers[w] = struct{}{}
	if o.Raw == nil {
		o.Raw = &metav1.ListOptions{}
	}
	for key, object := range c.objects[w.kind] {
		var version, from int
		_, _ = fmt.Sscan(object.GetResourceVersion(), &version)
		_, _ = fmt.Sscan(o.Raw.ResourceVersion, &from)
		if version > from && (w.namespace == "" || key.Namespace == w.namespace) {
			w.events.Modify(object.DeepCopyObject())
		}
	}
	return w.events, nil
}
