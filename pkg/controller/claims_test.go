// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// The whole life of a Function of a pool that does not hold pods back, and what it costs the API
// server.
func TestLife(t *testing.T) {
	c := newCluster(t, func(o *Options) { o.CollectGrace = time.Hour })
	agent := opitest.Start(t)
	c.xpu("card", agent)

	c.create(&v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: "blue"},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 100, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			}, MTU: ptr.To[int32](9000), Subnets: []string{"10.1.0.0/24", "fd00:1::/64"},
		},
	})

	c.pool("fast", "blue")
	// the first Port of a network at an xPU costs a status
	c.up(c.claim(want{name: "neighbour", pool: "fast", function: vf(9)}), vf(9))
	c.writesSettle()

	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: `{"mtu":1500}`, pod: "p"})
	port := c.up(o, vf(0))
	wantSpec := v1alpha1.XPUPortSpec{
		NodeName: c.node, Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:02.0"}, XPU: "card",
		Network: "blue",
		MAC:     port.Spec.MAC, MTU: 1500, Addresses: []string{"10.1.0.3/24", "fd00:1::3/64"},
		Claim: v1alpha1.ClaimRef{Name: "a", UID: o.UID, Request: "nic", Pod: "p"},
	}

	if diff := gocmp.Diff(wantSpec, port.Spec); diff != "" {
		t.Errorf("XPUPort spec (-want +got):\n%s", diff)
	}
	if mac, err := net.ParseMAC(port.Spec.MAC); err != nil || mac[0] != 0x02 {
		t.Errorf("MAC %s is not a locally administered one", port.Spec.MAC)
	}
	if !slices.Contains(port.Finalizers, v1alpha1.FinalizerPort) ||
		!metav1.IsControlledBy(port, o) {
		t.Errorf("finalizers %q, owners %v", port.Finalizers, port.OwnerReferences)
	}
	if port.Labels[v1alpha1.LabelPool] != "fast" || port.Labels[v1alpha1.LabelNetwork] != "blue" {
		t.Errorf("labels %v", port.Labels)
	}
	if port.Status.BridgePort != "vf-0000-3b-02-0" {
		t.Errorf("bridge port %q", port.Status.BridgePort)
	}

	c.has(agent, "vf-0000-3b-02-0", "vf-0000-3b-03-1")

	// The garbage collector's part, which this API server has not.
	c.delete(o)
	c.delete(port)
	c.gone(port)
	if got := agent.Ports(); len(got) > 1 {
		t.Errorf("the XPUPort was gone while the agent still had %q", got)
	}
	if diff := gocmp.Diff([]string{"create XPUPort", "patch status XPUPort", "patch XPUPort"},
		c.writes.of("XPUPort", "ResourceClaim")); diff != "" {
		t.Errorf("writes (-want +got):\n%s", diff)
	}
	if got := c.writes.of("XPU", "XPUNetwork", "DevicePool"); len(got) > 0 {
		t.Errorf("a pod cost writes %q", got)
	}

	// What it had is free for the next one.
	next := c.claim(want{name: "b", pool: "fast", function: vf(0)})
	nextPort := c.up(next, vf(0))
	if diff := gocmp.Diff(port.Spec.Addresses, nextPort.Spec.Addresses); diff != "" {
		t.Errorf("addresses of the next Port (-want +got):\n%s", diff)
	}
	if nextPort.Spec.MAC == port.Spec.MAC {
		t.Errorf("both claims had MAC %s", port.Spec.MAC)
	}
}

// What the controller leaves out of its cache is not lost when it writes the claim's status.
func TestClaimKeepsWhatIsNotCached(t *testing.T) {
	c := newCluster(t, nil)
	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: `{"network":"none"}`})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNetworkNotFound,
		"XPUNetwork none does not exist")
	if err := c.get(o); err != nil || len(o.Spec.Devices.Requests) != 1 {
		t.Errorf("spec %+v (%v), want its request", o.Spec, err)
	}
}

