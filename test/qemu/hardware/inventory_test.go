// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"encoding/hex"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// patience bounds every wait of tests; a test waits that long only if something is wrong.
const patience = 15 * time.Second

// expected returns the guest's Functions. It takes them from the options of QEMU and from files of
// sysfs that the inventory does not read.
func expected(t *testing.T, pfDriver, vfDriver string, linkSpeed int) []function.Function {
	t.Helper()
	var all []function.Function
	for _, pf := range card.PFs(t) {
		f := function.Function{
			ID: function.ID{Address: pf}, Kind: function.PF, Class: function.Network, PF: pf,
			PFName: card.Netdev(pf), PFDriver: pfDriver, Index: -1,
			NumVFs:   card.Number(t, pf, "sriov_numvfs"),
			VFOffset: card.Number(t, pf, "sriov_offset"),
			VFStride: card.Number(t, pf, "sriov_stride"),
			TotalVFs: card.Number(t, pf, "sriov_totalvfs"),
			Vendor:   "8086", Device: "10c9", Driver: pfDriver, NUMANode: -1,
			PCIeRoot:   "pci0000:00",
			IOMMUGroup: card.Link(pf, "iommu_group"), Netdev: card.Netdev(pf), LinkType: "ether",
			LinkUp: true, LinkSpeed: linkSpeed, SwitchID: switchIDOf(t, card.Netdev(pf)),
		}

		if strings.HasPrefix(string(pf), "0000:21:") {
			f.NUMANode, f.PCIeRoot = 1, "pci0000:20"
			f.NUMANodes = []int{1, 0} // QEMU gives both nodes to one socket
		}

		all = append(all, f)
		for i := range f.NumVFs {
			vf := f
			vf.ID.Address, vf.Kind, vf.Index, vf.NumVFs = card.VF(t, pf, i), function.VF, i, 0
			vf.VFOffset, vf.VFStride, vf.TotalVFs = 0, 0, 0
			vf.Device, vf.Driver, vf.Netdev = "10ca", vfDriver, card.Netdev(vf.ID.Address)
			vf.IOMMUGroup = card.Link(vf.ID.Address, "iommu_group")
			all = append(all, vf)
		}
	}

	slices.SortFunc(all, func(a, b function.Function) int {
		return strings.Compare(a.ID.String(), b.ID.String())
	})

	return all
}

// switchIDOf returns what the kernel tells of a netdev's eswitch by rtnetlink, which the inventory
// does not read.
func switchIDOf(t *testing.T, netdev string) string {
	t.Helper()
	reader, err := links.OpenReader(vnetns.None())
	must.Succeed(t, err)
	defer reader.Close()

	link, err := netlink.LinkByName(netdev)
	must.Succeed(t, err)
	message, err := reader.Ask(link.Attrs().Index)
	must.Succeed(t, err)
	attributes, err := links.Attributes(message)
	must.Succeed(t, err)

	return hex.EncodeToString(attributes[unix.IFLA_PHYS_SWITCH_ID])
}

// TestInventory checks that the inventory has what the kernel made of QEMU's command line.
func TestInventory(t *testing.T) {
	drivers := map[string]struct {
		pf, vf    string
		linkSpeed int
		unknown   []string // properties that sriovnet cannot say
	}{
		"igb":    {"igb", "igbvf", 1000, []string{"driver", "representor", "uplink"}},
		"simnic": {"simnic", "simnic", 25000, []string{"driver", "representor"}},
	}

	of, inGuest := drivers[os.Getenv(plan.GuestVariable)]
	if !inGuest {
		t.Skip("needs the cards of a guest: make test-qemu runs it in guests igb and simnic")
	}

	want := expected(t, of.pf, of.vf, of.linkSpeed)
	groups := map[string]pci.Address{}
	for _, f := range want {
		if f.Netdev == "" || f.IOMMUGroup == "" {
			t.Fatalf("%s has netdev %q and IOMMU group %q: the guest lacks what is tested",
				f.ID, f.Netdev, f.IOMMUGroup)
		}
		if other, taken := groups[f.IOMMUGroup]; taken && f.Kind == function.VF {
			t.Errorf("%s shares its IOMMU group %s with %s", f.ID, f.IOMMUGroup, other)
		}
		groups[f.IOMMUGroup] = f.ID.Address
	}

	// igb resets its PF a little after the VFs were made, which takes the carrier away for some
	// seconds.
	diff := ""
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		got := inventoried(t)
		// the NIC to the host is not one of the cards
		got = slices.DeleteFunc(got, func(f function.Function) bool {
			return f.Netdev == plan.HostNetdev
		})
		if diff = cmp.Diff(want, got); diff == "" {
			witnessed(t, "", of.unknown...)
			disputed(t, got)
			return
		}
	}

	t.Errorf("Functions (-want +got):\n%s", diff)
}

