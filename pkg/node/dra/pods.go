package dra

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// APIPods asks the API server about pods. It implements [Pods].
type APIPods struct {
	Client coreclient.PodsGetter
}

// Going says whether the pod is being deleted, or gone, perhaps with another one of its name in its place.
func (p APIPods) Going(ctx context.Context, pod journal.Pod) (bool, error) {
	object, err := p.Client.Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("read pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return object.UID != pod.UID || object.DeletionTimestamp != nil, nil
}