// writesSettle waits until the objects that the administrator made have what the controller writes
// on them.
func (c *cluster) writesSettle() {
	c.Helper()
	c.eventually("XPUs, networks and pools have their conditions", func() error {
		var xpus v1alpha1.XPUList
		var networks v1alpha1.XPUNetworkList
		var pools v1alpha1.DevicePoolList
		var ports v1alpha1.XPUPortList
		for _, list := range []client.ObjectList{&xpus, &networks, &pools, &ports} {
			if err := c.List(context.Background(), list); err != nil {
				return err
			}
		}

		type bridge struct{ network, xpu string }
		needed := sets.New[bridge]()
		for i := range ports.Items {
			spec := &ports.Items[i].Spec
			needed.Insert(bridge{spec.Network, spec.XPU})
		}

		for _, x := range xpus.Items {
			if err := hasReason(x.Status.Conditions, v1alpha1.ConditionReady,
				v1alpha1.ReasonConnected, ""); err != nil {
				return fmt.Errorf("XPU %s: %w", x.Name, err)
			}
		}

		for _, n := range networks.Items {
			ready := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionReady)
			xpus := 0
			for b := range needed {
				if b.network == n.Name {
					xpus++
				}
			}

			if ready == nil || ready.ObservedGeneration != n.Generation ||
				ready.Status != metav1.ConditionTrue || int(n.Status.ReadyXPUs) != xpus {
				return fmt.Errorf("XPUNetwork %s: %+v", n.Name, n.Status)
			}
		}

		for _, p := range pools.Items {
			if meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionReady) == nil {
				return fmt.Errorf("DevicePool %s has no condition", p.Name)
			}
		}

		return nil
	})

	c.writes.reset()
}

// Where nobody collects garbage the controller does, after a while.
func TestClaimDeleted(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`})
	port := c.up(o, vf(0))
	c.delete(o)
	c.gone(port)
	c.has(agent)
}

func TestClaimDeallocated(t *testing.T) {
	c := newCluster(t, func(o *Options) { o.CollectGrace = time.Hour })
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	w := want{name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`}
	o := c.claim(w)
	port := c.up(o, vf(0))
	c.deallocate(o)
	c.gone(port)
	c.has(agent)

	w.function = vf(1)
	c.allocate(o, w)
	c.up(o, vf(1))
	c.has(agent, "vf-0000-3b-02-1")
}

