// SPDX-License-Identifier: Apache-2.0

package uninstall_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/uninstall"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// errBroken is the error of the call that fails.
var errBroken = errors.New("the API server is broken")

// faultyAPI is an API server of which one call fails. Objects lose their finalizers, as by
// xpu-controller, when their deletion is watched.
type faultyAPI struct {
	client.WithWatch
	calls []string // "list PodList"
	fails int      // index of the call that fails; -1 for none
	holds bool     // finalizers stay
}

func newFaultyAPI(t *testing.T, fails int, objects ...client.Object) *faultyAPI {
	t.Helper()
	scheme := runtime.NewScheme()
	must.Succeed(t, errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)))
	a := &faultyAPI{fails: fails}
	a.WithWatch = interceptor.NewClient(
		fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build(),
		interceptor.Funcs{
			List: func(
				ctx context.Context, c client.WithWatch, l client.ObjectList,
				o ...client.ListOption,
			) error {
				if err := a.call("list", l); err != nil {
					return err
				}
				return c.List(ctx, l, o...)
			},
			Delete: func(
				ctx context.Context, c client.WithWatch, o client.Object, _ ...client.DeleteOption,
			) error {
				if err := a.call("delete", o); err != nil {
					return err
				}
				return c.Delete(ctx, o)
			},
			Patch: func(
				ctx context.Context, c client.WithWatch, o client.Object, p client.Patch,
				_ ...client.PatchOption,
			) error {
				if err := a.call("patch", o); err != nil {
					return err
				}
				return c.Patch(ctx, o, p)
			},
			Watch: func(
				ctx context.Context, c client.WithWatch, l client.ObjectList,
				o ...client.ListOption,
			) (watch.Interface, error) {
				if err := a.call("watch", l); err != nil {
					return nil, err
				}
				w, err := c.Watch(ctx, l, o...)
				if err != nil || a.holds {
					return w, err
				}
				return w, release(ctx, c, l)
			},
		})

	return a
}

// call records a call and returns its error.
func (a *faultyAPI) call(verb string, o runtime.Object) error {
	gvk, err := apiutil.GVKForObject(o, a.Scheme())
	if err != nil {
		return err
	}

	a.calls = append(a.calls, verb+" "+gvk.Kind)
	if len(a.calls)-1 == a.fails {
		return errBroken
	}
	return nil
}

// release takes the finalizers away from the objects of a list.
func release(ctx context.Context, c client.Client, list client.ObjectList) error {
	return meta.EachListItem(list, func(item runtime.Object) error {
		o := item.DeepCopyObject().(client.Object)
		return c.Patch(ctx, o, client.RawPatch(types.MergePatchType,
			[]byte(`{"metadata": {"finalizers": null}}`)))
	})
}

// TestFaults fails each call to the API server in a run of its own. Run must return the error,
// because it does not know then whether pods use Functions, a controller runs, or objects are gone.
func TestFaults(t *testing.T) {
	every := func(string) bool { return true }
	for name, test := range map[string]struct {
		objects func() []client.Object
		holds   bool
		options uninstall.Options
		// tries reports whether a call is made to fail.
		tries func(call string) bool
	}{
		"with a controller": {
			objects: func() []client.Object { return append(declared(), deployment()) },
			options: uninstall.Options{Timeout: time.Minute}, tries: every,
		},
		"without finalizers and a controller": {
			objects: func() []client.Object {
				all := declared()
				for _, o := range all {
					o.SetFinalizers(nil)
				}
				return all
			},
			options: uninstall.Options{Timeout: time.Minute}, tries: every,
		},
		"by force": {
			objects: declared, holds: true, options: uninstall.Options{Force: true},
			tries: func(call string) bool {
				// The wait for objects is over at once, with or without an error.
				return strings.HasPrefix(call, "delete ") || strings.HasPrefix(call, "patch ")
			},
		},
	} {
		run := func(t *testing.T, fails int) (*faultyAPI, error) {
			api := newFaultyAPI(t, fails, test.objects()...)
			api.holds = test.holds
			options := test.options
			options.Namespace, options.Report = namespace, func(string) {}
			return api, uninstall.Run(t.Context(), api, options)
		}

		whole, err := run(t, -1)
		must.Succeed(t, err)
		for i, call := range whole.calls {
			if !test.tries(call) {
				continue
			}

			t.Run(fmt.Sprintf("%s/%d %s", name, i, call), func(t *testing.T) {
				t.Parallel()
				if _, err := run(t, i); !errors.Is(err, errBroken) {
					t.Errorf("error %v, want %v", err, errBroken)
				}
			})
		}
	}
}
