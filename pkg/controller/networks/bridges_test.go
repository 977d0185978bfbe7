// SPDX-License-Identifier: Apache-2.0

package networks

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
)

// TestNetworkAtStart: a controller that starts keeps the status of a network that Ports need until
// it knows the state of the network's bridges, rather than write that no Port needs it.
func TestNetworkAtStart(t *testing.T) {
	port := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "port"},
		Spec: v1alpha1.XPUPortSpec{XPU: "card", Networks: []v1alpha1.XPUPortNetwork{
			{Name: "red"}, {Name: "blue"},
		}},
	}
	o := Options{Ports: model.NewPorts(port)}
	started := newBridges(reconciling.Cluster{}, o)

	if got := started.OfXPU(t.Context(), "card"); len(got) != 2 ||
		!slices.Contains(got, Bridge{"red", "card"}) || !slices.Contains(got, Bridge{"blue", "card"}) {
		t.Errorf("bridges of the XPU: %v, want those that the Port needs", got)
	}

	network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}
	network.Status.XPUs, network.Status.ReadyXPUs = 1, 1
	message, err := (&reconciler{Options: o, bridges: started}).sumUp(t.Context(), network)
	if message != "" || err != nil {
		t.Errorf("message %q, error %v; want that nothing is known yet", message, err)
	}
	if network.Status.XPUs != 1 || network.Status.ReadyXPUs != 1 {
		t.Errorf("counts became %d and %d", network.Status.XPUs, network.Status.ReadyXPUs)
	}
}

// TestGoneBridgeIsForgotten: nothing is kept of a bridge whose XPU was deleted while its agent
// failed.
func TestGoneBridgeIsForgotten(t *testing.T) {
	r := newBridges(reconciling.Cluster{}, Options{
		Ports: model.NewPorts(), Sessions: sessions.New(sessions.Options{}),
	})
	r.changed = func(string) {}
	b := Bridge{"blue", "card"}

	r.begin(b)
	r.retries.When(b)
	r.note(t.Context(), b, true, errNoXPU)
	if n := r.retries.NumRequeues(b); n > 0 || len(r.all)+len(r.byXPU)+len(r.byNetwork) > 0 {
		t.Errorf("%d attempts are kept, and %v", n, r.all)
	}
}