// A Port of an earlier allocation is not taken for that of the present one.
func TestClaimReallocated(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	c.network("red", 200)
	w := want{name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`}
	o := c.claim(w)
	first := c.up(o, vf(0))

	c.stop() // the controller sees only the outcome
	c.deallocate(o)
	w.config = `{"network":"red"}`
	c.allocate(o, w)
	if err := c.get(o); err != nil {
		t.Fatal(err)
	}

	if stampOf(o) == first.Annotations[addresses.AnnotationAllocation] {
		// Stamps are to the second.
		c.deallocate(o)
		c.eventually("the next second", func() error {
			now := metav1.Now().UTC().Format(time.RFC3339)
			if now == first.Annotations[addresses.AnnotationAllocation] {
				return errors.New("not yet")
			}
			return nil
		})

		c.allocate(o, w)
	}

	c.start(nil)
	c.eventually("a Port of the second allocation", func() error {
		port := c.port(o, vf(0))
		if err := c.get(port); err != nil {
			return err
		}
		if port.UID == first.UID || port.Spec.Network != "red" {
			return fmt.Errorf("it is %s in %s", port.UID, port.Spec.Network)
		}
		return hasReason(port.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonUp, "")
	})
}

func TestBeforeBind(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.UpDelay = 300 * time.Millisecond })
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "blue")
	c.pool("bare", "")

	o := c.claim(want{name: "a", pool: "fast", function: vf(0), beforeBind: true})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonUp, "")
	port := c.port(o, vf(0))
	if err := c.get(port); err != nil ||
		!meta.IsStatusConditionTrue(port.Status.Conditions, v1alpha1.ConditionReady) {
		t.Errorf("the claim was provisioned before its Port: %v, %+v", err, port.Status)
	}

	bare := c.claim(want{name: "b", pool: "bare", function: vf(1), beforeBind: true})
	c.claimReason(bare, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNoPortNeeded, "")
	if err := c.get(c.port(bare, vf(1))); !apierrors.IsNotFound(err) {
		t.Errorf("a Port was made without a network: %v", err)
	}
	if got := c.writes.of("ResourceClaim"); !slices.Equal(got,
		[]string{"update status ResourceClaim", "update status ResourceClaim"}) {
		t.Errorf("writes %q", got)
	}
}

// A claim with adminAccess takes nothing, is told so, and its pod does not wait.
func TestOnlySeen(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100)
	c.pool("fast", "blue")

	c.eventually("the namespace allows adminAccess", func() error {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.namespace}}
		if err := c.get(namespace); err != nil {
			return err
		}
		metav1.SetMetaDataLabel(&namespace.ObjectMeta, resourceapi.DRAAdminNamespaceLabelKey,
			"true")
		return c.Update(context.Background(), namespace)
	})

	user := c.claim(want{name: "a", pool: "fast", function: vf(0)})
	c.portReason(c.port(user, vf(0)), v1alpha1.ReasonUp, "")
	monitor := c.claim(want{
		name: "b", pool: "fast", function: vf(0), beforeBind: true, admin: true,
	})
	c.claimReason(monitor, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNoPortNeeded,
		"takes nothing")
	var ports v1alpha1.XPUPortList
	err := c.List(t.Context(), &ports, client.InNamespace(c.namespace))
	if err != nil || len(ports.Items) != 1 {
		t.Errorf("%d XPUPorts, %v; want the user's alone", len(ports.Items), err)
	}
}

// A share of a PF has a Port once the agent has told which VF it chose for it, and another one when
// it chose another.
func TestChosen(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100)
	c.pool("fast", "blue")
	const share = types.UID("6f1c3a5e-0d0b-4a39-9a1c-000000000001")
	o := c.claim(want{
		name: "a", pool: "fast", function: function.ID{Address: testPF}, share: share,
	})
	choose := func(f function.ID) {
		t.Helper()
		c.eventually("the agent tells its choice", func() error {
			if err := c.get(o); err != nil {
				return err
			}

			data, err := claim.Choice{Function: f}.Data()
			if err != nil {
				return err
			}

			result := o.Status.Allocation.Devices.Results[0]
			i := slices.IndexFunc(o.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
				return claim.IsOf(&d, result.Pool, result.Device, share)
			})
			if i < 0 {
				i = len(o.Status.Devices)
				o.Status.Devices = append(o.Status.Devices,
					claim.NewEntry(result.Pool, result.Device, share))
			}

			o.Status.Devices[i].Data = data
			return c.Status().Update(context.Background(), o)
		})
	}

	choose(vf(0))
	c.portReason(c.port(o, vf(0)), v1alpha1.ReasonUp, "")
	choose(vf(1))
	c.portReason(c.port(o, vf(1)), v1alpha1.ReasonUp, "")

	c.eventually("the Port of the first choice is gone", func() error {
		if err := c.get(c.port(o, vf(0))); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
}

// What the node's agent writes into the same entry stays, and stays its own.
func TestClaimStatusShared(t *testing.T) {
	c := newCluster(t, nil)
	o := c.claim(want{
		name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`, pod: "p",
	})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNetworkNotFound,
		"XPUNetwork blue")
	d := o.Status.Devices[0]
	entry := resourceapply.AllocatedDeviceStatus().WithDriver(d.Driver).WithPool(d.Pool).
		WithDevice(d.Device).WithConditions(
		metaapply.Condition().WithType(v1alpha1.ConditionReady).WithStatus(metav1.ConditionFalse).
			WithReason("Waiting").WithMessage("m").WithLastTransitionTime(metav1.Now()))

	apply := func(status *resourceapply.ResourceClaimStatusApplyConfiguration) {
		t.Helper()
		err := c.Status().Apply(t.Context(),
			resourceapply.ResourceClaim(o.Name, o.Namespace).WithStatus(status),
			client.FieldOwner("xpu-agent"), client.ForceOwnership)
		if err != nil {
			t.Fatal(err)
		}
	}

	apply(resourceapply.ResourceClaimStatus().WithDevices(entry))
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100)
	c.up(o, vf(0))
	c.claimQuiet(o)
	if err := hasReason(o.Status.Devices[0].Conditions, v1alpha1.ConditionReady, "Waiting",
		"m"); err != nil {
		t.Error(err)
	}

	apply(resourceapply.ResourceClaimStatus())
	if err := c.get(o); err != nil || deviceHas(o, v1alpha1.ConditionReady) {
		t.Errorf("the agent cannot take back what it wrote: %v, %+v", err, o.Status.Devices)
	}
}

