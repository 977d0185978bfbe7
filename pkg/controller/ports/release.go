// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// letGo removes all finalizers of a Port that no xPU serves any more, except for those of the
// garbage collector. The finalizer of another program would keep the Function from all pods.
func letGo(ctx context.Context, c client.Client, port *v1alpha1.XPUPort) error {
	before := port.DeepCopy()
	ofCollector := []string{metav1.FinalizerDeleteDependents, metav1.FinalizerOrphanDependents}
	var strangers []string
	port.Finalizers = slices.DeleteFunc(slices.Clone(port.Finalizers), func(f string) bool {
		if f != v1alpha1.FinalizerPort && !slices.Contains(ofCollector, f) {
			strangers = append(strangers, f)
		}
		return !slices.Contains(ofCollector, f)
	})

	if len(port.Finalizers) == len(before.Finalizers) {
		return nil
	}

	if err := c.Patch(ctx, port, reconciling.Since(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizers of XPUPort %s: %w", client.ObjectKeyFromObject(port), err)
	}

	if len(strangers) > 0 {
		ctrl.LoggerFrom(ctx).Info("removed finalizers of others, which kept the Function of an "+
			"XPUPort from being used",
			"finalizers", strangers)
	}

	return nil
}

// isReleased reports whether a Port is being deleted that no xPU serves any more.
func isReleased(port client.Object) bool {
	return !port.GetDeletionTimestamp().IsZero() &&
		!controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort)
}
