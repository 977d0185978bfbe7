// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// Load creates the objects of a snapshot. It also writes the status of Nodes and ResourceClaims,
// because no kubelet and no controller does. A Node without status.allocatable gets some, because
// otherwise the scheduler places no pods there. An existing namespace gets the labels; any other
// existing object is an error.
func Load(ctx context.Context, c client.Client, from *snapshot.Snapshot) error {
	for _, object := range from.Objects() {
		made := object.DeepCopyObject().(client.Object)
		made.SetResourceVersion("")
		made.SetUID("")
		err := c.Create(ctx, made)
		if namespace, is := made.(*corev1.Namespace); is && apierrors.IsAlreadyExists(err) {
			err = label(ctx, c, namespace)
		}
		if err != nil {
			return fmt.Errorf("create %T %s: %w", made, client.ObjectKeyFromObject(made), err)
		}
		if !withStatus(made, object) {
			continue
		}
		if err := c.Status().Update(ctx, made); err != nil {
			return fmt.Errorf("status of %T %s: %w", made, client.ObjectKeyFromObject(made), err)
		}
	}
	return nil
}

// label adds the labels of a namespace to the existing namespace with its name.
func label(ctx context.Context, c client.Client, namespace *corev1.Namespace) error {
	existing := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace.Name}}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"labels": namespace.Labels},
	})
	if err != nil {
		return err
	}
	return c.Patch(ctx, existing, client.RawPatch(types.MergePatchType, patch))
}

// withStatus copies the status from the original object, and reports whether it must be written.
func withStatus(made client.Object, from runtime.Object) bool {
	switch made := made.(type) {
	case *corev1.Node:
		made.Status = from.(*corev1.Node).Status
		if len(made.Status.Allocatable) == 0 {
			made.Status.Allocatable = corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("1000"),
				corev1.ResourceMemory: resource.MustParse("1000Gi"),
				corev1.ResourcePods:   resource.MustParse("1000"),
			}
		}

		return true
	case *resourceapi.ResourceClaim:
		made.Status = from.(*resourceapi.ResourceClaim).Status
		return made.Status.Allocation != nil
	}
	return false
}
