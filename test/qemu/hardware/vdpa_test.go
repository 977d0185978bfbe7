// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// TestVDPA checks that the vDPA device of a VF is found, selected and given to a container.
func TestVDPA(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	vf := card.VF(t, pf, 0)
	f := follow(t)
	must.Succeed(t, netlink.VDPANewDev("vdpa0", "pci", string(vf), netlink.VDPANewDevParams{}))
	begin := time.Now()
	made := function.VDPA{Name: "vdpa0", Driver: "vhost_vdpa", CharDevice: "vhost-vdpa-0"}
	has := func(want function.VDPA) func(function.Function) bool {
		return func(got function.Function) bool { return got.VDPA == want }
	}

	t.Run("discovered", func(t *testing.T) {
		f.until(t, begin, vf, "vDPA device with vhost_vdpa", has(made))
	})

	selector := v1alpha1.FunctionSelector{VDPAType: "vhost"}
	spec := v1alpha1.DevicePoolSpec{Selectors: []v1alpha1.FunctionSelector{selector}}
	t.Run("selected", func(t *testing.T) {
		devicePool := v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "fast"}, Spec: spec}
		pools := pool.Assign(f.Snapshot(), []v1alpha1.DevicePool{devicePool}, nil, nil)
		if len(pools) != 1 || len(pools[0].Functions) != 1 ||
			pools[0].Functions[0].ID.Address != vf {
			t.Errorf("pools %+v", pools)
		}
	})

	t.Run("handed out by a claim", func(t *testing.T) {
		c := newClaims(t, t.TempDir(), spec, func(string) {})
		object := claimOf(pf, vf, `"network": "lab"`)
		prepared, err := c.prepare(object)
		must.Succeed(t, err)
		container := c.container(prepared.Devices[0].CDIDeviceIDs...)
		if diff := cmp.Diff([]string{"/dev/vhost-vdpa-0"}, nodePaths(container)); diff != "" {
			t.Errorf("device nodes (-want +got):\n%s", diff)
		}

		wantEnv := []string{"XPU_FUNCTION_FAST=" + string(vf), "XPU_INTERFACE_FAST=net1",
			"XPU_VDPA_FAST=/dev/vhost-vdpa-0"}
		if diff := cmp.Diff(wantEnv, container.Process.Env); diff != "" {
			t.Errorf("environment (-want +got):\n%s", diff)
		}

		device, err := os.OpenFile("/dev/vhost-vdpa-0", os.O_RDWR, 0)
		must.Succeed(t, err)
		defer device.Close()

		// from linux/vhost.h and linux/virtio_ids.h
		const getDeviceID, network = 2<<30 | 4<<16 | 0xaf<<8 | 0x70, 1
		if id, err := unix.IoctlGetUint32(int(device.Fd()), getDeviceID); err != nil ||
			id != network {
			t.Errorf("virtio device %d, %v; want %d", id, err, network)
		}

		must.Succeed(t, c.unprepare(t.Context(), object))
	})

	t.Run("bound to virtio_vdpa", func(t *testing.T) {
		card.Set(t, "/sys/bus/vdpa/drivers/vhost_vdpa/unbind", "vdpa0")
		card.Set(t, "/sys/bus/vdpa/drivers/virtio_vdpa/bind", "vdpa0")
		f.until(t, time.Now(), vf, "vDPA device with virtio_vdpa",
			has(function.VDPA{Name: "vdpa0", Driver: "virtio_vdpa"}))
	})

	t.Run("deleted", func(t *testing.T) {
		must.Succeed(t, netlink.VDPADelDev("vdpa0"))
		f.until(t, time.Now(), vf, "no vDPA device", has(function.VDPA{}))
	})
}