// The API server takes no change of the allocation, and opaque parameters are compared byte by
// byte.
func TestClaimParametersKept(t *testing.T) {
	c := newCluster(t, nil)
	config := `{ "network" : "blue", "mtu":1500, "interfaceName":"a&b"}`
	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: config, pod: "p"})
	before := o.Status.Allocation.DeepCopy()
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNetworkNotFound,
		"XPUNetwork blue")
	if diff := gocmp.Diff(before.Devices, o.Status.Allocation.Devices); diff != "" {
		t.Errorf("allocation (-before +after):\n%s", diff)
	}
}

// Each problem is told to the claim and its pod, and once its cause is gone it goes on at once.
func TestProblems(t *testing.T) {
	tests := []struct {
		name    string
		config  string
		pool    string
		before  func(*cluster)
		reason  string
		message string
		cure    func(*cluster) // nil: the claim has to be replaced
	}{
		{
			name: "network not there", config: `{"network":"blue"}`,
			reason: v1alpha1.ReasonNetworkNotFound, message: "XPUNetwork blue does not exist",
			cure: func(c *cluster) { c.network("blue", 100) },
		},
		{
			name: "pool not there", pool: "fast",
			before: func(c *cluster) { c.network("blue", 100) },
			reason: v1alpha1.ReasonNetworkNotFound, message: "DevicePool fast",
			cure: func(c *cluster) { c.pool("fast", "blue") },
		},
		{
			name: "pool names a network that is not there", pool: "fast",
			before: func(c *cluster) { c.network("blue", 100); c.pool("fast", "red") },
			reason: v1alpha1.ReasonNetworkNotFound, message: "XPUNetwork red",
			cure: func(c *cluster) {
				// the controller writes the status meanwhile
				c.eventually("set spec.network", func() error {
					pool := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "fast"}}
					if err := c.get(pool); err != nil {
						return err
					}
					pool.Spec.Network = "blue"
					return c.Update(context.Background(), pool)
				})
			},
		},
		{
			name: "no XPU", config: `{"network":"blue"}`,
			before: func(c *cluster) {
				c.network("blue", 100)
				c.delete(&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card"}})
			},
			reason: v1alpha1.ReasonNoXPU, message: "PF 0000:3b:00.0",
			cure: func(c *cluster) { c.xpu("other", c.agent()) },
		},
		{
			name: "XPU has other PFs", config: `{"network":"blue"}`,
			before: func(c *cluster) { c.network("blue", 100); c.setPFs("0000:5e:00.0") },
			reason: v1alpha1.ReasonNoXPU, message: "spec.pfs",
			cure: func(c *cluster) { c.setPFs("0000:5e:00.0", "0000:3b:00.0") },
		},
		{
			name: "network in conflict", config: `{"network":"junior"}`,
			before:  func(c *cluster) { c.network("a-senior", 100); c.network("junior", 100) },
			reason:  v1alpha1.ReasonNetworkNotReady,
			message: "VLAN 100 belongs to XPUNetwork a-senior",
			cure: func(c *cluster) {
				c.delete(&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "a-senior"}})
			},
		},
		{
			name: "no free address", config: `{"network":"blue"}`,
			before: func(c *cluster) {
				c.network("blue", 100, "10.1.0.0/30")
				c.up(c.claim(want{
					name: "other", pool: "fast", function: vf(7), config: `{"network":"blue"}`,
				}), vf(7))
			},
			reason: v1alpha1.ReasonNoFreeAddress, message: "10.1.0.0/30",
			cure: func(c *cluster) { c.delete(c.named("other")) },
		},
		{
			name: "no free address in the network of the pool", pool: "fast",
			before: func(c *cluster) {
				c.network("blue", 100, "10.1.0.0/30")
				c.pool("fast", "blue")
				c.up(c.claim(want{
					name: "other", pool: "fast", function: vf(7), config: `{"network":"blue"}`,
				}), vf(7))
			},
			reason: v1alpha1.ReasonNoFreeAddress, message: "10.1.0.0/30",
			cure: func(c *cluster) { c.delete(c.named("other")) },
		},
		{
			name: "the network of the pool in conflict", pool: "fast",
			before: func(c *cluster) {
				c.network("a-senior", 100)
				c.network("junior", 100)
				c.pool("fast", "junior")
			},
			reason:  v1alpha1.ReasonNetworkNotReady,
			message: "VLAN 100 belongs to XPUNetwork a-senior",
			cure: func(c *cluster) {
				c.delete(&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "a-senior"}})
			},
		},
		{
			name: "address taken", config: `{"network":"blue","addresses":["10.1.0.9/24"]}`,
			before: func(c *cluster) {
				c.network("blue", 100, "10.1.0.0/24")
				c.pool("fast", "")
				c.up(c.claim(want{
					name: "other", pool: "fast", function: vf(7),
					config: `{"network":"blue","addresses":["10.1.0.9/24"]}`,
				}), vf(7))
			},
			reason: v1alpha1.ReasonConflict, message: "10.1.0.9/24",
			cure: func(c *cluster) { c.delete(c.named("other")) },
		},
		{
			name: "Function busy", config: `{"network":"blue"}`,
			before: func(c *cluster) {
				c.network("blue", 100)
				c.up(c.claim(want{
					name: "other", pool: "fast", function: vf(0), config: `{"network":"blue"}`,
				}), vf(0))
			},
			reason: v1alpha1.ReasonFunctionBusy, message: "of ResourceClaim other",
			cure: func(c *cluster) { c.delete(c.named("other")) },
		},
		{
			name: "unknown field", config: `{"netwrok":"blue"}`,
			reason: v1alpha1.ReasonInvalidConfig, message: "netwrok",
		},
		{
			name: "bad MAC", config: `{"network":"blue","mac":"01:00:00:00:00:01"}`,
			before: func(c *cluster) { c.network("blue", 100) },
			reason: v1alpha1.ReasonInvalidConfig, message: "mac",
		},
		{
			name: "address outside", config: `{"network":"blue","addresses":["10.2.0.9/24"]}`,
			before:  func(c *cluster) { c.network("blue", 100, "10.1.0.0/24"); c.pool("fast", "") },
			reason:  v1alpha1.ReasonInvalidConfig,
			message: "none of the subnets of XPUNetwork blue (10.1.0.0/24)",
		},
		{
			name:   "MAC address of another Port",
			config: `{"network":"blue","mac":"02:00:00:00:00:07"}`,
			before: func(c *cluster) {
				c.network("blue", 100)
				c.pool("fast", "")
				c.up(c.claim(want{
					name: "other", pool: "fast", function: vf(7),
					config: `{"network":"blue","mac":"02:00:00:00:00:07"}`,
				}), vf(7))
			},
			reason:  v1alpha1.ReasonConflict,
			message: "MAC address 02:00:00:00:00:07 belongs to XPUPort",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := newCluster(t, nil)
			c.xpu("card", c.agent())

			if test.before != nil {
				test.before(c)
			}

			pool := test.pool
			if pool == "" {
				pool = "fast"
			}

			o := c.claim(want{name: "a", pool: pool, function: vf(0), config: test.config,
				pod: "p-" + c.namespace})
			c.claimReason(o, v1alpha1.ConditionProvisioned, test.reason, test.message)
			c.told("ResourceClaim", "a", test.reason)
			c.told("Pod", "p-"+c.namespace, test.reason)
			if test.cure == nil {
				return
			}

			test.cure(c)
			c.up(o, vf(0))
			c.claimQuiet(o)
		})
	}
}

