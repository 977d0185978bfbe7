// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// withPort is a cluster with one Port that is up.
func withPort(t *testing.T, set func(*Options)) (*cluster, *opitest.Agent, *v1alpha1.XPUPort) {
	t.Helper()
	c := newCluster(t, set)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	return c, agent, c.up(c.blue("a", 0), vf(0))
}

// blue is a claim of the n-th VF in network blue.
func (c *cluster) blue(name string, n int) *resourceapi.ResourceClaim {
	return c.claim(want{name: name, pool: "fast", function: vf(n), config: `{"network":"blue"}`})
}

// An agent that was away forgot everything. It gets it back, and nobody else is bothered.
func TestAgentForgets(t *testing.T) {
	c, agent, port := withPort(t, nil)
	other := c.up(c.blue("b", 1), vf(1))
	c.writesSettle()
	networks := agent.Networks()
	agent.Stop()
	if got := agent.Ports(); len(got) > 0 {
		t.Fatalf("the agent kept %q", got)
	}
	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	c.has(agent, "vf-0000-3b-02-0", "vf-0000-3b-02-1")
	c.eventually("the network is back", func() error {
		if got := agent.Networks(); !slices.Equal(got, networks) {
			return fmt.Errorf("the agent has %q, want %q", got, networks)
		}
		return nil
	})

	for _, p := range []*v1alpha1.XPUPort{port, other} {
		was := p.ResourceVersion
		if err := c.get(p); err != nil || p.ResourceVersion != was {
			t.Errorf("XPUPort %s was written: %v, %+v", p.Name, err, p.Status)
		}
	}

	if got := c.writes.of("XPUPort"); len(got) > 0 {
		t.Errorf("writes %q", got)
	}
}

// TestOptionsAreTold: an agent that can be told so knows the addresses of Ports, and the MTU and
// the filter of networks. It says itself which MTU a network without one can have.
func TestOptionsAreTold(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.Options, b.MTU = true, 1450 })
	c.xpu("card", agent)
	network := c.network("blue", 100, "10.1.0.0/24", "fd00:1::/64")
	port := c.up(c.blue("a", 0), vf(0))
	if port.Status.MTU != 1450 {
		t.Errorf("status.mtu %d, want what the agent says", port.Status.MTU)
	}
	if got := agent.Addresses(port.Status.BridgePort); !slices.Equal(got,
		[]string{"10.1.0.2", "fd00:1::2"}) {
		t.Errorf("the agent was told %q, want the addresses of %+v", got, port.Spec)
	}

	c.change(network, func() {
		network.Spec.MTU, network.Spec.SourceFilter = ptr.To[int32](1400), v1alpha1.SourceFilterNone
	})

	c.eventually("the agent is told of the change", func() error {
		got := agent.NetworkOptions(agent.Networks()[0])
		if got.GetMtu() != 1400 ||
			got.GetSourceFilter() != opibridge.SourceFilter_SOURCE_FILTER_NONE {
			return fmt.Errorf("it was told %v", got)
		}
		return nil
	})

	c.eventually("the Port has the network's MTU", func() error {
		if err := c.get(port); err != nil || port.Status.MTU != 1400 {
			return fmt.Errorf("it has %d, %v", port.Status.MTU, err)
		}
		return nil
	})
}

func TestAgentDown(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	agent.Stop()
	xpu := c.xpu("card", agent)
	network := c.network("blue", 100)
	c.xpuReason(xpu, v1alpha1.ReasonXPUUnavailable, "does not answer")
	o := c.blue("a", 0)
	c.networkReason(network, v1alpha1.ReasonXPUUnavailable, "none of the 1 XPUs")
	c.portReason(c.port(o, vf(0)), v1alpha1.ReasonXPUUnavailable, "XPU card cannot be reached")
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonXPUUnavailable, "XPU card")

	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	port := c.up(o, vf(0))
	c.claimQuiet(o)
	c.xpuReason(xpu, v1alpha1.ReasonConnected, "")
	c.networkReason(network, v1alpha1.ReasonUp, "1 of 1 XPUs")

	// A Port is not let go of while nobody can say that it is gone.
	agent.Set(func(b *opitest.Behaviour) { b.KeepOnStop = true })
	agent.Stop()
	c.xpuReason(xpu, v1alpha1.ReasonXPUUnavailable, "")
	c.delete(o)
	c.portReason(port, v1alpha1.ReasonReleasing, "cannot be reached")
	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	c.gone(port)
	c.has(agent)
}

