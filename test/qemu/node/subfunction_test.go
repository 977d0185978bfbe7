// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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

// TestClaimedSubfunction takes an SF that is made on demand to pods by DRA and NRI. It checks that
// the published devices stay the same all the time.
func TestClaimedSubfunction(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	vf, sf := node.VFs(t, pf)[0], function.SubfunctionID(pf, firstSF)
	n := node.New(t, node.Options{Cluster: true})

	declared := &v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: "sfs"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors:    []v1alpha1.FunctionSelector{{RootDevices: []string{string(pf) + "#0"}}},
			SFs:          &v1alpha1.SFSpec{Count: 1, FirstNumber: firstSF},
			MaxAllocated: new(int32(1)),
			Allow:        []v1alpha1.PrivilegedField{v1alpha1.FieldMAC},
		},
	}

	n.Cluster.Create(declared)
	n.StartRuntime()
	n.Start()

	devices := func() (vfThere, sfThere bool) {
		devices := n.Cluster.Devices()
		_, vfThere = devices[vf.DeviceName()]
		_, sfThere = devices[sf.DeviceName()]
		return vfThere, sfThere
	}

	pools := func() []v1alpha1.XPUNodePool {
		var node v1alpha1.XPUNode
		must.Succeed(t,
			client.IgnoreNotFound(n.Cluster.Admin.Get(t.Context(),
				client.ObjectKey{Name: plan.NodeName}, &node)))
		return node.Status.Pools
	}

	n.Run("in eswitch mode legacy only the VF is offered, and the pool says why",
		func(t *testing.T) {
			n.Eventually("the VF is offered", func() bool { vf, sf := devices(); return vf && !sf })
			n.Eventually("the pool says why", func() bool {
				pools := pools()
				return len(pools) == 1 && len(pools[0].Shortages) == 1 &&
					pools[0].Shortages[0].PF == string(pf) &&
					pools[0].Shortages[0].Reason == v1alpha1.ReasonNotSupported &&
					strings.Contains(pools[0].Shortages[0].Message, "mode legacy")
			})
		})

	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	t.Cleanup(conn.Close)

	must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Switchdev))
	t.Cleanup(func() { must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(pf), devlink.Legacy)) })

	n.Eventually("both are offered", func() bool { vf, sf := devices(); return vf && sf })
	n.Eventually("the pool has what it asks for", func() bool {
		pools := pools()
		return len(pools) == 1 && len(pools[0].Shortages) == 0
	})

	before := n.Cluster.Versions()
	n.Run("the slices say how many may be allocated at once", func(t *testing.T) {
		counters := 0
		for _, slice := range n.Cluster.Slices() {
			for _, set := range slice.Spec.SharedCounters {
				for _, counter := range set.Counters {
					counters++
					if counter.Value.Value() != 1 {
						t.Errorf("counter of %s is %s, want 1", slice.Name, counter.Value.String())
					}
				}
			}
		}

		if counters != 1 {
			t.Errorf("%d counters, want 1", counters)
		}

		for name, device := range n.Cluster.Devices() {
			if len(device.ConsumesCounters) != 1 {
				t.Errorf("device %s consumes %v", name, device.ConsumesCounters)
			}
		}
	})

	n.AwaitRuntime()
	driver := n.Register()
	for _, test := range []struct {
		name   string
		killed bool
	}{{"made, attached and deleted", false}, {"agent killed while a pod has it", true}} {
		n.Run(test.name, func(t *testing.T) {
			pod := n.NewPod("sf", 1)
			object := n.Cluster.Allocate(pod, "sfs", pf, sf, v1alpha1.InterfaceConfig{
				InterfaceName: "net1", MAC: "02:00:00:00:00:58",
				Addresses: []string{pod.IP.String() + "/24"},
			})

			driver.MustPrepare(object)
			if got := subfunctions(t); !cmp.Equal(got, []string{"88"}) {
				t.Errorf("SFs are %q, want 88", got)
			}

			pod.MustRun("net1")
			if got := pod.Interface("net1").HardwareAddr.String(); got != "02:00:00:00:00:58" {
				t.Errorf("net1 has MAC %s", got)
			}

			if test.killed {
				n.Kill()
				n.Start()
				n.AwaitRuntime()
				driver = n.Register()
			}

			pod.MustStop()
			driver.MustUnprepare(object)
			if got := subfunctions(t); len(got) > 0 {
				t.Errorf("SFs %q are left behind", got)
			}

			n.Cluster.Unallocate(object)
		})
	}

	if diff := cmp.Diff(before, n.Cluster.Versions()); diff != "" {
		t.Errorf("slices were written (-before +now):\n%s", diff)
	}

	n.End()
	n.WantNothingLeft()
}
