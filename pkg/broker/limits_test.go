// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// TestMaxPorts checks that XPUPorts over a tenant's limit wait, and are copied when others go.
func TestMaxPorts(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, func(spec *v1alpha1.XPUTenantSpec) {
		spec.MaxPorts = ptr.To[int32](2)
	})
	ports := map[string]*v1alpha1.XPUPort{}
	claims := map[string]*resourceapi.ResourceClaim{}
	for n := range 4 {
		name := fmt.Sprint("nic-", n)
		claims[name], ports[name] = w.a.claim(name, "node1", "fast", vf(n))
	}

	var served, waiting []string
	w.a.eventually("two are served and two wait", func() error {
		served, waiting = nil, nil
		for name, port := range ports {
			if err := w.a.get(port); err != nil {
				return err
			}
			switch v1alpha1.ReadyOf(port.Status.Conditions).Reason {
			case v1alpha1.ReasonUp:
				served = append(served, name)
			case v1alpha1.ReasonQuotaExceeded:
				waiting = append(waiting, name)
			}
		}

		if len(served) != 2 || len(waiting) != 2 {
			return fmt.Errorf("%v are served, %v wait", served, waiting)
		}

		return nil
	})

	if got := len(agent.Ports()); got != 2 {
		t.Errorf("the agent has %d ports", got)
	}

	w.a.delete(claims[served[0]])
	w.a.delete(ports[served[0]])

	w.a.eventually("one of those that wait is served", func() error {
		for _, name := range waiting {
			if err := w.a.get(ports[name]); err != nil {
				return err
			}
			if v1alpha1.ReadyOf(ports[name].Status.Conditions).Reason == v1alpha1.ReasonUp {
				return nil
			}
		}
		return errors.New("none is")
	})
}

// TestMaxBandwidth checks that XPUPorts whose rates exceed a tenant's limit wait, and that one
// without a rate does, because its rate is not known. A broker that starts counts what is there.
func TestMaxBandwidth(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, func(spec *v1alpha1.XPUTenantSpec) {
		spec.MaxBandwidth = ptr.To[int64](1000)
	})
	rated := func(n, maximum int) *v1alpha1.XPUPort {
		name := fmt.Sprint("nic-", n)
		config := fmt.Sprintf(`{"apiVersion": "xpu.opiproject.org/v1alpha1", "kind": "InterfaceConfig", `+
			`"vf": {"maxTxRate": %d}}`, maximum)
		_, port := w.a.claim(name, "node1", "fast", vf(n), resourceapi.DeviceAllocationConfiguration{
			Source: resourceapi.AllocationConfigSourceClass,
			DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: v1alpha1.GroupName,
					Parameters: runtime.RawExtension{Raw: []byte(config)}},
			},
		})
		return port
	}
	says := func(port *v1alpha1.XPUPort, reason, text string) {
		t.Helper()
		w.a.eventually(port.Name+" is "+reason, func() error {
			if err := w.a.get(port); err != nil {
				return err
			}
			ready := v1alpha1.ReadyOf(port.Status.Conditions)
			if ready.Reason != reason || !strings.Contains(ready.Message, text) {
				return fmt.Errorf("it is %s: %s", ready.Reason, ready.Message)
			}
			return nil
		})
	}

	says(rated(0, 600), v1alpha1.ReasonUp, "")
	says(rated(1, 500), v1alpha1.ReasonQuotaExceeded,
		"may send 500 Mbit/s, and this cluster has 600 of the 1000")
	_, unknown := w.a.claim("nic-2", "node1", "fast", vf(2))
	says(unknown, v1alpha1.ReasonQuotaExceeded, "the interface has no maximum; set vf.maxTxRate")
	says(rated(3, 400), v1alpha1.ReasonUp, "")
	if got := len(agent.Ports()); got != 2 {
		t.Errorf("the agent has %d ports", got)
	}
}

// gate holds requests with a text in their URL, and counts them. Safe for concurrent use.
type gate struct {
	text string
	open chan struct{} // closed to let all pass

	mu            sync.Mutex
	waiting, most int
}

