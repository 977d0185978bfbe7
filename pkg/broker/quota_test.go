package broker

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

func TestQuota(t *testing.T) {
	q := newQuota()
	take := func(tenant, name string, most *int32, want bool) {
		t.Helper()
		if _, ok := q.take(tenant, name, most, request(tenant, "default", name)); ok != want {
			t.Errorf("take %s of %s: %t, want %t", name, tenant, ok, want)
		}
	}
	two := ptr.To[int32](2)
	there := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{Name: "there", Labels: map[string]string{v1alpha1.LabelTenant: "a"}}}
	q.handler().Create(t.Context(), event.TypedCreateEvent[*v1alpha1.XPUPort]{Object: there}, nil)
	take("a", "x", two, true)
	take("a", "x", two, true) // a second time
	take("a", "there", two, true)
	take("a", "y", two, false)
	take("b", "y", two, true)
	take("a", "many", nil, true)
	if woken := q.give("a", "x"); len(woken) != 1 || woken[0] != request("a", "default", "y") {
		t.Errorf("woken %v, want y", woken)
	}
	take("a", "y", two, false) // as there was no limit a while
	for _, name := range []string{"many", "there", "y", "never"} {
		q.give("a", name)
	}
	q.give("b", "y")
	if len(q.names) != 0 || len(q.waiting) != 0 {
		t.Errorf("it remembers %v and %v", q.names, q.waiting)
	}
}
