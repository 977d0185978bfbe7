// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

func TestQuota(t *testing.T) {
	q := &quota{}
	take := func(tenant, name string, most int, want bool) {
		t.Helper()
		if ok := q.reserve(tenant, name, most, request(tenant, "default", name)); ok != want {
			t.Errorf("take %s of %s: %t, want %t", name, tenant, ok, want)
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
	if len(q.names) != 0 || len(q.waiting) != 0 {
		t.Errorf("it remembers %v and %v", q.names, q.waiting)
	}
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
