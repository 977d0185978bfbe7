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
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// Release deletes everything that the test made, and checks that the Functions of its pods are free
// again. It returns whether they are.
func (t *Test) Release(ctx context.Context, report func(Check)) (ok bool, err error) {
	if !t.made {
		return true, nil
	}

	ok, err = t.releasePods(ctx, report)
	return ok, errors.Join(err, t.removeRest(ctx))
}

// releasePods deletes the pods, and checks that nothing of what they had is in use any more.
func (t *Test) releasePods(ctx context.Context, report func(Check)) (ok bool, err error) {
	begin := time.Now()
	waiting, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	err = errors.Join(t.noteUse(waiting),
		deleteAll(waiting, t.API, t.namespace, t.run, &corev1.PodList{}))
	if err != nil {
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

	return c.OK && free.OK, nil
}

// noteUse notes which claims and devices the pods have, whether they are Ready or not.
func (t *Test) noteUse(ctx context.Context) error {
	pods, err := t.listPods(ctx)
	if err != nil {
		return err
	}
	claims, err := t.claims(ctx)
	if err != nil {
		return err
	}
	t.note(pods, claims)
	return nil
}

// note adds pods and claims to what the test knows to be its own, because neither they nor their
// devices can be read later.
func (t *Test) note(pods map[string]corev1.Pod, claims []resourceapi.ResourceClaim) {
	for _, p := range pods {
		t.owners[p.UID] = true
	}
	for _, c := range claims {
		t.owners[c.UID] = true
		devices, err := claim.Devices(&c)
		if err != nil {
			continue // not allocated yet, or not by this driver: it has no device of ours
		}
		for _, d := range devices {
			t.devices[device{d.Pool, d.Name}] = true
		}
	}
}

// owns reports whether an XPUPort is of a pod of the test.
func (t *Test) owns(s v1alpha1.XPUPortSpec) bool {
	return t.owners[s.Claim.UID] || s.Pod != nil && t.owners[s.Pod.UID]
}

// removeRest deletes what is left of what the test made: everything but pods, and pods too if that
// failed.
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
	return errors.Join(deleteAll(ctx, t.API, t.namespace, t.run, &corev1.PodList{}),
		deleteAll(ctx, t.API, t.namespace, t.run, offers))
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
			return Check{Name: t.freed(len(unknown) == 0), OK: len(left) == 0,
				Took: time.Since(begin), Notes: append(left, unknown...)}, nil
		}
	}
}

// freed says what [Test.left] has looked at.
func (t *Test) freed(slicesRead bool) string {
	switch {
	case t.Resource != "":
		return "XPUPorts are gone"
	case len(t.devices) == 0:
		return "claims and XPUPorts are gone; no pod had a Function"
	case !slicesRead:
		return "claims and XPUPorts are gone"
	}
	return "claims and XPUPorts are gone, and their Functions are free again"
}

// left returns what is left of what the pods had, and what the user may not read.
func (t *Test) left(ctx context.Context) (left, unknown []string, err error) {
	claims, err := t.claims(ctx)
	if err != nil {
		return nil, nil, err
	}
	t.note(nil, claims) // pods may have got them while they were deleted
	for _, c := range claims {
		left = append(left, "ResourceClaim "+c.Name+" is still there")
	}

	ports, err := t.ports(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, port := range ports {
		if t.owns(port.Spec) {
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
	var published resourceapi.ResourceSliceList
	if err := t.API.List(ctx, &published); err != nil {
		return nil, err
	}

	taintsOf := map[device][]resourceapi.DeviceTaint{}
	for _, s := range published.Items {
		if s.Spec.Driver != v1alpha1.GroupName {
			continue
		}
		for _, d := range s.Spec.Devices {
			taintsOf[device{s.Spec.Pool.Name, d.Name}] = d.Taints
		}
	}

	for d := range t.devices {
		taints, isPublished := taintsOf[d]
		if !isPublished {
			kept = append(kept, fmt.Sprintf("%s of pool %s is in no ResourceSlice", d.name, d.pool))
		}
		for _, taint := range taints {
			if taint.Key == v1alpha1.TaintReleasePending || taint.Key == v1alpha1.TaintQuarantined {
				kept = append(kept, fmt.Sprintf("%s of pool %s has the taint %s", d.name, d.pool,
					taint.Key))
			}
		}
	}
	slices.Sort(kept)
	return kept, nil
}

// Cleanup deletes what tests have made that were killed or kept: in a namespace, or with "" in
// [DefaultNamespace], which goes too. It returns when the pods or the namespace are gone. It is an
// error if the user may not read what tests make, except for the kind of Multus: only tests with
// [Options.Resource] make it, and need more rights.
func Cleanup(ctx context.Context, api client.WithWatch, namespace string) error {
	if namespace == "" {
		return deleteNamespace(ctx, api, anyRun)
	}

	err := errors.Join(deleteAll(ctx, api, namespace, anyRun, &corev1.PodList{}),
		deleteAll(ctx, api, namespace, anyRun, &resourceapi.ResourceClaimTemplateList{}))
	readable := api.List(ctx, definitions(), client.InNamespace(namespace), client.Limit(1))
	if !apierrors.IsForbidden(readable) {
		err = errors.Join(err, deleteAll(ctx, api, namespace, anyRun, definitions()))
	}
	if err != nil {
		return err
	}

	return awaitNoPods(ctx, api, namespace)
}

// awaitNoPods returns when no pod of a test is in the namespace.
func awaitNoPods(ctx context.Context, api client.WithWatch, namespace string) error {
	left := 0
	err := watchPods(ctx, api, namespace, client.HasLabels{Label},
		func(pods map[string]corev1.Pod) bool {
			left = len(pods)
			return left == 0
		})
	if err != nil {
		return fmt.Errorf("%s in namespace %s not gone yet: %w", counted(left, "pod"), namespace, err)
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
