// SPDX-License-Identifier: Apache-2.0

// Package uninstall deletes the objects declared for xpu-device-plugin. It deletes them in an order
// in which they can go, because xpu-controller removes some finalizers only while other objects
// exist. It deletes no program and no CRD.
package uninstall

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Options of [Run].
type Options struct {
	// Namespace is the namespace of xpu-controller. Services of OPI agents are deleted there.
	Namespace string
	// Timeout bounds the wait for objects to go, in total.
	Timeout time.Duration
	// Force removes the finalizers of objects that have not gone in time, or at once if no
	// xpu-controller is ready. Their OPI agents are not asked, and may continue to serve their
	// ports.
	Force bool
	// Report receives a sentence about each step.
	Report func(string)
}

// ErrNoController is returned if objects have finalizers and no xpu-controller is there to remove
// them.
var ErrNoController = errors.New("no pod of xpu-controller is ready, and only it takes the " +
	"finalizers of objects away")

// kinds returns the kinds in the order of deletion. When an XPUTenant goes, the broker deletes the
// copies of the tenant's objects. DevicePools may create XPUPorts ahead of pods, XPUPorts use
// XPUNetworks, and both use XPUs.
func kinds() []string { return []string{"XPUTenant", "DevicePool", "XPUPort", "XPUNetwork", "XPU"} }

// Run deletes all objects of the kinds that people declare, and returns when they are gone. It may
// be repeated at any time. If pods use Functions, it changes nothing and returns an [InUseError].
// If objects do not go, it returns a [RemainsError]. A kind that the API server does not know has
// no objects.
func Run(ctx context.Context, api client.WithWatch, o Options) error {
	r := &run{api: api, Options: o}
	users, err := r.users(ctx)
	if err != nil {
		return err
	}
	if len(users) > 0 {
		return &InUseError{Pods: users}
	}

	if err := r.needController(ctx); err != nil {
		if !o.Force || !errors.Is(err, ErrNoController) {
			return err
		}
		r.Timeout = 0
	}

	patience, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()

	for _, kind := range kinds() {
		if err := r.remove(ctx, patience, kind); err != nil {
			return err
		}
	}

	return nil
}

// DryRun reports what [Run] would delete, in the same order, and changes nothing. It returns the
// error with which Run would begin.
func DryRun(ctx context.Context, api client.WithWatch, o Options) error {
	r := &run{api: api, Options: o}
	for _, kind := range kinds() {
		if err := r.listDeletions(ctx, kind); err != nil {
			return err
		}
	}

	users, err := r.users(ctx)
	if err != nil {
		return err
	}
	if len(users) > 0 {
		return &InUseError{Pods: users}
	}
	err = r.needController(ctx)
	if o.Force && errors.Is(err, ErrNoController) {
		return nil
	}
	return err
}

// listDeletions reports the objects of a kind that would be deleted, and before XPUs the Services.
func (r *run) listDeletions(ctx context.Context, kind string) error {
	if kind == "XPU" {
		services, err := r.services(ctx)
		if err != nil {
			return err
		}
		for i := range services {
			r.report("Service %s would be deleted", key(&services[i]))
		}
	}

	list, err := r.list(ctx, kind)
	if err != nil {
		return err
	}
	for i := range list.Items {
		o := &list.Items[i]
		switch {
		case isManagedByBroker(o):
			r.report("XPU %s would be waited for: %s", key(o), reasonOf(o))
		case o.GetDeletionTimestamp() != nil:
			r.report("%s %s is being deleted, and would be waited for", kind, key(o))
		default:
			r.report("%s %s would be deleted", kind, key(o))
		}
	}
	return nil
}

type run struct {
	Options
	api client.WithWatch
}

func (r *run) report(format string, args ...any) { r.Report(fmt.Sprintf(format, args...)) }

// needController returns [ErrNoController] if objects have finalizers and there is no controller.
func (r *run) needController(ctx context.Context) error {
	var deployments appsv1.DeploymentList
	err := r.api.List(ctx, &deployments, client.InNamespace(r.Namespace),
		client.MatchingLabels{"app.kubernetes.io/name": "xpu-controller"})
	if err != nil {
		return fmt.Errorf("list Deployments of namespace %s: %w", r.Namespace, err)
	}

	isReady := func(d appsv1.Deployment) bool { return d.Status.ReadyReplicas > 0 }
	if slices.ContainsFunc(deployments.Items, isReady) {
		return nil
	}

	for _, kind := range kinds() {
		list, err := r.list(ctx, kind)
		if err != nil {
			return err
		}

		hasFinalizers := func(o unstructured.Unstructured) bool {
			return len(o.GetFinalizers()) > 0
		}
		if slices.ContainsFunc(list.Items, hasFinalizers) {
			return fmt.Errorf("namespace %s: %w", r.Namespace, ErrNoController)
		}
	}

	return nil
}

