// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

func TestQuota(t *testing.T) {
	q := &quota{}
	take := func(tenant, name string, most int, want bool) {
		t.Helper()
		by := q.reserve(tenant, name, v1alpha1.PortSum{Ports: 1}, allowance{count: most},
			limitPorts, request(tenant, "default", name))
		if by != limitNone && by != limitPorts || (by == limitNone) != want {
			t.Errorf("take %s of %s: limit %q, want room %t", name, tenant, by, want)
		}
	}

	there := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{
		Name: "there", Labels: map[string]string{v1alpha1.LabelTenant: "a"},
	}}
	quotaHandler[*v1alpha1.XPUPort](q).Create(t.Context(),
		event.TypedCreateEvent[*v1alpha1.XPUPort]{Object: there}, nil)
	take("a", "x", 2, true)
	take("a", "x", 2, true) // a second time
	take("a", "there", 2, true)
	take("a", "y", 2, false)
	take("a", "gone", 2, false)
	q.cancelWait("a", request("a", "default", "gone"))
	take("b", "y", 2, true)
	take("a", "many", 3, true)
	if woken := q.release("a", "x"); len(woken) != 1 || woken[0] != request("a", "default", "y") {
		t.Errorf("woken %v, want y", woken)
	}

	take("a", "y", 2, false) // the limit was higher before
	if woken := q.release("a", "many"); len(woken) != 1 ||
		woken[0] != request("a", "default", "y") {
		t.Errorf("woken %v, want y again", woken)
	}

	take("a", "y", 2, true)
	for _, name := range []string{"there", "y", "never"} {
		q.release("a", name)
	}

	q.release("b", "y")
	if len(q.costs) != 0 || len(q.sums) != 0 || len(q.waiting) != 0 {
		t.Errorf("it remembers %v, %v and %v", q.costs, q.sums, q.waiting)
	}
}

// TestQuotaOfBandwidth: rates are summed up. An XPUPort without a maximum does not fit, and one from
// before leaves no room. A copy from the informer counts what its spec says.
func TestQuotaOfBandwidth(t *testing.T) {
	q := &quota{}
	rate := func(guaranteed, maximum int32) v1alpha1.PortSum {
		return v1alpha1.CostOf(&v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{
			Rate: &v1alpha1.PortRate{Guaranteed: guaranteed, Maximum: maximum},
		}})
	}
	most := allowance{count: 4, maximum: new(int64(1000)), guaranteed: new(int64(300))}
	take := func(name string, cost v1alpha1.PortSum, want limit) {
		t.Helper()
		if by := q.reserve("a", name, cost, most, limitPorts,
			request("a", "default", name)); by != want {
			t.Errorf("%s: limit %q, want %q; it has %+v", name, by, want, q.used("a"))
		}
	}

	take("a", rate(100, 600), limitNone)
	take("a", rate(100, 600), limitNone) // a second time
	take("b", rate(0, 401), limitBandwidth)
	take("b", rate(201, 400), limitGuaranteed)
	take("c", rate(0, 0), limitBandwidth)
	take("b", rate(200, 400), limitNone)
	take("d", rate(0, 1), limitBandwidth)
	lowered := most
	lowered.guaranteed, lowered.maximum = new(int64(50)), nil
	if by := lowered.exceeded(q.used("a"), rate(0, 1), limitPorts); by != limitNone {
		t.Errorf("nothing is guaranteed, and the others have too much: limit %q", by)
	}
	if woken := q.release("a", "a"); len(woken) == 0 {
		t.Error("nobody is woken")
	}
	take("d", rate(0, 1), limitNone)

	old := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{
		Name: "old", Labels: map[string]string{v1alpha1.LabelTenant: "a"},
	}}
	quotaHandler[*v1alpha1.XPUPort](q).Create(t.Context(),
		event.TypedCreateEvent[*v1alpha1.XPUPort]{Object: old}, nil)
	take("e", rate(0, 1), limitBandwidth)
	q.release("a", "old")
	take("e", rate(0, 1), limitNone)
	take("f", rate(0, 1), limitNone)
	take("g", rate(0, 1), limitPorts)
}

// TestReached checks that onChange is called once when a limit is reached, and once when nothing
// waits for it any more.
func TestReached(t *testing.T) {
	r, heard := newLimitTracker(), 0
	r.onChange = func(string) { heard++ }

	tenant := &v1alpha1.XPUTenant{
		ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec:       v1alpha1.XPUTenantSpec{MaxPorts: new(int32(2))},
	}

	port := func(name string) objectOfKind {
		return objectOfKind{"XPUPorts", request("a", "default", name)}
	}
	for _, step := range []struct {
		object  objectOfKind
		by      limit
		heard   int
		message string
	}{
		{port("x"), limitNone, 0, ""},
		{port("x"), limitPorts, 1, "it has 2 XPUPorts, as many as it may have, and others wait; " +
			"raise spec.maxPorts"},
		{port("y"), limitPorts, 1, "it has 2 XPUPorts, as many as it may have, and others wait; " +
			"raise spec.maxPorts"},
		{port("x"), limitNone, 1, "it has 2 XPUPorts, as many as it may have, and others wait; " +
			"raise spec.maxPorts"},
		{port("y"), limitSize, 2, "some of its XPUPorts have more than 9 bytes and are not " +
			"carried over; delete them there"},
		{port("y"), limitNone, 3, ""},
	} {
		r.set("a", step.object, step.by)
		if got := r.message(tenant, Limits{ObjectBytes: 9}); got != step.message ||
			heard != step.heard {
			t.Errorf("%v %q: %q, heard %d times; want %q, %d", step.object, step.by, got, heard,
				step.message, step.heard)
		}
	}

	if len(r.byTenant) > 0 {
		t.Errorf("it remembers %v", r.byTenant)
	}
}

// TestReachedByMany checks that the cost of one more object that waits, which is paid under a lock of
// all tenants, does not depend on how many wait already.
func TestReachedByMany(t *testing.T) {
	r := newLimitTracker()
	port := func(n int) objectOfKind {
		return objectOfKind{"XPUPorts", request("a", "default", fmt.Sprint(n))}
	}
	for n := range 4096 {
		r.set("a", port(n), limitPorts)
	}

	one := port(0)
	if n := testing.AllocsPerRun(10, func() {
		r.set("a", one, limitNone)
		r.set("a", one, limitPorts)
	}); n > 100 {
		t.Errorf("%v allocations for one object, with 4096 waiting", n)
	}
}