// A connection that is down for less than the debounce time is no news.
func TestAgentFlaps(t *testing.T) {
	c := newCluster(t, func(o *Options) { o.Debounce = time.Hour })
	agent := opitest.Start(t)
	xpu := c.xpu("card", agent)
	c.xpuReason(xpu, v1alpha1.ReasonConnected, "")
	connected := xpu.ResourceVersion

	for range 3 {
		checks := agent.Calls("GetBridgePort")
		agent.Stop()
		if err := agent.Run(); err != nil {
			t.Fatal(err)
		}

		c.eventually("the agent is checked again", func() error {
			if agent.Calls("GetBridgePort") == checks {
				return errors.New("not yet")
			}
			return nil
		})
	}

	// Not the writes: one that comes of an old cache is tried, and refused.
	if err := c.get(xpu); err != nil || xpu.ResourceVersion != connected {
		t.Errorf("the XPU was written (%v): %+v", err, xpu.Status)
	}
}

// An agent that needs longer than one attempt gets there, and holds up nobody.
func TestAgentSlow(t *testing.T) {
	c := newCluster(t, func(o *Options) {
		o.AgentTimeout, o.Concurrency, o.ConcurrencyPerXPU = 300*time.Millisecond, 8, 4
	})
	slow, quick := opitest.Start(t), opitest.Start(t)
	c.xpu("slow", slow)

	c.create(&v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: "quick"},
		Spec: v1alpha1.XPUSpec{
			NodeName: c.node + "-2", Endpoint: quick.Config().Endpoint, Insecure: true,
		},
	})

	c.network("blue", 100)
	c.up(c.blue("first", 20), vf(20)) // and so the network is on the slow XPU
	slow.Set(func(b *opitest.Behaviour) { b.Held = true })
	var late []*resourceapi.ResourceClaim
	for i := range 16 { // more than there are workers
		late = append(late, c.blue(fmt.Sprintf("late%d", i), i))
	}

	c.portReason(c.port(late[0], vf(0)), v1alpha1.ReasonProvisioning, "pending")
	c.claim(want{name: "b", node: c.node + "-2", pool: "fast", function: vf(1),
		config: `{"network":"blue"}`})
	c.has(quick, "vf-0000-3b-02-1")

	for i, o := range late {
		if port := c.port(o, vf(i)); meta.IsStatusConditionTrue(port.Status.Conditions,
			v1alpha1.ConditionReady) {
			t.Errorf("Port %s is up although its agent is not done", port.Name)
		}
	}

	slow.Set(func(b *opitest.Behaviour) { b.Held = false })
	for i, o := range late {
		port := c.port(o, vf(i))
		c.eventually("slow Ports are up", func() error {
			if err := c.get(port); err != nil {
				return err
			}
			return hasReason(port.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonUp, "")
		})
	}
}

// Whatever an agent answers, the Port comes up once it can.
func TestAgentErrors(t *testing.T) {
	tests := []struct {
		name  string
		upset func(*opitest.Agent)
	}{
		{"unavailable", func(a *opitest.Agent) {
			a.FailNext("GetBridgePort", 3, codes.Unavailable, "try later")
		}},
		{"internal", func(a *opitest.Agent) {
			a.FailNext("CreateBridgePort", 2, codes.Internal, "oops")
		}},
		{"unknown", func(a *opitest.Agent) {
			a.FailNext("CreateBridgePort", 2, codes.Unknown, "oops")
		}},
		{"answer lost", func(a *opitest.Agent) { a.DropNext("CreateBridgePort", 2) }},
		{"network not there", func(a *opitest.Agent) {
			a.FailNext("CreateLogicalBridge", 2, codes.Unknown, "oops")
		}},
		{"not realised at first", func(a *opitest.Agent) {
			failures := 2
			a.Set(func(b *opitest.Behaviour) {
				b.Realise = func(string) error {
					if failures--; failures >= 0 {
						return errors.New("no representor yet")
					}
					return nil
				}
			})
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := newCluster(t, nil)
			agent := opitest.Start(t)
			test.upset(agent)
			c.xpu("card", agent)
			c.network("blue", 100)
			o := c.blue("a", 0)
			c.up(o, vf(0))
			c.claimQuiet(o)

			agent.FailNext("DeleteBridgePort", 2, codes.Unavailable, "try later")
			agent.DropNext("DeleteBridgePort", 1)
			c.delete(o)
			c.gone(c.port(o, vf(0)))
			c.has(agent)
		})
	}
}