type gated struct {
	*gate
	next http.RoundTripper
}

func (g gated) RoundTrip(request *http.Request) (*http.Response, error) {
	if strings.Contains(request.URL.String(), g.text) && request.Method == http.MethodPatch {
		g.count(1)
		defer g.count(-1)
		select {
		case <-g.open:
		case <-request.Context().Done():
			return nil, request.Context().Err()
		}
	}
	return g.next.RoundTrip(request)
}

func (g *gate) count(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting += n
	g.most = max(g.most, g.waiting)
}

// TestFlood checks that a tenant with more XPUPorts than the broker has workers delays no other
// tenant.
func TestFlood(t *testing.T) {
	w := newWorld(t)
	w.stopBroker()
	g := &gate{text: "/xpuports/a.", open: make(chan struct{})}
	w.infra.startBrokerWith(Options{Identity: "infra-1", Concurrency: 8, ConcurrencyPerTenant: 4},
		func(next http.RoundTripper) http.RoundTripper {
			return gated{g, next}
		})

	_, flooded := w.scene(w.a, nil)
	_, quiet := w.scene(w.b, nil)
	var ports []*v1alpha1.XPUPort
	var names []string
	for n := range 24 {
		ports = append(ports, w.a.agentPort("node1", vf(n), "card-a", "blue"))
		names = append(names, fmt.Sprintf("c1pf0vf%d", n))
	}

	g.waitFor(w.a, 4)
	w.b.portIs(w.b.agentPort("node1", vf(0), "card-b", "blue"), v1alpha1.ReasonUp)
	w.serves(quiet, "c1pf0vf0")
	w.serves(flooded)
	close(g.open)

	for _, port := range ports {
		w.a.portIs(port, v1alpha1.ReasonUp)
	}

	slices.Sort(names)
	w.serves(flooded, names...)
	if g.most > 4 {
		t.Errorf("%d XPUPorts of one tenant were carried over at once, want 4 at most", g.most)
	}
}

// waitFor waits until that many requests are held.
func (g *gate) waitFor(s *testCluster, want int) {
	s.Helper()
	s.eventually("what its tenant has is being carried over", func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.waiting < want {
			return fmt.Errorf("%d are", g.waiting)
		}
		return nil
	})
}

// TestFloodOfEachKind checks the same for the other kinds: the infra cluster hangs on XPUNetworks
// and XPUNodes, and the tenant's cluster on XPUs.
func TestFloodOfEachKind(t *testing.T) {
	const many = 12
	for name, test := range map[string]struct {
		text  func(*world) string
		flood func(w *world, n int)
		other func(w *world)
	}{
		"XPUNetworks": {
			func(*world) string { return "/xpunetworks/a." },
			func(w *world, n int) { w.a.network(fmt.Sprint("flood-", n), 0) },
			func(w *world) { w.b.networkIs(w.b.network("quiet", 0), v1alpha1.ReasonUp) },
		},
		"XPUNodes": {
			func(*world) string { return "/xpunodes/a.flood" },
			func(w *world, n int) { w.a.node(fmt.Sprint("flood-", n), fmt.Sprint("MT-flood-", n)) },
			func(w *world) {
				w.b.node("quiet", "MT-quiet")
				made := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "b.quiet"}}
				w.infra.eventually("it is carried over", func() error { return w.infra.get(made) })
			},
		},
		"XPUs": {
			func(w *world) string {
				return strings.Trim(strings.TrimPrefix(w.a.Config.Host, "https:"), "/") +
					"/apis/xpu.opiproject.org/v1alpha1/xpus/flood-"
			},
			func(w *world, n int) {
				w.a.node(fmt.Sprint("flood-", n), fmt.Sprint("MT-flood-", n))
				w.xpu(fmt.Sprint("flood-", n), "a", fmt.Sprint("MT-flood-", n))
			},
			func(w *world) {
				w.b.node("quiet", "MT-quiet")
				w.xpu("quiet", "b", "MT-quiet")
				w.b.xpuIs("quiet", v1alpha1.ReasonConnected)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.stopBroker()
			g := &gate{text: test.text(w), open: make(chan struct{})}
			open := sync.OnceFunc(func() { close(g.open) })
			t.Cleanup(open)

			w.infra.startBrokerWith(Options{
				Identity: "infra-1", Concurrency: 8, ConcurrencyPerTenant: 4,
			}, func(next http.RoundTripper) http.RoundTripper {
				return gated{g, next}
			})

			wide := func(spec *v1alpha1.XPUTenantSpec) {
				spec.VLANs.Last, spec.VNIs.Last = spec.VLANs.First+99, spec.VNIs.First+99
			}
			w.scene(w.a, wide)
			w.scene(w.b, wide)

			for n := range many {
				test.flood(w, n)
			}

			g.waitFor(w.a, 4)
			test.other(w)
			open()
			if g.mu.Lock(); g.most > 4 {
				t.Errorf("%d %s of one tenant were carried over at once, want 4 at most",
					g.most, name)
			}

			g.mu.Unlock()
		})
	}
}

