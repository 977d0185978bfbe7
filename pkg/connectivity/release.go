// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// Release deletes everything that the test made, and checks that the Functions of its pods are free
// again. It returns whether they are.
func (t *Test) Release(ctx context.Context, report func(Check)) (ok bool, err error) {
	if !t.made {
		return true, nil
	}

	begin := time.Now()
	waiting, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	if err := deleteAll(waiting, t.API, t.namespace, t.run, &corev1.PodList{}); err != nil {
		return false, err
	}

	err = t.watchPods(waiting, func(pods map[string]corev1.Pod) bool { return len(pods) == 0 })
	c := Check{Name: counted(len(t.pods), "pod") + " are gone", OK: err == nil,
		Took: time.Since(begin)}
	if err != nil {
		c.Notes = []string{err.Error()}
	}
	report(c)

	free, err := t.checkFree(ctx)
	if err != nil {
		return false, err
	}
	report(free.bounded())

	return c.OK && free.OK, t.removeRest(ctx)
}

// removeRest deletes what the test made beside pods.
func (t *Test) removeRest(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	if t.Options.Namespace == "" {
		return deleteNamespace(ctx, t.API, t.run)
	}

	var offers client.ObjectList = &resourceapi.ResourceClaimTemplateList{}
	if t.Resource != "" {
		offers = definitions()
	}
	return deleteAll(ctx, t.API, t.namespace, t.run, offers)
}

// checkFree waits until nothing is left of what the pods had, or until the time is over.
func (t *Test) checkFree(ctx context.Context) (Check, error) {
	begin := time.Now()
	waiting, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()

	for {
		left, unknown, err := t.left(ctx)
		if err != nil {
			return Check{}, err
		}
		if len(left) == 0 || !loop.Sleep(waiting, lookInterval) {
			return Check{Name: "claims and XPUPorts are gone, and their Functions are free again",
				OK: len(left) == 0, Took: time.Since(begin), Notes: append(left, unknown...)}, nil
		}
	}
}

// left returns what is left of what the pods had, and what the user may not read.
func (t *Test) left(ctx context.Context) (left, unknown []string, err error) {
	claims, err := t.claims(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range claims {
		left = append(left, "ResourceClaim "+c.Name+" is still there")
	}

	ports, err := t.ports(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, port := range ports {
		if slices.ContainsFunc(t.pods, func(p *pod) bool { return p.port == port.UID }) {
			left = append(left, fmt.Sprintf("XPUPort %s is still there", port.Name))
		}
	}

	if t.Resource != "" {
		return left, nil, nil
	}
	kept, err := t.keptDevices(ctx)
	if apierrors.IsForbidden(err) {
		return left, []string{"you may not read ResourceSlices, which say whether the Functions " +
			"are free"}, nil
	}
	return append(left, kept...), nil, err
}

// keptDevices returns which devices of the pods no other pod gets.
func (t *Test) keptDevices(ctx context.Context) (kept []string, err error) {
	var slices resourceapi.ResourceSliceList
	if err := t.API.List(ctx, &slices); err != nil {
		return nil, err
	}

	published := map[device][]resourceapi.DeviceTaint{}
	for _, s := range slices.Items {
		if s.Spec.Driver != v1alpha1.GroupName {
			continue
		}
		for _, d := range s.Spec.Devices {
			published[device{s.Spec.Pool.Name, d.Name}] = d.Taints
		}
	}

	for _, p := range t.pods {
		for _, d := range p.devices {
			taints, isPublished := published[d]
			if !isPublished {
				kept = append(kept, fmt.Sprintf("%s of pool %s is in no ResourceSlice", d.name,
					d.pool))
			}
			for _, taint := range taints {
				if taint.Key == v1alpha1.TaintReleasePending ||
					taint.Key == v1alpha1.TaintQuarantined {
					kept = append(kept, fmt.Sprintf("%s of pool %s has the taint %s", d.name, d.pool,
						taint.Key))
				}
			}
		}
	}
	return kept, nil
}

// Cleanup deletes what tests have made that were killed or kept: in a namespace, or with "" in
// [DefaultNamespace], which goes too. It returns when that is gone.
func Cleanup(ctx context.Context, api client.WithWatch, namespace string) error {
	if namespace == "" {
		return deleteNamespace(ctx, api, anyRun)
	}

	for _, list := range []client.ObjectList{
		&corev1.PodList{}, &resourceapi.ResourceClaimTemplateList{}, definitions(),
	} {
		err := deleteAll(ctx, api, namespace, anyRun, list)
		if apierrors.IsForbidden(err) {
			continue // what the user may not delete, no test of the user has made
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// anyRun stands for the tests of all identities.
const anyRun = ""

func definitions() *unstructured.UnstructuredList {
	list := &unstructured.UnstructuredList{}
	kind := definitionKind()
	kind.Kind += "List"
	list.SetGroupVersionKind(kind)
	return list
}

// deleteAll deletes the objects of a kind that a test has made. It deletes none if the API server
// does not know the kind.
func deleteAll(
	ctx context.Context, api client.Client, namespace, run string, list client.ObjectList,
) error {
	options := []client.ListOption{client.InNamespace(namespace), client.HasLabels{Label}}
	if run != anyRun {
		options = append(options, client.MatchingLabels{Label: run})
	}
	err := api.List(ctx, list, options...)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list what to delete in namespace %s: %w", namespace, err)
	}

	objects, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	var errs []error
	for _, o := range objects {
		object := o.(client.Object)
		if err := api.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			errs = append(errs, fmt.Errorf("delete %s: %w", object.GetName(), err))
		}
	}
	return errors.Join(errs...)
}

// deleteNamespace deletes the namespace that a test has made, and waits until it is gone.
func deleteNamespace(ctx context.Context, api client.WithWatch, run string) error {
	for {
		var namespace corev1.Namespace
		err := api.Get(ctx, types.NamespacedName{Name: DefaultNamespace}, &namespace)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("namespace %s: %w", DefaultNamespace, err)
		}
		if made := namespace.Labels[Label]; made == "" || run != anyRun && run != made {
			return fmt.Errorf("namespace %s is not of this test: its label %s is %q",
				DefaultNamespace, Label, made)
		}

		if namespace.DeletionTimestamp == nil {
			err = api.Delete(ctx, &namespace)
		}
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete namespace %s: %w", DefaultNamespace, err)
		}
		if !loop.Sleep(ctx, lookInterval) {
			return fmt.Errorf("namespace %s is not gone yet: %w", DefaultNamespace,
				context.Cause(ctx))
		}
	}
}