// agent is an OPI agent for this test.
func (c *cluster) agent() *opitest.Agent { return opitest.Start(c.TB) }

func (c *cluster) named(name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name},
	}
}

func (c *cluster) setPFs(pfs ...string) {
	c.Helper()
	c.eventually("set spec.pfs", func() error {
		x := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card"}}
		if err := c.get(x); err != nil {
			return err
		}
		x.Spec.PFs = pfs
		return c.Update(context.Background(), x)
	})
}

// A Function goes from one claim to the next, in another namespace, only when its Port is gone from
// the xPU.
func TestFunctionHandOver(t *testing.T) {
	c := newCluster(t, func(o *Options) { o.BusyGrace = time.Hour })
	agent := c.agent()
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "")
	elsewhere := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "t-"}}
	c.create(elsewhere)

	first := c.claim(want{
		name: "a", pool: "fast", function: vf(0),
		config: `{"network":"blue","mac":"02:00:00:00:00:01"}`,
	})

	firstPort := c.up(first, vf(0))
	agent.Set(func(b *opitest.Behaviour) { b.DeleteTail = 500 * time.Millisecond })
	c.writes.reset()
	c.delete(first)
	second := c.claim(want{name: "a", namespace: elsewhere.Name, pool: "fast", function: vf(0),
		config: `{"network":"blue","mac":"02:00:00:00:00:02"}`})
	c.eventually("the second claim's Port", func() error {
		err := c.get(c.port(second, vf(0)))
		if gone := c.get(firstPort); err == nil && !apierrors.IsNotFound(gone) {
			t.Fatalf("two Ports for one Function")
		}
		return err
	})

	c.up(second, vf(0))
	if got := c.writes.of("ResourceClaim"); len(got) > 0 {
		t.Errorf("a Function that just changed hands was worth %q", got)
	}

	c.has(agent, "vf-0000-3b-02-0")
}

