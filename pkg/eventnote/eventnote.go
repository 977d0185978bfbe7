// SPDX-License-Identifier: Apache-2.0

// Package eventnote keeps the notes of Kubernetes' events short enough for the API server.
package eventnote

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
)

// Max is the maximum size of an event's note in bytes. The API server refuses an event with a longer
// note (NoteLengthLimit in pkg/apis/core/validation/events.go of Kubernetes), and recorders of
// client-go drop refused events without a word.
const Max = 1024

// Recorder cuts notes to Max, because their text may come from a pod, a card or an OPI agent. It makes
// them valid UTF-8.
type Recorder struct{ events.EventRecorder }

// Eventf implements [events.EventRecorder].
func (r Recorder) Eventf(
	regarding, related runtime.Object, kind, reason, action, note string, args ...any,
) {
	const cut = "..."
	text := strings.ToValidUTF8(fmt.Sprintf(note, args...), "\uFFFD")
	if len(text) > Max {
		text = strings.ToValidUTF8(text[:Max-len(cut)], "") + cut
	}
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", text)
}
