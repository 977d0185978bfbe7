// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/rdma"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// TestRDMAExclusive attaches a VF with its RDMA device, where the RDMA system is in mode exclusive,
// and takes both back from pods that do with the device what they can.
func TestRDMAExclusive(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	card.ExclusiveRDMA(t, pf)
	vf := card.VF(t, pf, 1)

	tests := map[string]struct {
		// use is what happens while the pod has the VF. It returns what ends with the pod.
		use func(t *testing.T, r *rdmaPod) (end func())
		// refused is a part of the error of the release before the end.
		refused string
	}{
		"nothing": {},
		"another name and no moderation": {use: func(t *testing.T, r *rdmaPod) func() {
			must.Succeed(t, rdma.System{}.Rename(r.ns, r.device.Index, "mine"))
			must.Succeed(t, rdma.System{}.SetModeration(r.ns, r.device.Index,
				!*r.device.Moderation))
			return nil
		}},
		"moved to a namespace that can be found": {use: func(t *testing.T, r *rdmaPod) func() {
			other, err := netns.Make(filepath.Join(filepath.Dir(r.pod.Path()), "other"))
			must.Succeed(t, err)
			t.Cleanup(func() { must.Succeed(t, other.Close()) })
			must.Succeed(t, rdma.System{}.Move(r.ns, r.device.Index, vnetns.NsHandle(other.Fd())))
			return nil
		}},
		"moved to a namespace that cannot be found": {
			use: func(t *testing.T, r *rdmaPod) func() {
				hidden, err := namespace.New()
				must.Succeed(t, err)
				must.Succeed(t, rdma.System{}.Move(r.ns, r.device.Index, hidden))
				return func() { must.Succeed(t, hidden.Close()) }
			},
			refused: "is in a network namespace that is not found",
		},
		"the namespace ends": {use: func(t *testing.T, r *rdmaPod) func() {
			must.Succeed(t, r.pod.Close())
			return nil
		}},
		"the device is made anew": {use: func(t *testing.T, _ *rdmaPod) func() {
			card.SetAttribute(t, pf, "simnic_rdma", "0")
			card.SetAttribute(t, pf, "simnic_rdma", "1")
			return nil
		}},
		"the device goes": {use: func(t *testing.T, _ *rdmaPod) func() {
			card.SetAttribute(t, pf, "simnic_rdma", "0")
			t.Cleanup(func() { card.SetAttribute(t, pf, "simnic_rdma", "1") })
			return nil
		}},
	}

	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			r := attachRDMA(t, pf, vf)
			var end func()
			if tt.use != nil {
				end = tt.use(t, r)
			}

			if tt.refused != "" {
				err := r.release(t)
				if err == nil || !strings.Contains(err.Error(), tt.refused) {
					t.Fatalf("release: %v, want an error with %q", err, tt.refused)
				}
				if card.Netdev(vf) != r.before.Name {
					t.Errorf("netdev is %q; it must come back without the RDMA device", card.Netdev(vf))
				}
				end()
			}

			r.mustComeBack(t)
		})
	}
}

// TestRDMAShared checks that programs of a pod can open the RDMA device of a VF in mode shared, in
// which it stays on the host.
func TestRDMAShared(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	card.RDMA(t, pf)
	vf := card.VF(t, pf, 1)

	seen, _ := follow(t).Get(function.ID{Address: vf})
	if seen.RDMAMode != function.RDMAShared || len(seen.RDMADevices) != 1 {
		t.Fatalf("the inventory has RDMA devices %q, mode %q", seen.RDMADevices, seen.RDMAMode)
	}
	nodes, err := sysfs.Root("/sys").PCI(vf).RDMANodes()
	if err != nil || len(nodes) != 1 {
		t.Fatalf("character devices of the VF: %q, %v", nodes, err)
	}
	must.Succeed(t, netns.New(t).Do(func() error { return open(nodes[0]) }))
}