// inventoried returns the Functions that a new inventory finds.
func inventoried(t *testing.T) []function.Function {
	t.Helper()
	i := inventory.New(inventory.Options{SysRoot: "/sys", Log: testr.New(t)})
	defer must.Run(t, i.Run)()
	if !i.Synced(t.Context()) {
		t.Fatal("the inventory is not there")
	}
	return i.Snapshot()
}

// follower is a running inventory.
type follower struct {
	*inventory.Inventory
	t       *testing.T
	changed chan struct{}
}

func follow(t *testing.T) *follower {
	t.Helper()
	f := &follower{t: t, changed: make(chan struct{}, 1)}
	f.Inventory = inventory.New(inventory.Options{SysRoot: "/sys", Log: testr.New(t),
		Changed: func() {
			select {
			case f.changed <- struct{}{}:
			default:
			}
		}})

	must.Run(t, f.Run)
	if !f.Synced(t.Context()) {
		t.Fatal("the inventory is not there")
	}

	return f
}

// until waits for a state of a PF or VF.
func (f *follower) until(
	t *testing.T, begin time.Time, a pci.Address, what string, is func(function.Function) bool,
) {
	t.Helper()
	f.await(t, begin, function.ID{Address: a}, what, is)
}

// await waits for a state of a Function, and logs the time since begin, when the kernel had made a
// change.
func (f *follower) await(
	t *testing.T, begin time.Time, id function.ID, what string, is func(function.Function) bool,
) {
	t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()

	for {
		function, ok := f.Get(id)
		if ok && is(function) {
			t.Logf("%s: %s after %s", id, what, time.Since(begin).Round(time.Millisecond))
			return
		}

		select {
		case <-f.changed:
		case <-late.C:
			t.Fatalf("%s never: %s; it is (exists: %v) %+v", id, what, ok, function)
		}
	}
}

// gone waits until the inventory has lost a Function.
func (f *follower) gone(t *testing.T, begin time.Time, id function.ID) {
	t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()

	for {
		if _, ok := f.Get(id); !ok {
			t.Logf("%s: gone after %s", id, time.Since(begin).Round(time.Millisecond))
			return
		}
		select {
		case <-f.changed:
		case <-late.C:
			t.Fatalf("%s is still there", id)
		}
	}
}

func linkOf(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("netdev %s: %v", name, err)
	}
	return link
}