// refusing answers Conflict to each write of a path, and counts them. Safe for concurrent use.
type refusing struct {
	path  string
	count *atomic.Int64
	next  http.RoundTripper
}

func (r refusing) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method == http.MethodGet || !strings.HasSuffix(request.URL.Path, r.path) {
		return r.next.RoundTrip(request)
	}

	r.count.Add(1)
	body := `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Conflict","code":409,"message":"again"}`
	return &http.Response{
		StatusCode: http.StatusConflict, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(body)), Request: request,
	}, nil
}

// TestConflictsWithoutEnd checks that the broker slows down if a tenant's API server answers every
// write with Conflict.
func TestConflictsWithoutEnd(t *testing.T) {
	w := newWorld(t)
	w.stopBroker()
	var asked atomic.Int64
	w.infra.startBroker("infra-1", func(next http.RoundTripper) http.RoundTripper {
		return refusing{"/xpunetworks/blue/status", &asked, next}
	})
	w.scene(w.a, nil)

	for asked.Load() == 0 {
		time.Sleep(time.Millisecond)
	}

	before := asked.Load()
	time.Sleep(3 * time.Second) // retries come after 50 ms, 100 ms and so on
	if n := asked.Load() - before; n > 12 {
		t.Errorf("it was asked %d times in 3 s, want 12 at most", n)
	}
}

// TestMaxNodes checks that XPUNodes over a tenant's limit are not copied, that the XPUTenant says
// so, and that they are copied when others go.
func TestMaxNodes(t *testing.T) {
	w := newWorld(t)
	tenant, _ := w.scene(w.a, func(spec *v1alpha1.XPUTenantSpec) {
		spec.MaxNodes = ptr.To[int32](3)
	})
	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonWithinLimits)
	nodes := map[string]*v1alpha1.XPUNode{}
	for n := range 4 {
		node := w.a.node(fmt.Sprint("more-", n), fmt.Sprint("MT-more-", n))
		nodes["a."+node.Name] = node
	}

	has := func(want int) (names []string) {
		t.Helper()
		w.infra.eventually(fmt.Sprintf("it has %d XPUNodes", want), func() error {
			var all v1alpha1.XPUNodeList
			if err := w.infra.List(t.Context(), &all); err != nil || len(all.Items) != want {
				return fmt.Errorf("it has %d: %w", len(all.Items), err)
			}

			names = nil
			for _, node := range all.Items {
				names = append(names, node.Name)
			}
			return nil
		})

		return names
	}

	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonQuotaExceeded)
	names := has(3)
	first := slices.IndexFunc(names, func(name string) bool { return nodes[name] != nil })
	gone := names[first]
	w.a.delete(nodes[gone])

	w.infra.eventually("another comes in its place", func() error {
		if now := has(3); slices.Contains(now, gone) {
			return fmt.Errorf("there are %v", now)
		}
		return nil
	})

	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonQuotaExceeded)

	w.infra.eventually("it may have more", func() error {
		if err := w.infra.get(tenant); err != nil {
			return err
		}
		tenant.Spec.MaxNodes = nil
		return w.infra.Update(t.Context(), tenant)
	})

	has(4)
	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonWithinLimits)
}

