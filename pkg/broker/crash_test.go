// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// crash cuts a broker off from all API servers at its nth write: before the write, or after it and
// before the response arrives. Safe for concurrent use.
type crash struct {
	nth   int
	after bool

	mu     sync.Mutex
	writes int
	dead   chan struct{} // closed when it happens
}

type crashing struct {
	*crash
	next http.RoundTripper
}

var errCrashed = errors.New("the broker is dead")

func (c *crash) wrap(next http.RoundTripper) http.RoundTripper { return crashing{c, next} }

func (c crashing) RoundTrip(request *http.Request) (*http.Response, error) {
	now, already := c.note(request)
	if already || now && !c.after {
		return nil, errCrashed
	}

	response, err := c.next.RoundTrip(request)
	if now && err == nil {
		_ = response.Body.Close()
		return nil, errCrashed
	}

	return response, err
}

// note counts writes. It ignores renewals of Leases, because their number depends on time.
func (c *crash) note(request *http.Request) (now, already bool) {
	c.mu.Lock()
	defer c.mu.Unlock()

	select {
	case <-c.dead:
		return false, true
	default:
	}

	if request.Method == http.MethodGet || isLease(request) {
		return false, false
	}
	if c.writes++; c.writes == c.nth {
		close(c.dead)
		return true, false
	}

	return false, false
}

func isLease(request *http.Request) bool {
	return strings.HasPrefix(request.URL.Path, "/apis/coordination.k8s.io/")
}

// TestKilledAtEachWrite checks that a new broker reaches the same state, whichever write the old
// one died at.
func TestKilledAtEachWrite(t *testing.T) {
	w := newWorld(t)
	tenant, agent := w.scene(w.a, nil)
	w.stopBroker()

	for _, after := range []bool{false, true} {
		for nth := 1; ; nth++ {
			c := &crash{nth: nth, after: after, dead: make(chan struct{})}
			stop := w.infra.startBroker("infra-1", c.wrap)
			name := fmt.Sprintf("nic-%t-%d", after, nth)
			network := w.a.network(name, 0, "10.9.0.0/24")
			w.a.pool(name, name)
			o, port := w.a.claim(name, "node1", name, vf(0))
			died := w.untilDeadOr(c, func() bool {
				return w.a.get(port) == nil &&
					port.Status.BridgePort != ""
			})

			if !died {
				w.a.delete(o)
				w.a.delete(port)
				w.a.delete(network)
				died = w.untilDeadOr(c, func() bool { return w.a.get(network) != nil })
			}

			stop()
			w.startBroker()

			if died {
				w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConnected)
				if w.a.get(o) == nil {
					w.a.portIs(port, v1alpha1.ReasonUp)
					w.a.delete(o)
					w.a.delete(port)
					w.a.delete(network)
				}
			}

			w.a.gone(port)
			w.a.gone(network)
			w.serves(agent)

			w.infra.eventually("no segment is left", func() error {
				if err := w.infra.get(tenant); err != nil || len(tenant.Status.Networks) != 1 {
					return fmt.Errorf("%+v: %w", tenant.Status.Networks, err)
				}
				return nil
			})

			w.stopBroker()
			if !died {
				t.Logf("a life takes %d writes", nth-1)
				break
			}
		}
	}

	var left v1alpha1.XPUNetworkList
	if err := w.infra.List(t.Context(), &left); err != nil || len(left.Items) != 1 {
		t.Errorf("the infra cluster has %d networks, want that of the scene: %v",
			len(left.Items), err)
	}
}

// untilDeadOr waits until the broker has died or done is true, and reports whether the broker died.
func (w *world) untilDeadOr(c *crash, done func() bool) (died bool) {
	w.Helper()
	w.a.eventually("the broker dies or is done", func() error {
		select {
		case <-c.dead:
			died = true
			return nil
		default:
		}

		if !done() {
			return errors.New("neither")
		}

		return nil
	})

	return died
}

// TestTwoBrokers checks that two brokers of one infra cluster do everything once, and that a broker
// of another infra cluster does nothing.
func TestTwoBrokers(t *testing.T) {
	w := newWorld(t)
	w.infra.startBroker("infra-1", nil)
	tenant, agent := w.scene(w.a, func(spec *v1alpha1.XPUTenantSpec) {
		spec.VLANs.Last, spec.VNIs = 1099, nil
	})

	for n := range 10 {
		name := fmt.Sprint("net-", n)
		w.a.network(name, 10)
		w.a.pool(name, name)
	}

	var ports []*v1alpha1.XPUPort
	for n := range 10 {
		name := fmt.Sprint("net-", n)
		o, port := w.a.claim(name, "node1", name, vf(n))
		ports = append(ports, port)
		defer func() {
			w.a.delete(o)
			w.a.delete(port)
			w.a.gone(port)
		}()
	}

	for _, port := range ports {
		w.a.portIs(port, v1alpha1.ReasonUp)
	}

	if got := agent.Calls("CreateBridgePort"); got != 10 {
		t.Errorf("the agent was asked for %d ports", got)
	}
	if err := w.infra.get(tenant); err != nil {
		t.Fatal(err)
	}

	given := map[int32]string{}
	for _, segment := range tenant.Status.Networks {
		if other := given[segment.VLAN]; other != "" {
			t.Errorf("VLAN %d was given to %s and %s", segment.VLAN, other, segment.Name)
		}
		given[segment.VLAN] = segment.Name
	}

	w.stopBroker() // one of the two
	t.Run("after another infra cluster took the tenant", func(t *testing.T) {
		lease := &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: systemNamespace, Name: v1alpha1.BrokerLease},
		}
		hold := func(identity string) {
			t.Helper()
			w.a.eventually("the Lease is that of "+identity, func() error {
				if err := w.a.get(lease); err != nil {
					return err
				}
				lease.Spec.HolderIdentity, lease.Spec.RenewTime = &identity, now()
				return w.a.Update(t.Context(), lease)
			})
		}

		hold("infra-3")
		w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConflict)
		_, port := w.a.claim("other", "node1", "net-0", vf(20))
		w.a.eventually("its XPUPort is made", func() error { return w.a.get(port) })
		hold("infra-3")
		if err := w.infra.get(w.copied("a", port)); !apierrors.IsNotFound(err) {
			t.Errorf("it was carried over: %v", err)
		}

		hold("") // the other infra cluster releases it
		w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConnected)
		w.a.portIs(port, v1alpha1.ReasonUp)
	})

	t.Run("of another infra cluster", func(t *testing.T) {
		w.infra.startBroker("infra-2", nil)
		w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConflict)
	})
}
