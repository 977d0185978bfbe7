// SPDX-License-Identifier: Apache-2.0

package uninstall

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// wait returns when no objects of the kind exist.
func (r *run) wait(ctx context.Context, kind string) error {
	for reported := false; ; {
		list, err := r.list(ctx, kind)
		if err != nil || len(list.Items) == 0 {
			return err
		}

		if !reported {
			reported = true
			r.report("waiting until the last %s is gone (%d now)", kind, len(list.Items))
		}

		if err := r.watch(ctx, list); err != nil {
			return fmt.Errorf("watch %s: %w", kind, err)
		}
	}
}

// watch returns when the listed objects are gone, or when the API server ends the watch, which
// happens from time to time.
func (r *run) watch(ctx context.Context, list *unstructured.UnstructuredList) error {
	left := sets.New[types.UID]()
	for _, o := range list.Items {
		left.Insert(o.GetUID())
	}

	since := &client.ListOptions{
		Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()},
	}
	w, err := r.api.Watch(ctx, list, since)
	if err != nil {
		return err
	}
	defer w.Stop()

	for left.Len() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event, open := <-w.ResultChan():
			if !open || event.Type == watch.Error {
				return ctx.Err()
			}
			if o, err := meta.Accessor(event.Object); err == nil && event.Type == watch.Deleted {
				left.Delete(o.GetUID())
			}
		}
	}

	return nil
}