// remove deletes the objects of a kind and waits until they are gone, or patience ends. It only
// waits for XPUs that a broker of another cluster made, because the broker would create them again.
func (r *run) remove(ctx, patience context.Context, kind string) error {
	if kind == "XPU" {
		if err := r.removeServices(ctx); err != nil {
			return err
		}
	}

	list, err := r.list(ctx, kind)
	if err != nil {
		return err
	}

	for i := range list.Items {
		o := &list.Items[i]
		if o.GetDeletionTimestamp() != nil || isManagedByBroker(o) {
			continue
		}
		if err := r.delete(ctx, o, kind, key(o)); err != nil {
			return err
		}
	}

	err = r.wait(patience, kind)
	if err == nil || patience.Err() == nil || ctx.Err() != nil {
		return err
	}

	return r.handleRemaining(ctx, kind)
}

// handleRemaining handles objects that have not gone in time: it forces their deletion if that is
// allowed, or returns a [RemainsError].
func (r *run) handleRemaining(ctx context.Context, kind string) error {
	list, err := r.list(ctx, kind)
	switch {
	case err != nil:
		return err
	case len(list.Items) == 0:
		return nil
	case !r.Force:
		return remains(kind, list.Items)
	}

	if kind == "XPUPort" {
		if err := r.removePolicy(ctx); err != nil {
			return err
		}
	}

	for i := range list.Items {
		if err := r.forceDelete(ctx, kind, &list.Items[i]); err != nil {
			return err
		}
	}

	return nil
}

// forceDelete deletes an object without waiting for its finalizers.
func (r *run) forceDelete(ctx context.Context, kind string, o *unstructured.Unstructured) error {
	if err := r.api.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s %s: %w", kind, key(o), err)
	}
	if err := r.removeFinalizers(ctx, o); err != nil {
		return fmt.Errorf("take the finalizers of %s %s away: %w", kind, key(o), err)
	}
	r.report("%s %s is deleted by force, and no OPI agent was asked", kind, key(o))
	return nil
}

// removeFinalizers retries for a while, because an API server enforces a policy for some moments
// after its binding was deleted.
func (r *run) removeFinalizers(ctx context.Context, o *unstructured.Unstructured) error {
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"finalizers": null}}`))
	var failed error
	_ = wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, 10*time.Second, true,
		func(ctx context.Context) (done bool, _ error) {
			failed = client.IgnoreNotFound(r.api.Patch(ctx, o, patch))
			// a policy answers with either
			return !apierrors.IsInvalid(failed) && !apierrors.IsForbidden(failed), nil
		})

	return failed
}

// removeServices deletes the Services from which xpu-controller makes XPUs.
func (r *run) removeServices(ctx context.Context) error {
	services, err := r.services(ctx)
	if err != nil {
		return err
	}

	for i := range services {
		o := &services[i]
		if err := r.delete(ctx, o, "Service", key(o)); err != nil {
			return err
		}
	}

	return nil
}

// services returns the Services from which xpu-controller makes XPUs.
func (r *run) services(ctx context.Context) ([]corev1.Service, error) {
	var services corev1.ServiceList
	if err := r.api.List(ctx, &services, client.InNamespace(r.Namespace),
		client.HasLabels{v1alpha1.LabelAgents}); err != nil {
		return nil, fmt.Errorf("list Services of namespace %s: %w", r.Namespace, err)
	}
	return services.Items, nil
}

// removePolicy deletes the policy that allows only xpu-controller and members of system:masters to
// remove finalizers of XPUPorts.
func (r *run) removePolicy(ctx context.Context) error {
	binding := &unstructured.Unstructured{}
	binding.SetAPIVersion("admissionregistration.k8s.io/v1")
	binding.SetKind("ValidatingAdmissionPolicyBinding")
	binding.SetName("xpuports")
	return r.delete(ctx, binding, binding.GetKind(), binding.GetName())
}

func (r *run) delete(ctx context.Context, o client.Object, kind, name string) error {
	err := r.api.Delete(ctx, o)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete %s %s: %w", kind, name, err)
	}

	r.report("%s %s is deleted", kind, name)
	return nil
}

// list lists the objects of a kind. It returns none if the CRD is not installed.
func (r *run) list(ctx context.Context, kind string) (*unstructured.UnstructuredList, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind(kind + "List"))
	err := r.api.List(ctx, list)
	if isUnknown(err) {
		return list, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", kind, err)
	}

	return list, nil
}

// isUnknown reports whether an error means that the API server does not know a kind.
func isUnknown(err error) bool { return meta.IsNoMatchError(err) || apierrors.IsNotFound(err) }

// isManagedByBroker reports whether an object is an XPU that a broker keeps in a tenant's cluster.
func isManagedByBroker(o *unstructured.Unstructured) bool {
	return o.GetKind() == "XPU" && o.GetLabels()[v1alpha1.LabelTenant] != ""
}

// key returns the name of an object, with its namespace if it has one.
func key(o client.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}
