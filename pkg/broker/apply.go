// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// fieldOwner identifies the broker in the managed fields of everything that it writes.
const fieldOwner = client.FieldOwner("xpu-broker")

// configuration returns the object for server-side apply, without the given fields.
func configuration(
	o client.Object, scheme *runtime.Scheme, without ...string,
) (*unstructured.Unstructured, error) {
	gvk, err := apiutil.GVKForObject(o, scheme)
	if err != nil {
		return nil, err
	}

	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return nil, err
	}

	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(gvk)
	unstructured.RemoveNestedField(content, "metadata", "creationTimestamp")

	for _, field := range without {
		delete(content, field)
	}

	return u, nil
}

// apply writes the object by server-side apply, without the given fields, such as a status that is
// written separately.
func apply(ctx context.Context, c client.Client, o client.Object, without ...string) error {
	u, err := configuration(o, c.Scheme(), without...)
	if err == nil {
		err = c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), fieldOwner,
			client.ForceOwnership)
	}
	if err != nil {
		return fmt.Errorf("apply %T %s: %w", o, client.ObjectKeyFromObject(o), err)
	}
	return nil
}

// applyStatus writes the object's status by server-side apply. Only the name and the status of the
// object count.
func applyStatus(ctx context.Context, c client.Client, o client.Object) error {
	u, err := configuration(o, c.Scheme(), "spec")
	if err == nil {
		err = c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), fieldOwner,
			client.ForceOwnership)
	}
	if err != nil {
		return fmt.Errorf("apply status of %T %s: %w", o, client.ObjectKeyFromObject(o), err)
	}
	return nil
}