// TestInventoryFollows checks that the inventory shows changes of real devices soon, without a
// request.
func TestInventoryFollows(t *testing.T) {
	card.InGuest(t, "igb")
	pfs := card.PFs(t)
	pf := pfs[len(pfs)-1] // not the first, which other tests use
	vf := card.VF(t, pf, 0)
	f := follow(t)
	vfs := card.Number(t, pf, "sriov_numvfs")
	t.Cleanup(func() {
		must.Succeed(t, netlink.LinkSetUp(linkOf(t, card.Netdev(pf))))
		if card.Number(t, pf, "sriov_numvfs") == 0 {
			card.SetAttribute(t, pf, "sriov_numvfs", strconv.Itoa(vfs))
		}
	})

	t.Run("VF without driver", func(t *testing.T) {
		before, _ := f.Get(function.ID{Address: vf})
		card.Set(t, "/sys/bus/pci/drivers/igbvf/unbind", string(vf))
		begin := time.Now()
		f.until(t, begin, vf, "no driver, no netdev", func(got function.Function) bool {
			return got.Driver == "" && got.Netdev == "" && got.IOMMUGroup == before.IOMMUGroup
		})
	})

	t.Run("VF with vfio-pci", func(t *testing.T) {
		card.SetAttribute(t, vf, "driver_override", "vfio-pci")
		card.Set(t, "/sys/bus/pci/drivers_probe", string(vf))
		begin := time.Now()
		f.until(t, begin, vf, "driver vfio-pci", func(got function.Function) bool {
			return got.Driver == "vfio-pci"
		})
		got, _ := f.Get(function.ID{Address: vf})
		if _, err := os.Stat("/dev/vfio/" + got.IOMMUGroup); err != nil || got.IOMMUGroup == "" {
			t.Errorf("IOMMU group %q: %v", got.IOMMUGroup, err)
		}

		card.Set(t, "/sys/bus/pci/drivers/vfio-pci/unbind", string(vf))
		card.SetAttribute(t, vf, "driver_override", "\n")
		card.Set(t, "/sys/bus/pci/drivers_probe", string(vf))
		begin = time.Now()
		f.until(t, begin, vf, "driver igbvf, a netdev", func(got function.Function) bool {
			return got.Driver == "igbvf" && got.Netdev != ""
		})
	})

	t.Run("PF renamed", func(t *testing.T) {
		name := card.Netdev(pf)
		for _, next := range []string{"uplink0", name} {
			link := linkOf(t, card.Netdev(pf))
			must.Succeed(t, netlink.LinkSetDown(link))
			must.Succeed(t, netlink.LinkSetName(link, next))
			begin := time.Now()
			must.Succeed(t, netlink.LinkSetUp(link))
			f.until(t, begin, vf, "PF is "+next, func(got function.Function) bool {
				return got.PFName == next
			})
		}
	})

	t.Run("PF gets an altname and loses it", func(t *testing.T) {
		link := linkOf(t, card.Netdev(pf))
		begin := time.Now()
		must.Succeed(t, netlink.LinkAddAltName(link, "rail0"))
		f.until(t, begin, vf, "PF is rail0 too", func(got function.Function) bool {
			return slices.Equal(got.PFAltNames, []string{"rail0"})
		})

		begin = time.Now()
		must.Succeed(t, netlink.LinkDelAltName(link, "rail0"))
		f.until(t, begin, vf, "PF has one name", func(got function.Function) bool {
			return got.PFAltNames == nil
		})
	})

	t.Run("VF in a pod", func(t *testing.T) {
		f.until(t, time.Now(), vf, "link up", func(got function.Function) bool {
			return got.LinkUp
		})
		before, _ := f.Get(function.ID{Address: vf})
		pod := netns.New(t)
		must.Succeed(t, netlink.LinkSetNsFd(linkOf(t, before.Netdev), pod.Fd()))
		begin := time.Now()
		f.until(t, begin, vf, "netdev away", func(got function.Function) bool {
			return got.Netdev == ""
		})
		got, _ := f.Get(function.ID{Address: vf})
		want := before
		want.Netdev = ""
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("more than the netdev changed (-want +got):\n%s", diff)
		}

		toHost(t, pod, before.Netdev)
		begin = time.Now()
		f.until(t, begin, vf, "netdev back", func(got function.Function) bool {
			return got.Netdev == before.Netdev
		})
	})

	t.Run("link down and up", func(t *testing.T) {
		link := linkOf(t, card.Netdev(pf))
		must.Succeed(t, netlink.LinkSetDown(link))
		begin := time.Now()
		f.until(t, begin, vf, "link down", func(got function.Function) bool { return !got.LinkUp })
		must.Succeed(t, netlink.LinkSetUp(link))
		begin = time.Now() // because the card itself needs some time
		f.until(t, begin, vf, "link up", func(got function.Function) bool { return got.LinkUp })
	})

	t.Run("VFs end and are made", func(t *testing.T) {
		card.SetAttribute(t, pf, "sriov_numvfs", "0")
		begin := time.Now()
		f.gone(t, begin, function.ID{Address: vf})
		card.SetAttribute(t, pf, "sriov_numvfs", strconv.Itoa(vfs))
		begin = time.Now()
		f.until(t, begin, card.VF(t, pf, vfs-1), "there, with netdev",
			func(got function.Function) bool {
				return got.Index == vfs-1 && got.Netdev != ""
			})

		f.until(t, begin, pf, "all VFs", func(got function.Function) bool {
			return got.NumVFs == vfs
		})
	})

	t.Run("PF removed and found again", func(t *testing.T) {
		card.SetAttribute(t, pf, "remove", "1")
		begin := time.Now()
		f.gone(t, begin, function.ID{Address: vf})
		f.gone(t, begin, function.ID{Address: pf})
		card.Set(t, "/sys/bus/pci/rescan", "1")
		begin = time.Now()
		f.until(t, begin, pf, "there, with netdev and without VFs",
			func(got function.Function) bool {
				return got.Netdev != "" && got.NumVFs == 0
			})
	})
}
