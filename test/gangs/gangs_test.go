// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var kills = flag.Int("kills", 4, "how many gangs TestGangKilled starts, with something killed under each")

// TestGang: the pods of a gang are bound when all of their Ports are up. When an xPU refuses a Port,
// the claim gets another device, and the others wait for it.
func TestGang(t *testing.T) {
	w := newWorld(t, 4)
	for _, agent := range w.agents {
		agent.Set(func(b *opitest.Behaviour) { b.UpDelay = 300 * time.Millisecond })
	}
	t.Logf("4 pods x 2 rails bound after %s", w.bound(w.gang("train", 4, 2, false), time.Minute))
	w.clear("train")

	w.agents[0].Set(func(b *opitest.Behaviour) { b.Realise = w.refuseFirst() })
	t.Logf("4 pods x 2 rails, one of them refused, bound after %s",
		w.bound(w.gang("again", 4, 2, false), time.Minute))
}

// refuseFirst has an OPI agent refuse the first port that it is asked for.
func (w *world) refuseFirst() func(id string) error {
	refused := ""
	return func(id string) error {
		if refused == "" {
			refused = id
		}
		if refused == id {
			return errors.New("no such representor")
		}
		return nil
	}
}

// TestGangNotEnough: while there is less than all pods of a gang need, none of them is bound and
// none has a Function. A node more, and all of them are bound.
func TestGangNotEnough(t *testing.T) {
	w := newWorld(t, 2)
	pods := w.gang("train", 3, vfs, true)

	must.EventuallySucceed(t, "the scheduler refuses every pod", func() error {
		for _, p := range pods {
			must.Succeed(t, w.Get(t.Context(), client.ObjectKeyFromObject(p), p))
			if p.Spec.NodeName != "" {
				t.Fatalf("pod %s is on %s", p.Name, p.Spec.NodeName)
			}
			if !unschedulable(p) {
				return fmt.Errorf("pod %s: %v", p.Name, p.Status.Conditions)
			}
		}
		return nil
	})

	var claims resourceapi.ResourceClaimList
	must.Succeed(t, w.List(t.Context(), &claims))
	for _, c := range claims.Items {
		if c.Status.Allocation != nil {
			t.Errorf("claim %s is allocated", c.Name)
		}
	}

	w.node(2)
	t.Logf("3 pods bound %s after there was a third node", w.bound(pods, time.Minute))
}

// unschedulable reports whether the scheduler has said of the pod that it goes to no node.
func unschedulable(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse
	})
}

// TestLargeGang: all Functions of 64 nodes are one gang's.
func TestLargeGang(t *testing.T) {
	w := newWorld(t, 64)
	for _, agent := range w.agents {
		agent.Set(func(b *opitest.Behaviour) { b.UpDelay = 300 * time.Millisecond })
	}
	t.Logf("64 pods x 8 rails bound after %s", w.bound(w.gang("train", 64, 8, true), time.Minute))
}

// TestGangKilled: whoever is killed when, no pod of a gang is bound before all of its Ports are up,
// and all are bound in the end.
func TestGangKilled(t *testing.T) {
	w := newWorld(t, 4)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	between := func(most time.Duration) time.Duration {
		return time.Duration(random.Int64N(int64(most)))
	}

	for i := range *kills {
		for _, agent := range w.agents {
			delay := between(2 * time.Second)
			agent.Set(func(b *opitest.Behaviour) { b.UpDelay, b.Realise = delay, nil })
		}
		if random.IntN(3) == 0 {
			w.agents[random.IntN(len(w.agents))].Set(func(b *opitest.Behaviour) {
				b.Realise = w.refuseFirst()
			})
		}

		name := fmt.Sprint("train", i)
		pods := w.gang(name, 4, 2, random.IntN(2) == 0)
		after := between(7 * time.Second)
		time.Sleep(after) // until the point of the kill
		killed := w.killOne(random, 1)
		t.Logf("gang %d: %s killed after %s, bound %s later", i, killed, after,
			w.bound(pods, 2*time.Minute))
		w.clear(name)
	}
}

// killOne kills one of the parts and starts it again. It returns which. cards is how many cards have
// their OPI agent in one process.
func (w *world) killOne(random *rand.Rand, cards int) string {
	switch random.IntN(3) {
	case 0:
		w.stop()
		w.start()
		return "xpu-controller"
	case 1:
		w.scheduler.kill()
		w.scheduler.start()
		return "scheduler"
	}

	process := random.IntN(len(w.agents) / cards)
	agents := w.agents[process*cards : (process+1)*cards]
	for _, agent := range agents {
		agent.Kill()
	}
	for _, agent := range agents {
		must.Succeed(w, agent.Run())
	}
	return fmt.Sprint("OPI agent ", process)
}

// clear removes a gang with all that was made for it.
func (w *world) clear(gang string) {
	w.Helper()
	ctx := context.Background()
	must.Succeed(w, w.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(namespace),
		client.GracePeriodSeconds(0)))
	must.Succeed(w, w.Delete(ctx, &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: gang}}))
	must.Succeed(w, w.DeleteAllOf(ctx, &resourceapi.ResourceClaim{}, client.InNamespace(namespace)))

	must.EventuallySucceed(w, "nothing of the gang is left", func() error {
		var claims resourceapi.ResourceClaimList
		var ports v1alpha1.XPUPortList
		var groups schedulingapi.PodGroupList
		err := errors.Join(w.List(ctx, &claims), w.List(ctx, &ports), w.List(ctx, &groups))
		if left := len(claims.Items) + len(ports.Items) + len(groups.Items); err == nil && left > 0 {
			return fmt.Errorf("%d claims, %d XPUPorts, %d PodGroups", len(claims.Items),
				len(ports.Items), len(groups.Items))
		}
		return err
	})
}
