// SPDX-License-Identifier: Apache-2.0

package kubecache_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/opiproject/xpu-device-plugin/pkg/kubecache"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const byLabels = "labels"

// labelled is a ConfigMap that is found by its labels.
func labelled(name string, labels ...string) *corev1.ConfigMap {
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	o.Labels = map[string]string{}
	for _, l := range labels {
		o.Labels[l] = ""
	}
	return o
}

func newStore() toolscache.Indexer {
	return toolscache.NewIndexer(toolscache.MetaNamespaceKeyFunc,
		kubecache.Indexers(map[string]kubecache.Keys[*corev1.ConfigMap]{
			byLabels: func(o *corev1.ConfigMap) (keys []string) {
				for l := range o.Labels {
					keys = append(keys, l)
				}
				return keys
			},
		}))
}

func always() bool { return true }

func TestIndexes(t *testing.T) {
	store := newStore()
	indexes := kubecache.NewIndexes[*corev1.ConfigMap](store, always)
	want := func(key string, names ...string) {
		t.Helper()
		found, err := indexes.By(t.Context(), byLabels, key)
		must.Succeed(t, err)

		var got []string
		for _, o := range found {
			got = append(got, o.Name)
		}
		if slices.Sort(got); !slices.Equal(got, names) {
			t.Errorf("objects by %q: %v, want %v", key, got, names)
		}
	}

	must.Succeed(t, store.Add(labelled("a", "red", "")))
	must.Succeed(t, store.Add(labelled("b", "red", "blue")))
	want("red", "a", "b")
	want("blue", "b")
	want("") // the empty key is left out

	must.Succeed(t, store.Update(labelled("b", "blue")))
	want("red", "a")
	must.Succeed(t, store.Delete(labelled("b")))
	want("blue")

	all, err := indexes.All(t.Context())
	must.Succeed(t, err)
	if len(all) != 1 || all[0].Name != "a" {
		t.Errorf("all are %v, want a", all)
	}
	if _, err := indexes.By(t.Context(), "other", "red"); err == nil {
		t.Error("an index that does not exist has objects")
	}
}

// TestIndexesWait: what is missing in a cache that is not complete may exist, so that a lookup waits
// rather than answer that there is nothing.
func TestIndexesWait(t *testing.T) {
	store := newStore()
	var complete atomic.Bool
	asked := make(chan struct{}, 100)
	indexes := kubecache.NewIndexes[*corev1.ConfigMap](store, func() bool {
		select {
		case asked <- struct{}{}:
		default:
		}
		return complete.Load()
	})

	gaveUp, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := indexes.By(gaveUp, byLabels, "red"); !errors.Is(err, context.Canceled) {
		t.Errorf("a lookup before the cache is complete: %v, want %v", err, context.Canceled)
	}
	if _, err := indexes.All(gaveUp); !errors.Is(err, context.Canceled) {
		t.Errorf("a list before the cache is complete: %v, want %v", err, context.Canceled)
	}

	for len(asked) > 0 {
		<-asked
	}

	result := make(chan error)
	go func() {
		found, err := indexes.By(t.Context(), byLabels, "red")
		if err == nil && len(found) != 1 {
			err = fmt.Errorf("found %d objects, want the one that came meanwhile", len(found))
		}
		result <- err
	}()
	<-asked
	must.Succeed(t, store.Add(labelled("a", "red")))
	complete.Store(true)
	must.Succeed(t, <-result)
}