// TestLargeObjects checks that too large objects are not copied, while others are.
func TestLargeObjects(t *testing.T) {
	w := newWorld(t)
	w.stopBroker()
	w.infra.startBrokerWith(Options{
		Identity: "infra-1", Limits: Limits{ObjectBytes: 4 << 10, Ports: 1},
	}, nil)
	tenant, _ := w.scene(w.a, nil)
	node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "large"}}
	for n := range 64 {
		node.Status.PFs = append(node.Status.PFs, v1alpha1.XPUNodePF{
			Address: fmt.Sprintf("0000:%02x:00.0", n), Serial: strings.Repeat("s", 200),
		})
	}

	w.a.create(node)
	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonQuotaExceeded)

	if err := w.infra.get(&v1alpha1.XPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: "a.large"},
	}); !apierrors.IsNotFound(err) {
		t.Errorf("the infra cluster has the XPUNode: error %v", err)
	}

	w.a.delete(node)
	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonWithinLimits)

	network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "large"}}
	network.Spec.AllowedNamespaces = v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromSelector, Selector: &metav1.LabelSelector{
		MatchLabels: map[string]string{},
	}}
	for n := range 100 {
		network.Spec.AllowedNamespaces.Selector.MatchLabels[fmt.Sprint("l",
			n)] = strings.Repeat("v", 60)
	}

	w.a.create(network)
	w.a.networkIs(network, v1alpha1.ReasonQuotaExceeded)
	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonQuotaExceeded)
	w.a.delete(network)
	w.a.gone(network)
	w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonWithinLimits)

	t.Run("XPUPorts without maxPorts", func(t *testing.T) {
		w.a.portIs(w.a.agentPort("node1", vf(0), "card-a", "blue"), v1alpha1.ReasonUp)
		w.a.portIs(w.a.agentPort("node1", vf(1), "card-a", "blue"), v1alpha1.ReasonQuotaExceeded)
		w.infra.tenantIs(tenant, v1alpha1.ConditionWithinLimits, v1alpha1.ReasonQuotaExceeded)
	})
}

// TestForeignXPU checks that a tenant cannot use another tenant's XPU, whatever its objects claim.
func TestForeignXPU(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, nil)
	w.scene(w.b, nil)

	t.Run("named in an XPUPort", func(t *testing.T) {
		port := w.b.agentPort("node1", vf(7), "card-a", "blue")
		w.b.portIs(port, v1alpha1.ReasonForbidden)
	})

	t.Run("card of another tenant", func(t *testing.T) {
		w.b.node("thief", "MT-a") // it claims a's card
		w.infra.eventually("the infra cluster hears of it", func() error {
			return w.infra.get(&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "b.thief"}})
		})
		_, port := w.a.claim("nic", "node1", "fast", vf(0))
		w.a.portIs(port, v1alpha1.ReasonUp)
		w.serves(agent, "c1pf0vf0")

		if err := w.b.get(&v1alpha1.XPU{
			ObjectMeta: metav1.ObjectMeta{Name: "card-a"},
		}); !apierrors.IsNotFound(err) {
			t.Errorf("the thief has the XPU: %v", err)
		}
	})

	t.Run("taken away", func(t *testing.T) {
		xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-a"}}
		w.infra.eventually("relabel", func() error {
			if err := w.infra.get(xpu); err != nil {
				return err
			}
			xpu.Labels["rack"] = "nobody"
			return w.infra.Update(t.Context(), xpu)
		})

		w.a.eventually("the tenant has it no more", func() error {
			if err := w.a.get(&v1alpha1.XPU{
				ObjectMeta: metav1.ObjectMeta{Name: "card-a"},
			}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("it has: %w", err)
			}
			return nil
		})
	})
}

