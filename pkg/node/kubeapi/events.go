// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
)

// maxNote is the maximum size of an event's note in bytes. The API server refuses an event with a
// longer note (NoteLengthLimit in pkg/apis/core/validation/events.go of Kubernetes).
const maxNote = 1024

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
	return recorder{broadcaster.NewRecorder(clientgoscheme.Scheme, "xpu-agent")}, nil
}

// recorder cuts notes to maxNote, because their text may come from a pod, a card or an OPI agent.
type recorder struct{ events.EventRecorder }

// Eventf implements [events.EventRecorder].
func (r recorder) Eventf(
	regarding, related runtime.Object, kind, reason, action, note string, args ...any,
) {
	const cut = "..."
	text := strings.ToValidUTF8(fmt.Sprintf(note, args...), "\uFFFD")
	if len(text) > maxNote {
		text = strings.ToValidUTF8(text[:maxNote-len(cut)], "") + cut
	}
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", text)
}
