// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"context"
	"fmt"

	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/pkg/eventnote"
)

// NewRecorder returns a recorder of events about Kubernetes' own kinds, such as pods and nodes. It
// sends events in the background until ctx ends, never blocks, cuts long notes, and drops events
// that the API server does not accept.
func NewRecorder(
	ctx context.Context, clientset kubernetes.Interface,
) (events.EventRecorder, error) {
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: clientset.EventsV1()})
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	context.AfterFunc(ctx, broadcaster.Shutdown)
	return eventnote.Recorder{
		EventRecorder: broadcaster.NewRecorder(clientgoscheme.Scheme, "xpu-agent"),
	}, nil
}