// TestAbandonedFunctions checks that a tenant's nodes learn which Functions the infra cluster's
// administrator has abandoned.
func TestAbandonedFunctions(t *testing.T) {
	w := newWorld(t)
	w.scene(w.a, nil)
	given := []string{vf(3).String()}
	w.infra.eventually("give a Function up", func() error {
		xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-a"}}
		if err := w.infra.get(xpu); err != nil {
			return err
		}
		xpu.Spec.AbandonedFunctions = given
		return w.infra.Update(t.Context(), xpu)
	})

	w.a.eventually("the tenant's nodes learn it", func() error {
		xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-a"}}
		if err := w.a.get(xpu); err != nil {
			return err
		}

		condition := meta.FindStatusCondition(xpu.Status.Conditions, v1alpha1.ConditionFunctions)
		if !slices.Equal(xpu.Spec.AbandonedFunctions, given) || condition == nil {
			return fmt.Errorf("it has %q and the conditions %+v", xpu.Spec.AbandonedFunctions,
				xpu.Status.Conditions)
		}

		return nil
	})
}

// TestCardComesLater checks that an XPUPort is copied as soon as its XPU serves its node or tenant,
// not only at the next retry.
func TestCardComesLater(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, nil)
	moved := w.a.agentPort("node2", vf(0), "card-a", "blue")
	w.a.portIs(moved, v1alpha1.ReasonNoXPU)
	w.a.delete(&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}})
	w.a.node("node2", "MT-a")
	w.a.portIs(moved, v1alpha1.ReasonUp)
	w.serves(agent, "c1pf0vf0")

	w.a.node("node3", "MT-new")
	given := w.a.agentPort("node3", vf(1), "card-new", "blue")
	w.a.portIs(given, v1alpha1.ReasonForbidden)
	_, agent = w.xpu("card-new", "a", "MT-new")
	w.a.portIs(given, v1alpha1.ReasonUp)
	w.serves(agent, "c1pf0vf1")
}

// agentPort creates an XPUPort like an agent does for a pod that uses the device plugin.
func (s *testCluster) agentPort(node string, f function.ID, xpu, network string) *v1alpha1.XPUPort {
	s.Helper()
	port := claim.NewPort(systemNamespace, f, "fast", v1alpha1.XPUPortSpec{
		NodeName: node, XPU: xpu, Network: network, MAC: string(claim.DerivedMAC("", node, f)),
		AssignAddresses: true,
		Pod:             &v1alpha1.PodRef{Namespace: "default", Name: "p"},
	})
	s.create(port)
	return port
}

// TestAgentPorts checks that the tenant's cluster admits XPUPorts without a claim.
func TestAgentPorts(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, nil)
	agent.Set(func(b *opitest.Behaviour) { b.Options = true })
	port := w.a.agentPort("node1", vf(0), "card-a", "blue")
	w.a.portIs(port, v1alpha1.ReasonUp)
	if got := agent.Addresses("c1pf0vf0"); !slices.Equal(got, []string{"10.1.0.2"}) {
		t.Errorf("the xPU was told addresses %q, want that which the tenant's cluster gave", got)
	}
	if got := port.Status; !slices.Equal(got.Addresses, []string{"10.1.0.2/24"}) ||
		got.BridgePort != "c1pf0vf0" {
		t.Errorf("status %+v", got)
	}

	closed := w.a.network("closed", 11)
	closed.Spec.AllowedNamespaces.From = v1alpha1.NamespacesFromNone
	if err := w.a.Update(t.Context(), closed); err != nil && !apierrors.IsConflict(err) {
		t.Fatal(err)
	}

	w.a.eventually("the network is closed", func() error {
		if err := w.a.get(closed); err != nil {
			return err
		}
		closed.Spec.AllowedNamespaces.From = v1alpha1.NamespacesFromNone
		return w.a.Update(t.Context(), closed)
	})

	refused := w.a.agentPort("node1", vf(1), "card-a", "closed")
	w.a.portIs(refused, v1alpha1.ReasonForbidden)
	w.serves(agent, "c1pf0vf0")
	w.a.delete(refused)
	w.a.gone(refused)
	w.a.delete(port)
	w.a.gone(port)
	w.serves(agent)
}

