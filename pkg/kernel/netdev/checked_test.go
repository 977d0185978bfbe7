// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// breaks has a change for each property that CHECK compares in a pod, and what CHECK says of it.
var breaks = map[string]struct {
	change func(t *testing.T, h *netlink.Handle, l netlink.Link)
	says   string
}{
	"name": {func(t *testing.T, h *netlink.Handle, l netlink.Link) {
		must.Succeed(t, h.LinkSetName(l, "mine0"))
	}, `name is "mine0", was "net1"`},
	"mac": {func(t *testing.T, h *netlink.Handle, l netlink.Link) {
		must.Succeed(t, h.LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 0x66}))
	}, "mac is 02:00:00:00:00:66, was 02:00:00:00:00:01"},
	"up": {func(t *testing.T, h *netlink.Handle, l netlink.Link) {
		must.Succeed(t, h.LinkSetDown(l))
	}, "up is false, was true"},
	"addresses": {func(t *testing.T, h *netlink.Handle, l netlink.Link) {
		must.Succeed(t, h.AddrDel(l, &netlink.Addr{IPNet: &net.IPNet{
			IP: net.IPv4(10, 1, 0, 5), Mask: net.CIDRMask(24, 32),
		}}))
	}, "address 10.1.0.5/24 is missing"},
	"routes": {func(t *testing.T, h *netlink.Handle, l netlink.Link) {
		must.Succeed(t, h.RouteDel(&netlink.Route{
			LinkIndex: l.Attrs().Index, Dst: prefixOf("10.3.0.0/16"), Scope: netlink.SCOPE_LINK,
		}))
	}, "route to 10.3.0.0/16 is missing"},
	"neighbors": {func(t *testing.T, h *netlink.Handle, l netlink.Link) {
		must.Succeed(t, h.NeighDel(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, IP: net.IPv4(10, 1, 0, 1),
		}))
	}, "neighbor 10.1.0.1 is missing"},
	"rules": {func(t *testing.T, h *netlink.Handle, _ netlink.Link) {
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Table = unix.AF_INET, 100, 100
		must.Succeed(t, h.RuleDel(rule))
	}, "IPv4 rule 100 from 10.1.0.0/24 table 100 is missing"},
}

// changesOfVF has a change for each property of a VF that CHECK compares.
var changesOfVF = map[string]func(*netdev.VFState){
	"vf mac":         func(v *netdev.VFState) { v.MAC = adminsMAC },
	"vf vlan":        func(v *netdev.VFState) { v.VLAN = 7 },
	"vf min_tx_rate": func(v *netdev.VFState) { v.MinTxRate = 7 },
	"vf max_tx_rate": func(v *netdev.VFState) { v.MaxTxRate = 7 },
	"vf spoofchk":    func(v *netdev.VFState) { v.SpoofCheck = new(true) },
	"vf trust":       func(v *netdev.VFState) { v.Trust = new(false) },
	"vf link-state":  func(v *netdev.VFState) { v.LinkState = "disable" },
}

// checkedElsewhere has the tests of CHECK that need more than a veth, by properties.
var checkedElsewhere = map[string][]string{
	"TestVLANs": {"VLAN interfaces"}, "TestVRF": {"VRF"}, "TestBond": {"bond"},
	"TestRate":  {"eswitch min_tx_rate", "eswitch max_tx_rate"},
	"TestGUIDs": {"vf node_guid", "vf port_guid"},
}

// TestCheckOfEveryProperty checks that CHECK finds a change of each property that it compares, and
// that the table has a reason for each that a pod can ask for and CHECK does not compare.
func TestCheckOfEveryProperty(t *testing.T) {
	others := slices.Collect(maps.Keys(changesOfVF))
	tests := testsOf(t)
	for test, of := range checkedElsewhere {
		if !tests[test] {
			t.Errorf("there is no %s, which is to break %q", test, of)
		}
		others = append(others, of...)
	}

	for _, p := range netdev.Properties() {
		broken, known := breaks[p.Name]
		switch {
		case !p.IsChecked() && len(p.Fields) > 0 && !strings.HasPrefix(p.Check, "not compared: "):
			t.Errorf("CHECK does not compare %q, and the table says %q", p.Name, p.Check)
		case p.IsChecked() && strings.HasPrefix(p.Check, "not compared: "):
			t.Errorf("CHECK compares %q, and the table says %q", p.Name, p.Check)
		case p.IsChecked() && !known && !slices.Contains(others, p.Name):
			t.Errorf("no test breaks %q", p.Name)
		case known:
			t.Run(p.Name, func(t *testing.T) { testCheckOf(t, broken.change, broken.says) })
		}
	}
}

// testsOf returns the names of the functions in the tests of this package.
func testsOf(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("*_test.go")
	must.Succeed(t, err)

	names := map[string]bool{}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		must.Succeed(t, err)
		for _, d := range file.Decls {
			if f, isFunction := d.(*ast.FuncDecl); isFunction && f.Recv == nil {
				names[f.Name.Name] = true
			}
		}
	}

	return names
}

func testCheckOf(
	t *testing.T, change func(*testing.T, *netlink.Handle, netlink.Link), says string,
) {
	w := newWorld(t, nil)
	want := fullInterface
	want.Routes = slices.DeleteFunc(slices.Clone(want.Routes), func(r function.Route) bool {
		return r.Table != 0 // its source is the address that one of the changes removes
	})
	before, place, observed := w.attach(t, want)
	attached := netdev.Attached{
		Before: before, Place: place, Want: want, Observed: observed,
		Expected: netdev.Expected{MAC: observed.MAC, Addresses: observed.Addresses},
	}
	if got := w.check(t, attached); len(got) > 0 {
		t.Fatalf("just attached: %q", got)
	}

	change(t, w.pod.Handle(), get(t, w.pod, "net1"))
	if got := w.check(t, attached); !slices.Contains(got, says) {
		t.Errorf("check: %q, want %q in it", got, says)
	}
}

// TestCheckOfVF checks that CHECK finds a change of each property that the PF enforces.
func TestCheckOfVF(t *testing.T) {
	w, c := newCard(t)
	a, err := attachCard(t, w, everything())
	must.Succeed(t, err)
	attached := c.VF

	for name, change := range changesOfVF {
		c.VF = attached
		change(&c.VF)
		got, err := a.check(t, w, netdev.Expected{MAC: podsMAC})
		must.Succeed(t, err)
		if len(got) != 1 || !strings.HasPrefix(got[0], name+" is ") {
			t.Errorf("%s: check: %q", name, got)
		}
	}
}
