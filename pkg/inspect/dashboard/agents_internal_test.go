// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestAgentIsAskedAgain checks that an agent that does not answer is asked again although no pod of
// its node changes, and that one that answers is left in peace.
func TestAgentIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		agents := []*corev1.Pod{{
			ObjectMeta: metav1.ObjectMeta{UID: "u"}, Spec: corev1.PodSpec{NodeName: "n1"},
		}}
		var a *asker
		a = newAsker(func(context.Context, string) (*nodestate.State, error) {
			if asked.Add(1) == 1 {
				return nil, errors.New("away")
			}
			return &nodestate.State{}, nil
		}, time.Now, func() { a.follow(t.Context(), agents, nil) })

		a.follow(t.Context(), agents, nil)
		synctest.Wait()
		if got := a.answers(); len(got) != 1 || got[0].err == nil {
			t.Fatalf("answers %+v", got)
		}
		time.Sleep(askAgain + time.Second)
		synctest.Wait()
		if got := a.answers(); got[0].err != nil || asked.Load() != 2 {
			t.Errorf("asked %d times, answers %+v", asked.Load(), got)
		}
		time.Sleep(10 * askAgain)
		synctest.Wait()
		if asked.Load() != 2 {
			t.Errorf("asked %d times, want 2", asked.Load())
		}
	})
}

// TestListenTaken checks that a port that another program has is an error: its user would get the
// token.
func TestListenTaken(t *testing.T) {
	taken, err := Listen(0)
	must.Succeed(t, err)
	defer taken.Close()
	l, err := Listen(taken.Addr().(*net.TCPAddr).Port)
	if err == nil {
		t.Errorf("listens at %s too", l.Addr())
		l.Close()
	}
}