// open opens a character device of an RDMA device.
func open(node string) error {
	file, err := os.OpenFile(filepath.Join("/dev/infiniband", node), os.O_RDWR, 0)
	if err == nil {
		err = file.Close()
	}
	return err
}

// TestRDMAIsChecked checks that CHECK misses an RDMA device that left the pod.
func TestRDMAIsChecked(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	card.ExclusiveRDMA(t, pf)
	r := attachRDMA(t, pf, card.VF(t, pf, 1))
	check := func() []string {
		t.Helper()
		found, err := r.engine.Check(t.Context(), r.host, netdev.Attached{
			Before: r.before, Place: r.place, Want: r.want, Observed: r.observed,
		})
		must.Succeed(t, err)
		return found
	}

	if found := check(); len(found) > 0 {
		t.Errorf("differences: %q", found)
	}
	must.Succeed(t, rdma.System{}.Move(r.ns, r.device.Index, hostNS(t)))
	want := []string{"RDMA device " + r.device.Name + " is not in the pod"}
	if found := check(); !slices.Equal(found, want) {
		t.Errorf("differences: %q, want %q", found, want)
	}
	r.mustComeBack(t)
}

// TestRDMANodes checks that a pod does not start whose containers were given device nodes that the
// RDMA device does not have any more after its move.
func TestRDMANodes(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	card.ExclusiveRDMA(t, pf)
	vf := card.VF(t, pf, 1)
	r := planRDMA(t, pf, vf)
	given, err := sysfs.Root("/sys").PCI(vf).RDMANodes()
	must.Succeed(t, err)
	r.host.RDMA.Nodes = given

	// The kernel gives the lowest free number, which is that of a device that has gone.
	other := string(card.VF(t, pf, 0))
	card.Set(t, "/sys/bus/pci/drivers/simnic/unbind", other)
	_, err = r.engine.Attach(t.Context(), r.host, r.before, r.place, r.want)
	if err == nil || !strings.Contains(err.Error(), "have other device nodes") {
		t.Errorf("attach: %v", err)
	}
	card.Set(t, "/sys/bus/pci/drivers/simnic/bind", other)
	r.mustComeBack(t)
}

// rdmaPod is a pod that has a VF with its RDMA device.
type rdmaPod struct {
	pf, vf   pci.Address
	engine   *netdev.Engine
	host     netdev.Device
	device   rdma.Device // as it was on the host
	before   netdev.Snapshot
	place    netdev.Place
	want     function.Interface
	observed netdev.Observed
	pod      *netns.Namespace
	ns       vnetns.NsHandle // of the pod
}

// attachRDMA attaches a VF with its RDMA device, and checks what the pod has of it.
func attachRDMA(t *testing.T, pf, vf pci.Address) *rdmaPod {
	t.Helper()
	r := planRDMA(t, pf, vf)
	var err error
	r.observed, err = r.engine.Attach(t.Context(), r.host, r.before, r.place, r.want)
	must.Succeed(t, err)
	r.mustBeInPod(t)
	return r
}

// planRDMA plans to attach a VF with its RDMA device to a new pod.
func planRDMA(t *testing.T, pf, vf pci.Address) *rdmaPod {
	t.Helper()
	engine, err := netdev.New(netdev.Options{Trace: func(step string) { t.Log(step) }})
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, engine.Close()) })

	seen, _ := follow(t).Get(function.ID{Address: vf})
	if seen.RDMAMode != function.RDMAExclusive || len(seen.RDMADevices) != 1 {
		t.Fatalf("the inventory has RDMA devices %q, mode %q", seen.RDMADevices, seen.RDMAMode)
	}

	r := &rdmaPod{
		pf: pf, vf: vf, engine: engine, host: deviceOf(t, pf, 1), device: onHost(t, seen.RDMADevices[0]),
		pod: netns.New(t),
		want: function.Interface{Name: "net1", Addresses: []netip.Prefix{
			netip.MustParsePrefix("192.0.2.1/24"),
		}},
	}
	r.ns = vnetns.NsHandle(r.pod.Fd())
	r.host.RDMA = &netdev.RDMANames{
		Dir: filepath.Join("bus/pci/devices", string(vf)), Names: seen.RDMADevices,
	}

	r.before, r.place, err = engine.Plan(t.Context(), r.host, r.pod.Path(), r.want)
	must.Succeed(t, err)
	return r
}