// TestSegments covers exhausted ranges and the overlapping ranges of two tenants.
func TestSegments(t *testing.T) {
	w := newWorld(t)
	own := w.infra.network("infra-own", 100)
	w.infra.networkIs(own, v1alpha1.ReasonUp)
	tenant, _ := w.scene(w.a, func(spec *v1alpha1.XPUTenantSpec) {
		spec.VLANs = v1alpha1.VLANRange{First: 99, Last: 101}
	})
	// the 100th
	w.a.networkIs(&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}},
		v1alpha1.ReasonUp)
	first := w.a.network("first", 0)
	w.a.networkIs(first, v1alpha1.ReasonUp)
	made := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "a.first"}}
	if err := w.infra.get(made); err != nil || made.Spec.VLAN != 101 {
		t.Errorf("VLAN %d, want the one that the infra cluster does not use: %v",
			made.Spec.VLAN, err)
	}

	second := w.a.network("second", 0, "10.2.0.0/24")
	w.a.networkIs(second, v1alpha1.ReasonQuotaExceeded)
	waits := w.a.agentPort("node1", vf(0), "card-a", "second")
	w.a.portIs(waits, v1alpha1.ReasonNetworkNotReady)
	w.a.delete(first)
	w.a.gone(first)

	w.infra.eventually("a larger range", func() error {
		if err := w.infra.get(tenant); err != nil {
			return err
		}
		tenant.Spec.VLANs.Last = 110
		return w.infra.Update(t.Context(), tenant)
	})

	w.a.networkIs(second, v1alpha1.ReasonUp)
	w.a.portIs(waits, v1alpha1.ReasonUp)

	younger := w.joins(w.b, func(spec *v1alpha1.XPUTenantSpec) {
		spec.VLANs = v1alpha1.VLANRange{First: 105, Last: 120}
	})
	w.infra.tenantIs(younger, v1alpha1.ConditionSynced, v1alpha1.ReasonConflict)
	theirs := w.b.network("blue", 0)
	w.b.networkIs(theirs, v1alpha1.ReasonConflict)
}

// TestSegmentOfNobody checks that a starting broker frees segments that a killed one left
// allocated.
func TestSegmentOfNobody(t *testing.T) {
	w := newWorld(t)
	tenant, _ := w.scene(w.a, nil)
	w.a.networkIs(&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}},
		v1alpha1.ReasonUp)
	w.stopBroker()

	w.infra.eventually("a segment of a network that nobody has", func() error {
		if err := w.infra.get(tenant); err != nil {
			return err
		}
		tenant.Status.Networks = append(tenant.Status.Networks,
			v1alpha1.TenantNetwork{Name: "gone", VLAN: 1009})
		return w.infra.Status().Update(t.Context(), tenant)
	})

	w.startBroker()
	w.infra.eventually("it is given back", func() error {
		if err := w.infra.get(tenant); err != nil {
			return err
		}
		if n := tenant.Status.Networks; len(n) != 1 || n[0].Name != "blue" {
			return fmt.Errorf("segments %+v", n)
		}
		return nil
	})
}

