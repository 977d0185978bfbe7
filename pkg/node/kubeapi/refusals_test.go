// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// TestRefusalIsHeld checks that the Function stays tainted while the scheduler looks for another
// one, although the refused Port is deleted at once.
func TestRefusalIsHeld(t *testing.T) {
	vf := function.ID{Address: "0000:3b:00.2"}
	port := func(uid types.UID, reason string) *v1alpha1.XPUPort {
		status := metav1.ConditionFalse
		if reason == v1alpha1.ReasonUp {
			status = metav1.ConditionTrue
		}

		return &v1alpha1.XPUPort{
			ObjectMeta: metav1.ObjectMeta{UID: uid},
			Spec:       v1alpha1.XPUPortSpec{Function: claim.FunctionRef(vf)},
			Status: v1alpha1.XPUPortStatus{
				Conditions: []metav1.Condition{
					{Type: v1alpha1.ConditionReady, Status: status, Reason: reason,
						Message: string(uid)},
				},
			},
		}
	}

	synctest.Test(t, func(t *testing.T) {
		var told atomic.Int32
		api := &API{events: Events{PortsChanged: func() { told.Add(1) }}}
		handler := api.portHandler()

		want := func(what, message string) {
			t.Helper()
			if got := api.ProvisionFailed(vf); (message == "") != (got == "") ||
				!strings.Contains(got, message) {
				t.Errorf("%s: ProvisionFailed = %q, want %q in it", what, got, message)
			}
		}

		leave := func(p *v1alpha1.XPUPort) {
			p.DeletionTimestamp = &metav1.Time{Time: time.Now()}
			p.Status.Conditions[0].Reason = v1alpha1.ReasonReleasing
			handler.OnUpdate(p, p)
			handler.OnDelete(toolscache.DeletedFinalStateUnknown{Obj: p})
		}

		first := port("first", v1alpha1.ReasonFailed)
		handler.OnAdd(first, false)
		want("refused", "Failed: first")
		time.Sleep(time.Hour)
		want("as long as the Port is there", "Failed: first")
		leave(first)
		want("the Port is gone", "Failed: first")
		time.Sleep(refusalTime / 2)

		second := port("second", v1alpha1.ReasonConflict)
		handler.OnAdd(second, false)
		want("refused again", "Conflict: second")
		time.Sleep(refusalTime)
		want("the first Port's time is over, but not the second's", "Conflict: second")
		leave(second)
		time.Sleep(refusalTime - time.Second)
		want("the second Port is gone", "Conflict: second")
		before := told.Load()
		time.Sleep(2 * time.Second)
		want("the second Port's time is over", "")
		if told.Load() != before+1 {
			t.Errorf("%d events when the time was over, want 1: the taint must go",
				told.Load()-before)
		}

		third := port("third", v1alpha1.ReasonFailed)
		handler.OnAdd(third, false)
		handler.OnUpdate(third, port("third", v1alpha1.ReasonUp))
		want("the xPU took it after all", "")
		leave(port("third", v1alpha1.ReasonUp))
		want("a Port that was fine is gone", "")

		// A watch that was interrupted reports a Port that was made anew as a change of the one before.
		fourth, fifth := port("fourth", v1alpha1.ReasonFailed), port("fifth", v1alpha1.ReasonFailed)
		fifth.Status = v1alpha1.XPUPortStatus{}
		handler.OnAdd(fourth, false)
		handler.OnUpdate(fourth, fifth)
		want("another Port has its name", "Failed: fourth")
		handler.OnDelete(fifth)
		time.Sleep(refusalTime + time.Second)
		want("the time of the refused Port is over", "")
	})
}