// A Port that the agent cannot tear down keeps its XPUPort, which says so.
func TestStuckDelete(t *testing.T) {
	c, agent, port := withPort(t, func(o *Options) { o.AgentTimeout = 300 * time.Millisecond })
	agent.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
	c.delete(c.named("a"))
	c.portReason(port, v1alpha1.ReasonReleasing, "XPU card still has the Port")
	if !slices.Contains(port.Finalizers, v1alpha1.FinalizerPort) {
		t.Error("the finalizer is gone while the agent has the Port")
	}

	c.told("XPUPort", port.Name, v1alpha1.ReasonReleasing)
	if err := testutil.GatherAndCompare(c.registry, strings.NewReader(`
# HELP xpu_ports XPUPorts by XPU, which is _other if it does not exist, and by state: up, waiting, refused, releasing, ahead if no pod has the XPUPort, or standby while its virtual machine is being migrated. Only the leader has it.
# TYPE xpu_ports gauge
xpu_ports{state="releasing",xpu="card"} 1
`), "xpu_ports"); err != nil {
		t.Error(err)
	}

	// The card is taken out, and the administrator says so: then the Port is gone with it.
	agent.Stop()
	xpu := c.xpuNamed("card")
	c.abandon(xpu)
	c.delete(xpu)
	c.gone(port)
	c.gone(xpu)
	c.told("XPUPort", port.Name, v1alpha1.ReasonAbandoned)
}

// TestNetworkDeletion: a network that is being deleted is not kept for Ports that may come.
func TestNetworkDeletion(t *testing.T) {
	c, agent, port := withPort(t, func(o *Options) { o.BridgeGrace = time.Hour })
	network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}
	c.networkReason(network, v1alpha1.ReasonUp, "1 of 1")
	if got := agent.Networks(); !slices.Equal(got,
		[]string{opitest.Installation.NetworkID("blue")}) {
		t.Errorf("networks %q", got)
	}

	c.delete(network)
	c.networkReason(network, v1alpha1.ReasonInUse, port.Namespace+"/"+port.Name)
	c.told("XPUNetwork", "blue", v1alpha1.ReasonInUse)
	late := c.blue("late", 1)
	c.claimReason(late, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNetworkNotFound,
		"is being deleted")
	c.delete(c.named("a"))
	c.gone(network)
	if got := agent.Networks(); len(got) > 0 {
		t.Errorf("networks %q", got)
	}
}

func TestNetworkConflict(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	vni := int32(5000)
	first := &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: "a-first"}, Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 100, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			}, VNI: &vni,
		},
	}

	c.create(first)
	c.networkReason(first, v1alpha1.ReasonUp, "no XPUPort")
	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: `{"network":"a-first"}`})
	c.up(o, vf(0))

	second := &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: "b-second"}, Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 101, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			}, VNI: &vni,
		},
	}

	c.create(second)
	c.networkReason(second, v1alpha1.ReasonConflict, "VNI 5000 belongs to XPUNetwork a-first")
	c.told("XPUNetwork", "b-second", v1alpha1.ReasonConflict)
	if got := agent.Networks(); !slices.Equal(got,
		[]string{opitest.Installation.NetworkID("a-first")}) {
		t.Errorf("networks %q", got)
	}

	c.delete(o)
	c.delete(first)
	c.networkReason(second, v1alpha1.ReasonUp, "")
	c.up(c.claim(want{name: "b", pool: "fast", function: vf(1), config: `{"network":"b-second"}`}),
		vf(1))
	if got := agent.Networks(); !slices.Equal(got,
		[]string{opitest.Installation.NetworkID("b-second")}) {
		t.Errorf("networks %q", got)
	}
}

