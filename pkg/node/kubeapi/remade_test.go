// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestNodeMadeAnew: a watch that was interrupted reports a Node that was made anew as a change of the
// one before, with the same labels. What belongs to the Node has to be made again.
func TestNodeMadeAnew(t *testing.T) {
	var declarations, ports int
	api := &API{events: Events{
		DeclarationsChanged: func() { declarations++ }, PortsChanged: func() { ports++ },
	}}
	node := func(uid types.UID, rack string) *metav1.PartialObjectMetadata {
		n := nodeMetadata()
		n.UID, n.Labels = uid, map[string]string{"rack": rack}
		return n
	}

	handler := api.nodeHandler()
	for _, step := range []struct {
		before, after       *metav1.PartialObjectMetadata
		declarations, ports int
	}{
		{node("first", "7"), node("first", "7"), 0, 0},
		{node("first", "7"), node("first", "8"), 1, 0},
		{node("first", "8"), node("second", "8"), 2, 1},
	} {
		handler.OnUpdate(step.before, step.after)
		if declarations != step.declarations || ports != step.ports {
			t.Errorf("%s %v: %d and %d calls, want %d and %d", step.after.UID, step.after.Labels,
				declarations, ports, step.declarations, step.ports)
		}
	}

	handler.OnDelete(node("second", "8"))
	handler.OnAdd(node("third", "8"), false)
	if declarations != 4 || ports != 2 {
		t.Errorf("deleted and made: %d and %d calls, want 4 and 2", declarations, ports)
	}
}