// When the xPU refuses, the device is tainted first, and then the claim is told.
func TestProvisionFailed(t *testing.T) {
	c := newCluster(t, nil)
	agent := c.agent()
	agent.Set(func(b *opitest.Behaviour) {
		b.Realise = func(string) error { return errors.New("no such representor") }
	})
	c.xpu("card", agent)
	c.network("blue", 100)
	slice := c.slice("fast", vf(0))
	w := want{name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`,
		beforeBind: true, pod: "p"}
	o := c.claim(w)
	port := c.port(o, vf(0))
	c.portReason(port, v1alpha1.ReasonFailed, "no such representor")
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonFailed, "no such representor")
	if deviceHas(o, v1alpha1.ConditionProvisionFailed) {
		t.Error("the claim was told before the device was tainted")
	}

	taint := resourceapi.DeviceTaint{
		Key: v1alpha1.TaintProvisionFailed, Effect: resourceapi.DeviceTaintEffectNoSchedule,
	}
	slice.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{taint}
	if err := c.Update(t.Context(), slice); err != nil {
		t.Fatal(err)
	}

	c.claimReason(o, v1alpha1.ConditionProvisionFailed, v1alpha1.ReasonFailed,
		"no such representor")

	// The scheduler gives the device back and takes another one.
	c.deallocate(o)
	c.gone(port)
	agent.Set(func(b *opitest.Behaviour) { b.Realise = nil })
	w.function = vf(1)
	c.allocate(o, w)
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonUp, "")
	if deviceHas(o, v1alpha1.ConditionProvisionFailed) {
		t.Error("the second device failed too")
	}
}

func TestProvisionFailedWithoutTaint(t *testing.T) {
	c := newCluster(t, func(o *Options) {
		o.TaintGrace, o.ProvisionTimeout = 300*time.Millisecond, 2*time.Second
	})
	agent := c.agent()
	agent.Set(func(b *opitest.Behaviour) { b.UpDelay = time.Hour })
	c.xpu("card", agent)
	c.network("blue", 100, "10.0.0.0/24")
	c.slice("fast", vf(0))
	o := c.claim(want{
		name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`, beforeBind: true,
	})
	c.claimReason(o, v1alpha1.ConditionProvisionFailed, v1alpha1.ReasonFailed,
		"not up 2s after its creation")
}

func deviceHas(o *resourceapi.ResourceClaim, conditionType string) bool {
	return slices.ContainsFunc(o.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		return meta.FindStatusCondition(d.Conditions, conditionType) != nil
	})
}

// slice publishes Functions as the node's agent would.
func (c *cluster) slice(pool string, functions ...function.ID) *resourceapi.ResourceSlice {
	c.Helper()
	s := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: c.node},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: v1alpha1.GroupName, NodeName: ptr.To(c.node),
			Pool: resourceapi.ResourcePool{
				Name: claim.PoolID{
					Node: c.node, PF: testPF, DevicePool: pool,
				}.String(),
				ResourceSliceCount: 1,
			},
		},
	}

	for _, f := range functions {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: f.DeviceName()})
	}

	c.create(s)
	return s
}

