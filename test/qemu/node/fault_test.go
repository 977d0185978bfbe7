// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// wantVerified checks that sriovnet says nothing else than the agent about the real cards, and that
// the XPUNode says so.
func wantVerified(t *testing.T, n *node.Node) {
	t.Helper()
	state, err := n.Admin().Verify(t.Context())
	must.Succeed(t, err)
	if v := state.Verification; v == nil || v.Different > 0 || v.Same == 0 || v.Skipped != "" {
		t.Errorf("the comparison with sriovnet is %+v", v)
	}

	n.Eventually("the XPUNode says that the inventory is verified", func() bool {
		var object v1alpha1.XPUNode
		err := n.Cluster.Admin.Get(t.Context(), client.ObjectKey{Name: plan.NodeName}, &object)
		must.Succeed(t, client.IgnoreNotFound(err))
		return meta.IsStatusConditionTrue(object.Status.Conditions,
			v1alpha1.ConditionInventoryVerified)
	})
}

// TestFault checks that an error that a driver reports by devlink is in ResourceSlices and at the
// kubelet within a second, and that its end is too. Functions of the other PF are not affected.
func TestFault(t *testing.T) {
	card.InGuest(t, "simnic")
	pfs := card.PFs(t)
	pf, vfs, others := pfs[0], node.VFs(t, pfs[0]), node.VFs(t, pfs[1])
	if len(vfs) != 3 {
		t.Fatalf("%d VFs, want 3", len(vfs))
	}

	var claims, plugged v1alpha1.FunctionSelector
	for _, pf := range pfs {
		claims.RootDevices = append(claims.RootDevices, string(pf)+"#0")
		plugged.RootDevices = append(plugged.RootDevices, string(pf)+"#1-6")
	}

	n := node.New(t,
		node.Options{Cluster: true, Pools: []v1alpha1.DevicePool{node.Pool("fast", plugged)}})
	n.Cluster.Create(&v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: "claims"},
		Spec:       v1alpha1.DevicePoolSpec{Selectors: []v1alpha1.FunctionSelector{claims}},
	})

	n.StartRuntime()
	published := watchSlices(t)

	// start starts the agent and returns when all slices are published, which takes some time.
	start := func(publications int) {
		n.Start()
		n.Eventually("the agent has published", func() bool { return publishing(n) > publications })
	}

	start(0)
	wantVerified(t, n)

	// follow makes the driver report an error or its end. It waits until the kubelet has these VFs
	// of the PF as healthy, and the slices of the PF have these devices.
	follow := func(t *testing.T, how string, healthy []function.ID, device string) {
		t.Helper()
		begin := time.Now()

		if how != "" {
			card.SetAttribute(t, pf, "simnic_break", how)
		}

		ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
		defer cancel()

		var slice time.Time
		var err error
		var waiting sync.WaitGroup
		waiting.Go(func() { slice, err = published.await(ctx, pf, device) })
		n.WantHealthy(resource, append(slices.Clone(others[1:]), healthy...)...)
		listed := time.Now()
		waiting.Wait()
		must.Succeed(t, err)
		t.Logf("slices had it after %s, and the kubelet after %s", since(slice, begin),
			since(listed, begin))
	}

	untainted := vfs[0].DeviceName()
	faulty := untainted + " " + v1alpha1.TaintFault
	follow(t, "", vfs[1:], untainted)
	quiet := published.writes(pf)

	t.Run("error of a PF", func(t *testing.T) { follow(t, "1", nil, faulty) })
	t.Run("agent started anew", func(t *testing.T) {
		n.End()
		before := published.writes("")
		start(publishing(n))
		follow(t, "", nil, faulty)
		if now := published.writes(""); now != before {
			t.Errorf("slices were written %d times", now-before)
		}
	})

	t.Run("recovery of a PF", func(t *testing.T) { follow(t, "0", vfs[1:], untainted) })
	t.Run("error of the ports of VFs", func(t *testing.T) {
		conn, err := devlink.Dial("")
		must.Succeed(t, err)
		defer conn.Close()

		must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Switchdev))
		defer func() { must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Legacy)) }()

		follow(t, "1 2", vfs[1:2], untainted)
		follow(t, "1 0", vfs[1:2], faulty)
		follow(t, "0 2", vfs[1:], faulty)
		follow(t, "0 0", vfs[1:], untainted)
	})

	if now := published.writes(pf); now != quiet {
		t.Errorf("slices of the other PF were written %d times", now-quiet)
	}

	n.End()
}

// publishing returns how often agents published devices that differed from the last ones.
func publishing(n *node.Node) int { return strings.Count(n.Log(), `msg="Publishing devices"`) }
