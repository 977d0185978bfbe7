// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
)

// probeEvery is the polling interval for a starting component, which sends no event when it is
// ready.
const probeEvery = 30 * time.Millisecond

// healthy waits until url answers 200. It does not verify the certificate, because only this
// cluster listens at an address in this namespace.
func healthy(ctx context.Context, url string) error {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()

	client := &http.Client{Transport: transport, Timeout: 5 * time.Second}
	var last string
	err := wait.PollUntilContextCancel(ctx, probeEvery, true,
		func(ctx context.Context) (bool, error) {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return false, err
			}

			response, err := client.Do(request)
			if err != nil {
				last = err.Error()
				return false, nil
			}

			response.Body.Close()
			last = response.Status

			return response.StatusCode == http.StatusOK, nil
		})

	if err != nil {
		return fmt.Errorf("%s: %w (last answer: %s)", url, context.Cause(ctx), last)
	}

	return nil
}

// nodeReady waits until the node is Ready with this boot id. Without the boot id, the status of an
// earlier boot would count.
func nodeReady(ctx context.Context, nodes corev1client.NodeInterface, name, bootID string) error {
	selector := fields.OneTermEqualSelector("metadata.name", name).String()
	source := &cache.ListWatch{
		ListWithContextFunc: func(
			ctx context.Context, options metav1.ListOptions,
		) (runtime.Object, error) {
			options.FieldSelector = selector
			return nodes.List(ctx, options)
		},
		WatchFuncWithContext: func(
			ctx context.Context, options metav1.ListOptions,
		) (watch.Interface, error) {
			options.FieldSelector = selector
			return nodes.Watch(ctx, options)
		},
	}

	last := "it has not registered"
	_, err := watchtools.UntilWithSync(ctx, source, &corev1.Node{}, nil,
		func(e watch.Event) (bool, error) {
			n, ok := e.Object.(*corev1.Node)
			if !ok || e.Type == watch.Deleted {
				return false, nil
			}

			last = "it is of an earlier life"
			if n.Status.NodeInfo.BootID != bootID {
				return false, nil
			}

			for _, c := range n.Status.Conditions {
				if c.Type == corev1.NodeReady {
					last = c.Message
					return c.Status == corev1.ConditionTrue, nil
				}
			}

			return false, nil
		})

	if err != nil {
		return fmt.Errorf("%s is not Ready: %s: %w", name, last, context.Cause(ctx))
	}

	return nil
}

// defaultServiceAccount waits until pods can be created in the default namespace.
func defaultServiceAccount(
	ctx context.Context, accounts corev1client.ServiceAccountInterface,
) error {
	source := &cache.ListWatch{
		ListWithContextFunc: func(
			ctx context.Context, options metav1.ListOptions,
		) (runtime.Object, error) {
			return accounts.List(ctx, options)
		},
		WatchFuncWithContext: func(
			ctx context.Context, options metav1.ListOptions,
		) (watch.Interface, error) {
			return accounts.Watch(ctx, options)
		},
	}

	_, err := watchtools.UntilWithSync(ctx, source, &corev1.ServiceAccount{}, nil,
		func(e watch.Event) (bool, error) {
			a, ok := e.Object.(*corev1.ServiceAccount)
			return ok && a.Name == "default", nil
		})

	if err != nil {
		return fmt.Errorf("ServiceAccount default/default is not there: %w", context.Cause(ctx))
	}

	return nil
}