// Many claims at once on a subnet that is too small by three.
func TestAddressRace(t *testing.T) {
	c := newCluster(t, nil)
	agent := c.agent()
	c.xpu("card", agent)
	c.network("blue", 100, "10.1.0.0/26")
	c.pool("fast", "blue")
	const claims, room = 64, 61 // a /26 without its own, the first and the broadcast address
	for i := range claims {
		c.claim(want{name: fmt.Sprintf("c%d", i), pool: "fast", function: vf(i)})
	}

	addresses := map[string]string{}
	c.eventually("all addresses are given", func() error {
		var found v1alpha1.XPUPortList
		if err := c.List(context.Background(), &found,
			client.InNamespace(c.namespace)); err != nil {
			return err
		}

		clear(addresses)
		up := 0
		for _, p := range found.Items {
			if other, taken := addresses[p.Spec.Addresses[0]]; taken {
				t.Fatalf("%s and %s have %s", other, p.Name, p.Spec.Addresses[0])
			}
			addresses[p.Spec.Addresses[0]] = p.Name
			if meta.IsStatusConditionTrue(p.Status.Conditions, v1alpha1.ConditionReady) {
				up++
			}
		}

		var waiting resourceapi.ResourceClaimList
		if err := c.List(context.Background(), &waiting,
			client.InNamespace(c.namespace)); err != nil {
			return err
		}

		without := slices.DeleteFunc(waiting.Items, func(o resourceapi.ResourceClaim) bool {
			return len(o.Status.Devices) != 1 ||
				hasReason(o.Status.Devices[0].Conditions, v1alpha1.ConditionProvisioned,
					v1alpha1.ReasonNoFreeAddress, "") != nil
		})

		if up != room || len(without) != claims-room {
			return fmt.Errorf("%d Ports are up, %d claims without address", up, len(without))
		}

		return nil
	})

	for _, reserved := range []string{"10.1.0.0/26", "10.1.0.1/26", "10.1.0.63/26"} {
		if name, given := addresses[reserved]; given {
			t.Errorf("%s was given to %s", reserved, name)
		}
	}
}

// Nothing is written again by a controller that starts over a settled cluster.
func TestRestart(t *testing.T) {
	c := newCluster(t, nil)
	agent := c.agent()
	c.xpu("card", agent)
	c.network("blue", 100, "10.1.0.0/26")
	c.pool("fast", "blue")
	c.pool("held", "blue")
	a := c.claim(want{name: "a", pool: "fast", function: vf(0)})
	b := c.claim(want{name: "b", pool: "held", function: vf(1), beforeBind: true})
	c.up(a, vf(0))
	c.claimReason(b, v1alpha1.ConditionProvisioned, v1alpha1.ReasonUp, "")
	c.writesSettle()
	c.stop()

	verified := agent.Calls("GetBridgePort")
	c.start(nil)
	// Something new that is seen through proves that everything old has been looked at.
	last := c.claim(want{name: "c", pool: "fast", function: vf(2)})
	c.up(last, vf(2))

	c.eventually("old Ports are verified", func() error {
		if got := agent.Calls("GetBridgePort"); got < verified+4 {
			return fmt.Errorf("%d calls", got-verified)
		}
		return nil
	})

	if diff := gocmp.Diff([]string{"create XPUPort", "patch status XPUPort"},
		c.writes.of("XPUPort", "ResourceClaim", "XPU", "XPUNetwork", "DevicePool")); diff != "" {
		t.Errorf("writes (-want +got):\n%s", diff)
	}
	if port := c.port(a, vf(0)); c.get(port) != nil ||
		port.Spec.Addresses[0] == c.up(last, vf(2)).Spec.Addresses[0] {
		t.Error("an address was given twice")
	}
}

func TestSubfunction(t *testing.T) {
	c := newCluster(t, nil)
	agent := c.agent()
	c.xpu("card", agent)
	c.network("blue", 100)
	sf := function.SubfunctionID(testPF, 88)
	c.up(c.claim(want{name: "a", pool: "fast", function: sf, config: `{"network":"blue"}`}), sf)
	c.has(agent, "sf-3b-00-0-88")
}
