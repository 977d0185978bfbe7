// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// port is a Port of a network at an XPU.
func port(name, uid, network, xpu string) *v1alpha1.XPUPort {
	return &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(uid)},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: "node1", Network: network, XPU: xpu,
			Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:02.1"},
		},
	}
}

func nameOf(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

func names(ports []*v1alpha1.XPUPort) (list []string) {
	for _, p := range ports {
		list = append(list, p.Name)
	}
	slices.Sort(list)
	return list
}

// TestIndexes compares every index with a search of all Ports, after any changes.
func TestIndexes(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	ports, want := NewPorts(), map[string]*v1alpha1.XPUPort{}
	pick := func(prefix string, n int) string { return fmt.Sprint(prefix, random.IntN(n)) }
	for range 5000 {
		name := pick("port", 40)
		if random.IntN(3) == 0 {
			ports.Remove(nameOf(name))
			delete(want, name)
			continue
		}

		p := port(name, pick("uid", 2), pick("network", 4), pick("xpu", 3))
		p.Spec.Claim.Name = pick("", 5)
		if random.IntN(2) == 0 {
			p.Spec.Claim.Name = ""
		}
		if random.IntN(3) == 0 { // a later Port of the name may have other networks
			p.UID = types.UID(fmt.Sprint(random.IntN(2)))
			p.Spec.Network = ""
			for i := range 1 + random.IntN(3) {
				p.Spec.Networks = append(p.Spec.Networks,
					v1alpha1.XPUPortNetwork{Name: fmt.Sprint("tagged-", i)})
			}
		}
		p.Spec.MAC = fmt.Sprintf("02:00:00:00:00:%02x", random.IntN(9))
		if random.IntN(9) == 0 {
			p.Spec.MAC = "none"
		}
		ports.Set(p)
		want[name] = p
	}

	found := 0
	for i := range Index(numberOfIndexes) {
		byKey := map[string][]string{}
		for _, p := range want {
			for _, of := range keysOf(p) {
				if key := of[i]; key != "" {
					byKey[key] = append(byKey[key], p.Name)
				}
			}
		}

		if len(byKey) != len(ports.indexes[i]) {
			t.Errorf("index %d has %d keys, want %d", i, len(ports.indexes[i]), len(byKey))
		}
		for key, all := range byKey {
			slices.Sort(all)
			got, err := ports.By(t.Context(), i, key)
			must.Succeed(t, err)
			if diff := cmp.Diff(all, names(got)); diff != "" {
				t.Errorf("index %d, key %s: -want +got\n%s", i, key, diff)
			}
			found += len(got)
		}
	}
	if found == 0 {
		t.Error("no index has a Port")
	}

	all, err := ports.All(t.Context())
	must.Succeed(t, err)
	if len(all) != len(want) {
		t.Errorf("%d Ports, want %d", len(all), len(want))
	}
}

// TestDerivedFirst: a listener finds the model, and all that is derived, as they are after the
// change.
func TestDerivedFirst(t *testing.T) {
	ports := NewPorts()
	derived := map[types.NamespacedName]types.UID{}
	ports.Derive(func(c Change) {
		if name := nameOf(c.Port().Name); c.Gone() {
			delete(derived, name)
		} else {
			derived[name] = c.New.UID
		}
	})

	var heard []string
	listen := func(c Change) {
		name := nameOf(c.Port().Name)
		uid := types.UID("")
		if !c.Gone() {
			uid = c.New.UID
		}
		if derived[name] != uid {
			t.Errorf("%s has UID %q in what is derived, want %q", name, derived[name], uid)
		}

		now, err := ports.Get(t.Context(), name)
		must.Succeed(t, err)
		if now != c.New {
			t.Errorf("a listener finds %v after a change to %v", now, c.New)
		}
		heard = append(heard, fmt.Sprintf("%s made %t gone %t", c.Port().UID, c.Made(), c.Gone()))
	}

	ports.Set(port("a", "1", "blue", "card"))
	ports.Listen(listen)
	ports.Set(port("a", "1", "blue", "card"))
	ports.Set(port("a", "2", "red", "card")) // the watch left out that the first was deleted
	ports.Remove(nameOf("a"))
	ports.Remove(nameOf("a"))

	want := []string{
		"1 made true gone false", "1 made false gone false", "1 made false gone true",
		"2 made true gone false", "2 made false gone true",
	}
	if diff := cmp.Diff(want, heard); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// TestIncomplete: a Port that the model does not have yet may exist, so that a lookup does not
// answer that there is none.
func TestIncomplete(t *testing.T) {
	ports := NewPorts()
	ports.synced = func() bool { return false }
	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	_, get := ports.Get(ctx, nameOf("a"))
	_, by := ports.By(ctx, ByXPU, "card")
	_, all := ports.All(ctx)
	transact := ports.Transact(ctx, func(View) error { return nil })
	for what, err := range map[string]error{
		"get": get, "by": by, "all": all, "transact": transact,
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v, want %v", what, err, context.Canceled)
		}
	}
}

// TestSourceLooksUp: a controller that starts while the model is filled, and that looks up other
// Ports when it hears of one, neither waits for itself nor misses a Port.
func TestSourceLooksUp(t *testing.T) {
	ports := NewPorts()
	var complete atomic.Bool
	ports.synced = complete.Load

	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.DefaultTypedControllerRateLimiter[string]())
	defer queue.ShutDown()

	source := Source(ports, func(ctx context.Context, c Change, queue Queue[string]) {
		same, err := ports.By(ctx, ByXPU, c.Port().Spec.XPU)
		must.Succeed(t, err)
		if len(same) == 0 {
			t.Errorf("the model has no Port of the XPU of %s", c.Port().Name)
		}
		queue.Add(c.Port().Name)
	})

	must.Succeed(t, source.Start(t.Context(), queue))
	ports.Set(port("a", "1", "blue", "card"))
	ports.Set(port("b", "2", "blue", "card"))
	complete.Store(true)
	must.Succeed(t, source.WaitForSync(t.Context()))
	ports.Set(port("c", "3", "blue", "card"))

	var heard []string
	for range 3 {
		name, _ := queue.Get()
		heard = append(heard, name)
	}
	slices.Sort(heard)
	if want := []string{"a", "b", "c"}; !slices.Equal(heard, want) {
		t.Errorf("heard of %v, want %v", heard, want)
	}
}
