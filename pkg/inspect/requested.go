// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	resourcehelper "k8s.io/component-helpers/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// podsPage is how many pods are read at once, to bound the memory in large clusters.
const podsPage = 500

// requested returns how many of each extended resource the pods on nodes have, as the kubelet counts
// them: pods that have ended have none. known is false if the user may not list pods.
func requested(
	ctx context.Context, reader client.Reader, resources map[string]bool,
) (numbers map[string]int64, known bool, err error) {
	numbers = map[string]int64{}
	page := &client.ListOptions{Limit: podsPage}
	for {
		var pods corev1.PodList
		err := reader.List(ctx, &pods, page)
		switch {
		case apierrors.IsForbidden(err):
			return nil, false, nil
		case err != nil:
			return nil, false, fmt.Errorf("list pods: %w", err)
		}

		for i := range pods.Items {
			pod := &pods.Items[i]
			if pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodSucceeded ||
				pod.Status.Phase == corev1.PodFailed {
				continue
			}
			for name, number := range resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{}) {
				if resources[string(name)] {
					numbers[string(name)] += number.Value()
				}
			}
		}

		if page.Continue = pods.Continue; page.Continue == "" {
			return numbers, true, nil
		}
	}
}