// mustBeInPod checks that programs can open the RDMA device in the pod and nowhere else, and that it
// has a GID of the interface's address.
func (r *rdmaPod) mustBeInPod(t *testing.T) {
	t.Helper()
	there, err := rdma.System{}.List(r.ns)
	must.Succeed(t, err)
	if len(there) != 1 || !there[0].Same(r.device) || there[0].Name != r.device.Name {
		t.Fatalf("the pod has RDMA devices %+v, want %+v", there, r.device)
	}

	nodes, err := sysfs.Root("/sys").PCI(r.vf).RDMANodes()
	if err != nil || len(nodes) != 1 {
		t.Fatalf("character devices of the VF: %q, %v", nodes, err)
	}
	if err := open(nodes[0]); !errors.Is(err, unix.EPERM) {
		t.Errorf("opened on the host: %v, want %v", err, unix.EPERM)
	}
	must.Succeed(t, r.pod.Do(func() error { return open(nodes[0]) }))

	const gid = "0000:0000:0000:0000:0000:ffff:c000:0201" // 192.0.2.1
	gids := filepath.Join(r.pod.Sysfs(t), "class/infiniband", r.device.Name, "ports/1/gids")
	for end := time.Now().Add(patience); !hasGID(gids, gid); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s has no GID %s", gids, gid)
		}
	}
}

// hasGID reports whether one of the files in a folder of sysfs has a GID.
func hasGID(folder, gid string) bool {
	files, _ := filepath.Glob(filepath.Join(folder, "*"))
	return slices.ContainsFunc(files, func(file string) bool {
		text, err := os.ReadFile(file)
		return err == nil && strings.TrimSpace(string(text)) == gid
	})
}

func (r *rdmaPod) release(t *testing.T) error {
	t.Helper()
	restored, err := r.engine.Restore(t.Context(), netdev.Device{PF: r.host.PF}, r.before, r.place)
	if err == nil && len(restored.Notes) > 0 {
		t.Errorf("notes: %q", restored.Notes)
	}
	return err
}

// mustComeBack releases the VF, and checks that everything is as before, unless the driver has made
// another RDMA device.
func (r *rdmaPod) mustComeBack(t *testing.T) {
	t.Helper()
	must.Succeed(t, r.release(t))
	now, err := r.engine.Snapshot(t.Context(), r.host)
	must.Succeed(t, err)
	if left := netdev.Diff(r.before, now); len(left) > 0 {
		t.Errorf("after the release: %q", left)
	}

	if card.Attribute(t, r.pf, "simnic_rdma") == "0" {
		return
	}
	d := onHost(t, r.device.Name)
	if *d.Moderation != *r.device.Moderation {
		t.Errorf("RDMA device %+v, want %+v", d, r.device)
	}
}

// onHost returns an RDMA device of the host.
func onHost(t *testing.T, name string) rdma.Device {
	t.Helper()
	all, err := rdma.System{}.List(hostNS(t))
	must.Succeed(t, err)
	i := slices.IndexFunc(all, func(d rdma.Device) bool { return d.Name == name })
	if i < 0 {
		t.Fatalf("the host has no RDMA device %s, but %+v", name, all)
	}
	return all[i]
}

// hostNS returns the guest's network namespace.
func hostNS(t *testing.T) vnetns.NsHandle {
	t.Helper()
	ns, err := vnetns.GetFromPath("/proc/self/ns/net")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, ns.Close()) })
	return ns
}
