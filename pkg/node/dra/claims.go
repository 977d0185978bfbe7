package dra

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Claims asks the API server about claims. It is a [github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle.Claims].
type Claims struct {
	Client resourceclient.ResourceClaimsGetter
}

// Consumers are the pods that the claim is reserved for. isAllocated is false for a claim that is gone, or has another one
// of its name in its place, or has not the device any more.
func (c Claims) Consumers(ctx context.Context, known journal.Claim) (pods []types.UID, isAllocated bool, err error) {
	object, err := c.Client.ResourceClaims(known.Namespace).Get(ctx, known.Name, metav1.GetOptions{})
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
