// SPDX-License-Identifier: Apache-2.0

package provisioning_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/go-logr/logr/testr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning/provisioningtest"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// site is a node with one pool of eight VFs, whose agent makes Ports ahead.
type site struct {
	testing.TB
	admin   client.Client
	api     *kubeapi.API
	changed notify.Signal

	functions []function.Function // all VFs at first, later those that the pool still has

	mu   sync.Mutex
	pool pool.Pool
	busy map[function.ID]bool
}

func newSite(t *testing.T, ahead int32) *site {
	cluster.Need(t)
	declare(t, opitest.Start(t))
	s := &site{TB: t, admin: admin(t), busy: map[function.ID]bool{}}
	s.pool = pool.Pool{Name: provisioningtest.Pool, Spec: v1alpha1.DevicePoolSpec{
		Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}},
		Publish:   v1alpha1.PublishDRA,
		Provision: v1alpha1.ProvisionAhead, PortsAhead: &ahead, Network: provisioningtest.Blue,
	}}

	declared := &v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: provisioningtest.Pool}, Spec: s.pool.Spec,
	}
	if err := s.admin.Create(t.Context(), declared); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := s.admin.Delete(context.Background(), declared); err != nil {
			t.Errorf("DevicePool: %v", err)
		}
	})

	for index := range 8 {
		f := vf(index)
		f.ID.Address = pci.Address(fmt.Sprintf("0000:3b:02.%d", index))
		s.pool.Functions = append(s.pool.Functions, f)
	}

	s.functions = s.pool.Functions
	startController(t)
	var err error
	s.api, err = kubeapi.New(cluster.Agent(node), node,
		kubeapi.Events{DeclarationsChanged: func() {}, PortsChanged: s.changed.Notify})
	if err != nil {
		t.Fatal(err)
	}

	inBackground(t, "API", s.api.Run)
	a := &provisioning.Ahead{
		API: s.api, Node: node, Namespace: kubeapitest.AgentNamespace, Log: testr.New(t),
		Pools: func() ([]pool.Pool, bool) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return []pool.Pool{s.pool}, true
		},
		Free: func(f function.Function) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return !s.busy[f.ID]
		},
	}

	inBackground(t, "ahead", func(ctx context.Context) error {
		return a.Run(ctx, s.changed.Subscribe(ctx))
	})

	return s
}

// set runs change, which modifies what the agent knows, and then wakes the agent.
func (s *site) set(change func()) {
	s.mu.Lock()
	change()
	s.mu.Unlock()
	s.changed.Notify()
}

// has waits until exactly these VFs have Ports that were made ahead and are up in the network.
func (s *site) has(network string, want ...int) {
	s.Helper()
	must.Eventually(s,
		fmt.Sprintf("Ports made ahead in network %s for VFs %v and no others", network, want),
		func() bool {
			var all v1alpha1.XPUPortList
			must.Succeed(s, s.admin.List(s.Context(), &all))
			var made []int
			for i, f := range s.functions {
				up := s.api.ProvisionedAhead(f.ID, network)
				if slices.ContainsFunc(all.Items, func(p v1alpha1.XPUPort) bool {
					return p.Spec.Ahead && claim.FunctionOf(p.Spec.Function) == f.ID && up
				}) {
					made = append(made, i)
				}
			}

			ahead := slices.DeleteFunc(all.Items, func(p v1alpha1.XPUPort) bool {
				return !p.Spec.Ahead
			})
			return slices.Equal(made, want) && len(ahead) == len(want)
		})
}

// TestAheadFollowsPool checks that Ports are made for the first free Functions, but for those of
// InfiniBand, follow changes of the pool, and are deleted with it.
func TestAheadFollowsPool(t *testing.T) {
	s := newSite(t, 2)
	s.has(provisioningtest.Blue, 0, 1)
	s.set(func() {
		s.busy[s.pool.Functions[2].ID] = true
		s.pool.Functions = slices.Clone(s.pool.Functions)
		s.pool.Functions[3].LinkType = function.InfiniBand
		s.pool.Spec.PortsAhead = new(int32(3))
	})
	s.has(provisioningtest.Blue, 0, 1, 4)
	s.set(func() { s.pool.Functions = s.pool.Functions[1:] })
	s.has(provisioningtest.Blue, 1, 4, 5)
	s.set(func() { s.pool.Spec.PortsAhead = new(int32(1)) })
	s.has(provisioningtest.Blue, 1)
	s.set(func() { s.pool.Spec.Provision = v1alpha1.ProvisionBeforeBind })
	s.has(provisioningtest.Blue)
}

// TestAheadMakesAnother checks that a claim's Port uses up the Port that was made ahead, and that
// another Function gets a new one.
func TestAheadMakesAnother(t *testing.T) {
	s := newSite(t, 2)
	s.has(provisioningtest.Blue, 0, 1)
	f := s.pool.Functions[0].ID
	port := claim.NewPort("default", f, provisioningtest.Pool, v1alpha1.XPUPortSpec{
		NodeName: node, XPU: provisioningtest.XPU, Network: provisioningtest.Blue,
		MAC:   "02:00:00:00:00:01",
		Claim: v1alpha1.ClaimRef{Name: "c", UID: "c-1", Request: "nic"},
	})

	if err := s.admin.Create(t.Context(), port); err != nil {
		t.Fatal(err)
	}

	s.has(provisioningtest.Blue, 1, 2)
}

// TestAheadLetsXPUGo checks that Ports made ahead are deleted with their XPU, because they must not
// keep the XPU from being deleted.
func TestAheadLetsXPUGo(t *testing.T) {
	s := newSite(t, 2)
	s.has(provisioningtest.Blue, 0, 1)
	xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: provisioningtest.XPU}}
	if err := s.admin.Delete(t.Context(), xpu); err != nil {
		t.Fatal(err)
	}

	s.has(provisioningtest.Blue)
	must.Eventually(t, "the XPU is gone", func() bool {
		return apierrors.IsNotFound(s.admin.Get(t.Context(), client.ObjectKeyFromObject(xpu), xpu))
	})
}