// TestNetworkOnXPUs: an xPU serves a network from the first to the last Port there, and what
// another xPU does costs it nothing.
func TestNetworkOnXPUs(t *testing.T) {
	c := newCluster(t, func(o *Options) { o.BridgeGrace = 50 * time.Millisecond })
	network := c.network("blue", 100)
	c.networkReason(network, v1alpha1.ReasonUp, "no XPUPort needs it")
	one, two := opitest.Start(t), opitest.Start(t)
	c.xpu("one", one)
	other := "another-" + c.node
	twoXPU := c.xpuOn(other, "two", two.Config().Endpoint)
	c.xpuReason(twoXPU, v1alpha1.ReasonConnected, "")
	if got := append(one.Networks(), two.Networks()...); len(got) > 0 {
		t.Errorf("networks %q that no Port needs", got)
	}

	c.up(c.blue("a", 0), vf(0))
	c.networkReason(network, v1alpha1.ReasonUp, "1 of 1")
	two.FailNext("CreateLogicalBridge", 3, codes.Unknown, "out of bridges")
	b := c.claim(want{
		name: "b", node: other, pool: "fast", function: vf(0), config: `{"network":"blue"}`,
	})
	c.networkReason(network, v1alpha1.ReasonUp, "2 of 2")
	asked := one.Calls("GetLogicalBridge") + one.Calls("GetBridgePort")
	two.Stop()
	c.networkReason(network, v1alpha1.ReasonUp, "1 of 2")
	want := []v1alpha1.XPUNetworkFailure{{XPU: "two", Message: "the OPI agent cannot be reached"}}
	if diff := gocmp.Diff(want, network.Status.Failures); diff != "" {
		t.Errorf("status.failures (-want +got):\n%s", diff)
	}
	if err := two.Run(); err != nil {
		t.Fatal(err)
	}

	c.networkReason(network, v1alpha1.ReasonUp, "2 of 2")
	// whether it answers
	if more := one.Calls("GetLogicalBridge") + one.Calls("GetBridgePort") - asked; more > 1 {
		t.Errorf("an xPU that flapped cost another one %d calls", more)
	}

	c.delete(b)
	c.networkReason(network, v1alpha1.ReasonUp, "1 of 1")

	c.eventually("the network is gone with its last Port", func() error {
		if got := two.Networks(); len(got) > 0 {
			return fmt.Errorf("the agent has %q", got)
		}
		return nil
	})
}

func TestXPUTLS(t *testing.T) {
	c := newCluster(t, nil)
	authority := opitest.NewAuthority(t)
	agent := opitest.Start(t)
	agent.Stop()
	serverCert, serverKey := authority.Issue(t, "127.0.0.1")
	pair, err := tls.X509KeyPair(serverCert, serverKey)
	if err != nil {
		t.Fatal(err)
	}

	if err := agent.RunTLS(&tls.Config{
		Certificates: []tls.Certificate{pair}, ClientCAs: authority.Pool(),
		ClientAuth: tls.RequireAndVerifyClientCert,
	}); err != nil {
		t.Fatal(err)
	}

	xpu := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: "card"},
		Spec: v1alpha1.XPUSpec{
			NodeName: c.node, Endpoint: agent.Config().Endpoint,
			TLS: &v1alpha1.XPUTLS{SecretName: "opi"},
		},
	}

	c.create(xpu)
	c.xpuReason(xpu, v1alpha1.ReasonInvalidTLSSecret, c.namespace+"/opi does not exist")
	network := c.network("blue", 100)
	o := c.blue("a", 0)
	c.portReason(c.port(o, vf(0)), v1alpha1.ReasonXPUUnavailable, "does not exist")
	c.networkReason(network, v1alpha1.ReasonXPUUnavailable, "")

	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "opi"}, Data: map[string][]byte{
			"tls.crt": []byte("x"), "tls.key": []byte("y"), "ca.crt": []byte("z"),
		},
	}

	c.create(secret)
	c.xpuReason(xpu, v1alpha1.ReasonInvalidTLSSecret, "PEM")

	// One that the agent does not trust.
	strange := opitest.NewAuthority(t)
	cert, key := strange.Issue(t, "client")
	secret.Data = map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": authority.PEM()}
	if err := c.Update(t.Context(), secret); err != nil {
		t.Fatal(err)
	}

	c.xpuReason(xpu, v1alpha1.ReasonXPUUnavailable, "")

	cert, key = authority.Issue(t, "client")
	secret.Data = map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": authority.PEM()}
	if err := c.Update(t.Context(), secret); err != nil {
		t.Fatal(err)
	}

	c.xpuReason(xpu, v1alpha1.ReasonConnected, "")
	c.up(o, vf(0))
}

