// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"path/filepath"
	"testing"

	vnetns "github.com/vishvananda/netns"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/rdma"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
)

// TestClaimedRDMA takes VFs with their RDMA devices to pods by DRA and NRI, where the RDMA system is
// in mode exclusive. The node's pods have network namespaces, so the mode is set before.
func TestClaimedRDMA(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	card.ExclusiveRDMA(t, pf)
	vf := node.VFs(t, pf)[1]
	before := rdmaDevices(t, vnetns.None())

	n := node.New(t, node.Options{Cluster: true})
	n.Cluster.Create(&v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: "roce"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{
				RootDevices: []string{string(pf)}, IsRdma: true,
			}},
			Allow: []v1alpha1.PrivilegedField{v1alpha1.FieldAddresses},
		},
	})
	n.StartRuntime()
	n.Start()

	n.Run("the VF is offered", func(t *testing.T) {
		n.Eventually("a device with RDMA", func() bool {
			device := n.Cluster.Devices()[vf.DeviceName()]
			has := device.Attributes["rdma"].BoolValue
			return has != nil && *has && len(device.Taints) == 0
		})
	})

	n.AwaitRuntime()
	driver := n.Register()
	for _, test := range []struct {
		name   string
		killed bool
	}{{"attached and released", false}, {"agent killed while a pod has it", true}} {
		n.Run(test.name, func(t *testing.T) {
			pod := n.NewPod("roce", 1)
			object := n.Cluster.Allocate(pod, "roce", pf, vf, v1alpha1.InterfaceConfig{
				InterfaceName: "net1", Addresses: []string{pod.IP.String() + "/24"},
			})
			driver.MustPrepare(object)
			pod.MustRun("net1")

			ns := vnetns.NsHandle(pod.Fd())
			if got := rdmaDevices(t, ns); len(got) != 1 || len(before) != len(node.VFs(t, pf)) {
				t.Errorf("the pod has RDMA devices %q, and the host had %q", got, before)
			}
			nodes := entries(t, filepath.Join(card.Devices, string(vf.Address), "infiniband_verbs"))
			if len(nodes) != 1 || !n.Gives("/dev/infiniband/"+nodes[0]) {
				t.Errorf("containers do not get %q", nodes)
			}

			if test.killed {
				n.Kill()
				n.Start()
				n.AwaitRuntime()
				driver = n.Register()
			}

			pod.MustStop()
			driver.MustUnprepare(object)
			if got := rdmaDevices(t, vnetns.None()); len(got) != len(before) {
				t.Errorf("the host has RDMA devices %q, want %q", got, before)
			}
			n.Cluster.Unallocate(object)
		})
	}

	n.End()
	n.WantNothingLeft()
}

// rdmaDevices returns the names of the RDMA devices in a network namespace.
func rdmaDevices(t *testing.T, ns vnetns.NsHandle) (names []string) {
	t.Helper()
	devices, err := rdma.System{}.List(ns)
	must.Succeed(t, err)
	for _, d := range devices {
		names = append(names, d.Name)
	}
	return names
}
