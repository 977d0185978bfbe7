// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"fmt"
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
// the netdev alone, and removes it when the netdev goes to a pod. One that is made in the pod
// receives nothing.
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

	pod := netns.New(t)
	t.Run("it ends when a pod takes the netdev", func(t *testing.T) {
		must.Succeed(t, netlink.LinkSetNsFd(linkOf(t, name), pod.Fd()))

		for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			if _, err := os.Lstat(rxe); os.IsNotExist(err) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s is still there", rxe)
			}
		}
	})

	t.Run("one that is made in the pod receives nothing there", func(t *testing.T) {
		must.Succeed(t, pod.Do(func() error { return netlink.RdmaLinkAdd("rxe0", "rxe", name) }))
		if !receivesRoCE(t) {
			t.Errorf("no socket in the host's network namespace")
		}
		must.Succeed(t, pod.Do(func() error {
			if receivesRoCE(t) {
				t.Errorf("there is a socket in the pod's network namespace")
			}
			return nil
		}))
	})

	toHost(t, pod, name)
}

// receivesRoCE reports whether there is a socket with the UDP port of RoCE v2, which is 4791 (IANA),
// in the thread's network namespace.
func receivesRoCE(t *testing.T) bool {
	t.Helper()
	sockets, err := os.ReadFile("/proc/thread-self/net/udp")
	must.Succeed(t, err)
	return strings.Contains(string(sockets), fmt.Sprintf(":%04X 00000000:0000 ", 4791))
}
