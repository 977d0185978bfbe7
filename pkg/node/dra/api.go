package dra

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// API asks the API server about claims and pods. It is a [lifecycle.Claims].
type API struct {
	Client kubernetes.Interface
}

// Consumers are the pods that the claim is reserved for. isAllocated is false for a claim that is gone, or has another one
// of its name in its place, or has not the device any more.
func (a API) Consumers(ctx context.Context, known journal.Claim) (pods []types.UID, isAllocated bool, err error) {
	object, err := a.Client.ResourceV1().ResourceClaims(known.Namespace).Get(ctx, known.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, false, nil
	case err != nil:
		return nil, false, fmt.Errorf("read claim %s/%s: %w", known.Namespace, known.Name, err)
	case object.UID != known.UID || !allocated(&object.Status, known):
		return nil, false, nil
	}
	for _, consumer := range object.Status.ReservedFor {
		pods = append(pods, consumer.UID)
	}
	return pods, true, nil
}

// Going says whether the pod is being deleted, or gone, perhaps with another one of its name in its place.
func (a API) Going(ctx context.Context, pod journal.Pod) (bool, error) {
	object, err := a.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("read pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return object.UID != pod.UID || object.DeletionTimestamp != nil, nil
}