// The creation time of a Port is cut to the second; what is measured is not.
func TestProvisioningIsMeasuredFinely(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100)
	must.Eventually(t, "a second is almost over", func() bool {
		return time.Now().Nanosecond() > 800e6
	})
	begin := time.Now()
	port := c.podPort(vf(0), "blue")
	c.create(port)
	c.portReason(port, v1alpha1.ReasonUp, "")
	took := time.Since(begin)
	families, err := c.registry.Gather()
	must.Succeed(t, err)

	for _, f := range families {
		if f.GetName() == "xpu_port_provisioning_seconds" {
			if got := f.GetMetric()[0].GetHistogram().GetSampleSum(); got > took.Seconds() {
				t.Errorf("%v s, but all was done after %s", got, took)
			}
			return
		}
	}

	t.Error("nothing was measured")
}

// An XPU that moves to another endpoint takes its Ports along.
func TestXPUMoves(t *testing.T) {
	c, _, _ := withPort(t, nil)
	next := opitest.Start(t)
	xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card"}}
	c.eventually("set spec.endpoint", func() error {
		if err := c.get(xpu); err != nil {
			return err
		}
		xpu.Spec.Endpoint = next.Config().Endpoint
		return c.Update(context.Background(), xpu)
	})

	c.has(next, "vf-0000-3b-02-0")
}

func TestMetrics(t *testing.T) {
	c, agent, _ := withPort(t, nil)
	agent.FailNext("CreateBridgePort", 1, codes.ResourceExhausted, "full")
	c.up(c.blue("b", 1), vf(1))
	if got, err := testutil.GatherAndCount(c.registry,
		"xpu_port_provisioning_seconds"); err != nil || got != 1 {
		t.Errorf("%d histograms: %v", got, err)
	}

	const want = `
# HELP xpu_opi_errors_total Failed operations on OPI agents, by XPU, operation and gRPC code; code Failed is a failure that the agent reported later.
# TYPE xpu_opi_errors_total counter
xpu_opi_errors_total{code="ResourceExhausted",operation="EnsurePort",xpu="card"} 1
# HELP xpu_ports XPUPorts by XPU, which is _other if it does not exist, and by state: up, waiting, refused, releasing, ahead if no pod has the XPUPort, or standby while its virtual machine is being migrated. Only the leader has it.
# TYPE xpu_ports gauge
xpu_ports{state="up",xpu="card"} 2
`

	// The gauges come from the controller's cache, which hears of the last status a moment after it
	// was written.
	c.eventually("metrics", func() error {
		return testutil.GatherAndCompare(c.registry, strings.NewReader(want),
			"xpu_opi_errors_total", "xpu_ports")
	})
}

func (c *cluster) xpuReason(xpu *v1alpha1.XPU, reason, text string) {
	c.Helper()
	c.eventually("XPU "+xpu.Name+" is "+reason, func() error {
		if err := c.get(xpu); err != nil {
			return err
		}
		return hasReason(xpu.Status.Conditions, v1alpha1.ConditionReady, reason, text)
	})
}

func (c *cluster) networkReason(network *v1alpha1.XPUNetwork, reason, text string) {
	c.Helper()
	c.eventually("XPUNetwork "+network.Name+" is "+reason, func() error {
		if err := c.get(network); err != nil {
			return err
		}
		return hasReason(network.Status.Conditions, v1alpha1.ConditionReady, reason, text)
	})
}

// What it takes from the allocation of a claim until the xPU serves the Port and the node's agent
// can see that.
func BenchmarkProvision(b *testing.B) {
	c := newCluster(b, nil)
	c.xpu("card", opitest.Start(b))
	c.network("blue", 100, "10.0.0.0/16")
	n := 0
	for b.Loop() {
		c.up(c.blue(fmt.Sprintf("c%d", n), n), vf(n))
		n++
	}
}
