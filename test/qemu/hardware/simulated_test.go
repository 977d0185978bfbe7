// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// TestSimulatedHost checks that a kernel shows everything that the sysfs of the simulated host
// shows, in the same form. The demo and many tests use the simulated host. A kernel shows more; the
// list notSimulated has the part that this project reads.
func TestSimulatedHost(t *testing.T) {
	card.InGuest(t, "igb")
	pf := card.PFs(t)[0]
	vf := card.VF(t, pf, 0)
	real := twin{root: "/sys", pf: pf, vf: vf}
	simulated := simulatedTwin(t, card.Number(t, pf, "sriov_numvfs"),
		card.Number(t, pf, "sriov_totalvfs"))

	t.Run("PF", func(t *testing.T) { real.like(t, simulated, "PF") })
	t.Run("VF", func(t *testing.T) { real.like(t, simulated, "VF") })

	t.Run("VF in a pod: net is there, and empty", func(t *testing.T) {
		own := hostNamespace(t)
		for _, of := range []twin{real, simulated} {
			find, move, back := netlink.LinkByName, netlink.LinkSetNsFd, own
			if of.host != nil {
				find, move, back = of.host.Handle().LinkByName, of.host.Handle().
					LinkSetNsFd, of.host.Fd()
			}

			pod, name := netns.New(t), of.netdev(t, of.vf)
			link, err := find(name)
			must.Succeed(t, err)
			must.Succeed(t, move(link, pod.Fd()))
			of.awaitNet(t)
			inside, err := pod.Handle().LinkByName(name)
			must.Succeed(t, err)
			must.Succeed(t, pod.Handle().LinkSetNsFd(inside, back))
			of.awaitNet(t, name)
		}
	})

	t.Run("no VFs", func(t *testing.T) {
		vfs := card.Attribute(t, pf, "sriov_numvfs")
		for _, of := range []twin{real, simulated} {
			card.Set(t, of.device(of.pf, "sriov_numvfs"), "0")
			of.await(t, "no VFs", func() bool {
				_, err := os.Lstat(of.device(of.vf, ""))
				return os.IsNotExist(err)
			})
		}

		real.like(t, simulated, "PF")
		card.Set(t, real.device(pf, "sriov_numvfs"), vfs)
	})
}

// twin is a PF and its first VF in a sysfs.
type twin struct {
	root   string
	host   *netns.Namespace // namespace of the netdevs; nil for the test's own
	pf, vf pci.Address
}

// simulatedTwin returns a simulated host with a card like QEMU's.
func simulatedTwin(t *testing.T, vfs, totalVFs int) twin {
	t.Helper()
	host, xpu := netns.New(t), netns.New(t)
	h, err := simulate.New(t.Context(), simulate.Config{
		Root: t.TempDir(), HostNS: host.Path(), XPUNS: xpu.Path(),
		Cards: []simulate.Card{{
			PFs: 1, VFs: vfs, TotalVFs: totalVFs, Vendor: "8086", Device: "10c9", VFDevice: "10ca",
			NUMANode: -1,
		}},
	})

	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, h.Close()) })

	functions := h.Functions()
	return twin{root: h.SysRoot(), host: host, pf: functions[0].Address, vf: functions[1].Address}
}

func (w twin) device(a pci.Address, name string) string {
	return filepath.Join(w.root, "bus/pci/devices", string(a), name)
}

func (w twin) netdev(t *testing.T, a pci.Address) string {
	t.Helper()
	entries, err := os.ReadDir(w.device(a, "net"))
	if err != nil || len(entries) != 1 {
		t.Fatalf("%s: netdevs %v, %v, want one", w.device(a, "net"), entries, err)
	}
	return entries[0].Name()
}

// awaitNet waits until the VF has these netdevs. Its directory net exists all the time.
func (w twin) awaitNet(t *testing.T, want ...string) {
	t.Helper()
	w.await(t, "the VF's netdevs are "+strings.Join(want, ", "), func() bool {
		entries, err := os.ReadDir(w.device(w.vf, "net"))
		must.Succeed(t, err)
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return slices.Equal(names, want)
	})
}

func (w twin) await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: never: %s", w.root, what)
		}
	}
}

