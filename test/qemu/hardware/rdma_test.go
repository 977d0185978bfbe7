// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// TestRDMASoft shows why a Soft-RoCE device does not belong to a Function: the kernel ties it to
// the netdev alone, and removes it when the netdev goes to a pod.
func TestRDMASoft(t *testing.T) {
	card.InGuest(t, "igb")
	const rxe = "/sys/class/infiniband/rxe0"
	vf := card.VF(t, card.PFs(t)[0], 1)
	name := card.Netdev(vf)
	f := follow(t)
	must.Succeed(t, netlink.RdmaLinkAdd("rxe0", "rxe", name))

	t.Run("kernel shows the netdev and not the Function", func(t *testing.T) {
		parent, err := os.ReadFile(filepath.Join(rxe, "parent"))
		if err != nil || strings.TrimSpace(string(parent)) != name {
			t.Errorf("parent %q, %v; want %s", parent, err, name)
		}

		place, err := os.Readlink(rxe)
		if err != nil || !strings.Contains(place, "/devices/virtual/") {
			t.Errorf("it is at %s, %v", place, err)
		}

		for _, class := range []string{"infiniband", "infiniband_verbs"} {
			if _, err := os.Stat(filepath.Join(card.Devices, string(vf),
				class)); !os.IsNotExist(err) {
				t.Errorf("%s below the VF: %v", class, err)
			}
		}

		if _, err := os.Stat("/dev/infiniband/uverbs0"); err != nil {
			t.Error(err)
		}
		if got, _ := f.Get(function.ID{Address: vf}); got.RDMA || len(got.RDMADevices) > 0 {
			t.Errorf("the VF has RDMA devices %q", got.RDMADevices)
		}
	})

	t.Run("it ends when a pod takes the netdev", func(t *testing.T) {
		pod := netns.New(t)
		must.Succeed(t, netlink.LinkSetNsFd(linkOf(t, name), pod.Fd()))

		for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			if _, err := os.Lstat(rxe); os.IsNotExist(err) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s is still there", rxe)
			}
		}

		toHost(t, pod, name)
	})
}
