package kubeapi

import (
	"context"
	"fmt"

	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
)

// NewRecorder makes a recorder of events about Kubernetes' own kinds, such as pods and nodes. It sends them in the
// background until ctx ends, never blocks, and drops what the API server does not take.
func NewRecorder(ctx context.Context, clientset kubernetes.Interface) (events.EventRecorder, error) {
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: clientset.EventsV1()})
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	context.AfterFunc(ctx, broadcaster.Shutdown)
	return broadcaster.NewRecorder(clientgoscheme.Scheme, "xpu-agent"), nil
}