// notSimulated lists what this project reads or writes of a real device and the simulated host
// lacks, with the reasons.
var notSimulated = map[string]string{
	"iommu_group":     "as on a machine without IOMMU",
	"driver_override": "nothing else could be bound",
	"uevent":          "nobody reads it: uevents come by netlink, and are not simulated",
}

// ofConnectX lists what the simulated cards, which are ConnectX, have and QEMU's cards lack.
var ofConnectX = []string{"net/*/phys_port_name"}

// like compares what both twins show of a PF or VF.
func (w twin) like(t *testing.T, simulated twin, kind string) {
	t.Helper()
	got, want := w.shown(t, kind), simulated.shown(t, kind)
	for _, name := range ofConnectX {
		delete(want, name)
	}

	for name := range notSimulated {
		if _, there := want[name]; there {
			t.Errorf("%s is simulated, but in the list of what is not", name)
		}
	}

	for _, name := range []string{
		"vendor", "driver", "subsystem", "net", "net/*/address", "net/*/device", "class/net",
	} {
		if want[name] == "" {
			t.Errorf("%s is not compared", name)
		}
	}

	for name := range got {
		if _, there := want[name]; !there {
			delete(got, name)
		}
	}

	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("%s (-kernel +simulated host):\n%s", kind, diff)
	}
}

var (
	digits   = regexp.MustCompile(`^-?[0-9]+$`)
	address  = regexp.MustCompile(`[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]`)
	rootPart = regexp.MustCompile(`pci[0-9a-f]{4}:[0-9a-f]{2}`)
	driverOf = regexp.MustCompile(`drivers/[^/]+$`)
	macForm  = regexp.MustCompile(`^([0-9a-f]{2}:){5}[0-9a-f]{2}$`)
)

// shown returns the forms of the files of a device and its netdev, by path: a number, or the name
// in a symbolic link.
func (w twin) shown(t *testing.T, kind string) map[string]string {
	t.Helper()
	a := map[string]pci.Address{"PF": w.pf, "VF": w.vf}[kind]
	forms := w.forms(t, w.device(a, ""))
	name := w.netdev(t, a)
	for entry, form := range w.forms(t, w.device(a, "net/"+name)) {
		forms["net/*/"+entry] = form
	}

	link, err := os.Readlink(filepath.Join(w.root, "class/net", name))
	must.Succeed(t, err)
	forms["class/net"] = w.form(link, name)

	return forms
}

func (w twin) forms(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must.Succeed(t, err)
	forms := map[string]string{}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case e.Type()&os.ModeSymlink != 0:
			to, err := os.Readlink(path)
			must.Succeed(t, err)
			forms[e.Name()] = "-> " + w.form(to, "")
		case e.IsDir():
			forms[e.Name()] = "directory"
		default:
			content, err := os.ReadFile(path)
			if err != nil {
				continue // some files cannot be read, such as remove
			}
			forms[e.Name()] = w.form(strings.TrimSpace(string(content)), "")
		}
	}

	return forms
}

// form returns a text without the parts that differ between machines.
func (w twin) form(s, netdev string) string {
	switch {
	case digits.MatchString(s):
		return "number"
	case macForm.MatchString(s) && s != "ff:ff:ff:ff:ff:ff":
		return "MAC"
	case slices.Contains([]string{"up", "down", "lowerlayerdown", "unknown"}, s):
		return "operstate"
	}

	if netdev != "" {
		s = strings.TrimSuffix(s, netdev) + "<netdev>"
	}

	s = address.ReplaceAllString(rootPart.ReplaceAllString(s, "<root>"), "<address>")
	return driverOf.ReplaceAllString(s, "drivers/<driver>")
}

// toHost moves a netdev from a pod to the network namespace of the machine's netdevs.
func toHost(t *testing.T, pod *netns.Namespace, name string) {
	t.Helper()
	link, err := pod.Handle().LinkByName(name)
	must.Succeed(t, err)
	must.Succeed(t, pod.Handle().LinkSetNsFd(link, hostNamespace(t)))
}

// hostNamespace opens the network namespace of the machine's netdevs.
func hostNamespace(t *testing.T) int {
	t.Helper()
	file, err := os.Open("/proc/1/ns/net")
	must.Succeed(t, err)
	t.Cleanup(func() { _ = file.Close() })
	return int(file.Fd())
}
