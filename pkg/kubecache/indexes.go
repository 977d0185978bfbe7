// SPDX-License-Identifier: Apache-2.0

package kubecache

import (
	"context"
	"fmt"
	"slices"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Keys computes the keys under which an index has an object. Empty keys are left out.
type Keys[O client.Object] func(O) []string

// Indexes finds the cached objects of one namespaced kind by keys that are computed from them. The
// indexes of controller-runtime's client do the same, but have every key of such an object twice,
// once for all namespaces, which takes 600 bytes for each key that no other object has, and they
// copy each object that they find. An index changes together with the cache, so that an event of an
// object comes after the change. Safe for concurrent use.
type Indexes[O client.Object] struct {
	store toolscache.Indexer
	// synced reports whether the cache has all objects that there were when it was started.
	synced func() bool
}

// AddIndexes adds indexes to the cache of a kind, by their names. The cache must not be restricted
// to some namespaces.
func AddIndexes[O client.Object](
	ctx context.Context, c cache.Informers, object O, indexes map[string]Keys[O],
) (*Indexes[O], error) {
	informer, err := c.GetInformer(ctx, object, cache.BlockUntilSynced(false))
	if err != nil {
		return nil, fmt.Errorf("index %T: %w", object, err)
	}
	shared, ok := informer.(toolscache.SharedIndexInformer)
	if !ok {
		return nil, fmt.Errorf("index %T: its cache has one informer for each namespace", object)
	}

	if err := shared.AddIndexers(Indexers(indexes)); err != nil {
		return nil, fmt.Errorf("index %T: %w", object, err)
	}

	return NewIndexes[O](shared.GetIndexer(), shared.HasSynced), nil
}

// NewIndexes finds objects in a store that was made with [Indexers]. synced reports whether the
// store is complete; lookups wait until it is.
func NewIndexes[O client.Object](store toolscache.Indexer, synced func() bool) *Indexes[O] {
	return &Indexes[O]{store, synced}
}

// Indexers are the indexes in the form of client-go.
func Indexers[O client.Object](indexes map[string]Keys[O]) toolscache.Indexers {
	indexers := toolscache.Indexers{}
	for name, keys := range indexes {
		indexers[name] = func(o any) ([]string, error) {
			found := keys(o.(O))
			return slices.DeleteFunc(found, func(key string) bool { return key == "" }), nil
		}
	}
	return indexers
}

// By returns the objects under a key of an index, in any order. They are shared with the cache and
// must not be changed. It waits until the cache is complete, or ctx ends.
func (x *Indexes[O]) By(ctx context.Context, index, key string) ([]O, error) {
	if err := x.wait(ctx); err != nil {
		return nil, err
	}
	found, err := x.store.ByIndex(index, key)
	if err != nil {
		return nil, fmt.Errorf("look up %T by %s: %w", *new(O), index, err)
	}
	return typed[O](found), nil
}

// All returns all objects, as [Indexes.By] does.
func (x *Indexes[O]) All(ctx context.Context) ([]O, error) {
	if err := x.wait(ctx); err != nil {
		return nil, err
	}
	return typed[O](x.store.List()), nil
}

func (x *Indexes[O]) wait(ctx context.Context) error {
	if x.synced() || toolscache.WaitForCacheSync(ctx.Done(), x.synced) {
		return nil
	}
	return fmt.Errorf("look up %T: the cache is not complete: %w", *new(O), context.Cause(ctx))
}

func typed[O client.Object](found []any) []O {
	objects := make([]O, len(found))
	for i := range found {
		objects[i] = found[i].(O)
	}
	return objects
}