// TestRights checks that the broker's token allows in a tenant's cluster what it must, and nothing
// else.
func TestRights(t *testing.T) {
	w := newWorld(t)
	w.scene(w.a, nil)
	w.stopBroker()
	rights, err := w.a.configFor(t.Context(), systemNamespace, "xpu-broker")
	if err != nil {
		t.Fatal(err)
	}

	broker, err := client.New(rights, client.Options{Scheme: w.a.Scheme()})
	if err != nil {
		t.Fatal(err)
	}

	t.Run("roles", func(t *testing.T) {
		w.a.create(&corev1.ServiceAccount{
			ObjectMeta: metav1.ObjectMeta{Namespace: systemNamespace, Name: "nobody"},
		})
		everyone := w.a.rules(t, systemNamespace, "nobody")
		for _, rule := range w.a.rules(t, systemNamespace, "xpu-broker") {
			if !slices.Contains(everyone, rule) &&
				!strings.HasPrefix(rule, v1alpha1.GroupName+" ") &&
				rule != "events.k8s.io events create patch" {
				t.Errorf("it may %s", rule)
			}
		}
	})

	// Policies take effect a moment after their creation.
	refused := func(what string, try func() error) {
		t.Helper()
		w.a.eventually(what+" is refused", func() error {
			if err := try(); !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
				return cmp.Or(err, errors.New("it was done"))
			}
			return nil
		})
	}

	patch := func(o client.Object, body string) func() error {
		return func() error {
			return broker.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(body)),
				client.DryRunAll)
		}
	}

	network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}
	port := w.a.agentPort("node1", vf(0), "card-a", "blue")
	own := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "own"}}
	w.a.create(own)
	refused("the spec of a network", patch(network, `{"spec":{"mtu":1400}}`))
	refused("a label of a network", patch(network, `{"metadata":{"labels":{"a":"b"}}}`))
	refused("another finalizer", patch(network, `{"metadata":{"finalizers":["somebody.else/x"]}}`))
	refused("an annotation of a port", patch(port, `{"metadata":{"annotations":{"a":"b"}}}`))
	refused("an XPU that somebody else made", patch(own, `{"spec":{"nodeName":"x"}}`))
	refused("deleting a port", func() error {
		return broker.Delete(t.Context(), port, client.DryRunAll)
	})
	refused("deleting an XPU that somebody else made", func() error {
		return broker.Delete(t.Context(), own, client.DryRunAll)
	})
	refused("reading Secrets", func() error {
		return broker.List(t.Context(), &corev1.SecretList{})
	})
	refused("reading pods", func() error { return broker.List(t.Context(), &corev1.PodList{}) })
	refused("reading claims", func() error {
		return broker.List(t.Context(), &resourceapi.ResourceClaimList{})
	})

	refused("making a port", func() error {
		made := claim.NewPort(systemNamespace, vf(1), "fast", *port.Spec.DeepCopy())
		return broker.Create(t.Context(), made, client.DryRunAll)
	})

	for what, try := range map[string]func() error{
		"the status of a port": func() error {
			return patchStatus(t, broker, port, `{"status":{"bridgePort":"x"}}`)
		},
		"the finalizer of a network": patch(network,
			`{"metadata":{"finalizers":["xpu.opiproject.org/network"]}}`),
		"an XPU that it made": patch(&v1alpha1.XPU{
			ObjectMeta: metav1.ObjectMeta{Name: "card-a"},
		}, `{"spec":{"nodeName":"x"}}`),
	} {
		if err := try(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// rules returns what a ServiceAccount may do in namespace default, as "group resources verbs".
func (s *testCluster) rules(t *testing.T, namespace, name string) (rules []string) {
	t.Helper()
	rights, err := s.configFor(t.Context(), namespace, name)
	if err != nil {
		t.Fatal(err)
	}

	c, err := client.New(rights, client.Options{Scheme: s.Scheme()})
	if err != nil {
		t.Fatal(err)
	}

	review := &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "default"},
	}
	if err := c.Create(t.Context(), review); err != nil {
		t.Fatal(err)
	}

	for _, rule := range review.Status.ResourceRules {
		rules = append(rules,
			strings.Join(slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs), " "))
	}

	return rules
}

func patchStatus(t *testing.T, c client.Client, o client.Object, body string) error {
	return c.Status().Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(body)),
		&client.SubResourcePatchOptions{
			PatchOptions: client.PatchOptions{DryRun: []string{metav1.DryRunAll}},
		})
}
