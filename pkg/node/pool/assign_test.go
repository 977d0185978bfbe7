// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

func devicePool(name string, selectors ...v1alpha1.FunctionSelector) v1alpha1.DevicePool {
	return v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       v1alpha1.DevicePoolSpec{Selectors: selectors},
	}
}

// oneCard returns a PF, "0000:3b:00.0", with eight VFs, whose addresses end in .2 to .7, 01.0 and
// 01.1, and one SF.
func oneCard() []function.Function {
	const pf = pci.Address("0000:3b:00.0")
	functions := []function.Function{
		{ID: function.ID{Address: pf}, Kind: function.PF, PF: pf, PFName: "ens3f0", Index: -1,
			Vendor: "15b3", Device: "a2dc", Driver: "mlx5_core"},
		{ID: function.SubfunctionID(pf, 88), Kind: function.SF, PF: pf, PFName: "ens3f0", Index: 88,
			Vendor: "15b3", Device: "a2dc", Driver: "mlx5_core.sf"},
	}

	for index := range 8 {
		routingID := index + 2
		functions = append(functions, function.Function{
			ID: function.ID{
				Address: pci.Address(fmt.Sprintf("0000:3b:%02x.%d", routingID/8, routingID%8)),
			},
			Kind: function.VF, PF: pf, PFName: "ens3f0", Index: index, Vendor: "15b3",
			Device: "101e", Driver: "mlx5_core",
		})
	}

	return functions
}

// names returns the names of a pool's Functions: VFs by index, others by ID.
func names(functions []function.Function) string {
	var out []string
	for _, f := range functions {
		if f.Kind == function.VF {
			out = append(out, fmt.Sprint(f.Index))
		} else {
			out = append(out, f.ID.String())
		}
	}

	return strings.Join(out, " ")
}

func TestSelectors(t *testing.T) {
	const all = "0 1 2 3 4 5 6 7"
	const sf = "0000:3b:00.0/sf88"
	for _, test := range []struct {
		name      string
		selectors []v1alpha1.FunctionSelector
		want      string
	}{
		{"vendor, but never a PF", []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}, sf +
			" " + all},
		{"vendor in capitals", []v1alpha1.FunctionSelector{{Vendors: []string{"8086", "15B3"}}},
			sf + " " + all},
		{"other vendor", []v1alpha1.FunctionSelector{{Vendors: []string{"8086"}}}, ""},
		{"device", []v1alpha1.FunctionSelector{{Devices: []string{"101E"}}}, all},
		{"driver", []v1alpha1.FunctionSelector{{Drivers: []string{"mlx5_core.sf", "vfio-pci"}}},
			sf},
		{
			"address", []v1alpha1.FunctionSelector{
				{PCIAddresses: []string{"0000:3B:00.3", "0000:3b:01.1"}},
			}, "1 7",
		},
		{"a PF's address has its SFs",
			[]v1alpha1.FunctionSelector{{PCIAddresses: []string{"0000:3b:00.0"}}}, sf},
		{"pfName", []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f0"}}}, sf + " " + all},
		{"pfName with indexes", []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f0#0-3,7"}}},
			"0 1 2 3 7"},
		{"pfName with one index",
			[]v1alpha1.FunctionSelector{{PFNames: []string{"ens3f1#0-7", "ens3f0#5"}}}, "5"},
		{"other pfName", []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f"}}}, ""},
		{"rootDevice", []v1alpha1.FunctionSelector{{RootDevices: []string{"0000:3b:00.0"}}}, sf +
			" " + all},
		{"rootDevice in capitals with indexes",
			[]v1alpha1.FunctionSelector{{RootDevices: []string{"0000:3B:00.0#6-9"}}}, "6 7"},
		{"all fields must match",
			[]v1alpha1.FunctionSelector{
				{Devices: []string{"101e"}, PFNames: []string{"ens3f0#2-88"},
					Drivers: []string{"mlx5_core"}},
			}, "2 3 4 5 6 7"},
		{"one selector is enough", []v1alpha1.FunctionSelector{
			{PFNames: []string{"ens3f0#0"}}, {Drivers: []string{"mlx5_core.sf"}},
		}, sf + " 0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			pools := Assign(oneCard(), []v1alpha1.DevicePool{devicePool("fast", test.selectors...)},
				nil, nil)
			if len(pools) != 1 || pools[0].Err != nil {
				t.Fatalf("Assign = %+v, want one pool", pools)
			}
			if got := names(pools[0].Functions); got != test.want {
				t.Errorf("Functions are %q, want %q", got, test.want)
			}
		})
	}
}

// TestVariantsOfVFIO checks that a selector that names vfio-pci has Functions with its variants too,
// and a selector that names a variant has only those.
func TestVariantsOfVFIO(t *testing.T) {
	functions := oneCard()
	for i := range functions {
		switch functions[i].Index {
		case 5:
			functions[i].Driver = "vfio-pci"
		case 6:
			functions[i].Driver = "mlx5_vfio_pci"
		case 7:
			functions[i].Driver, functions[i].Passthrough = "vendors_own", function.VFIO
		}
	}

	for driver, want := range map[string]string{
		"vfio-pci": "5 6 7", "mlx5_vfio_pci": "6", "vendors_own": "7",
	} {
		pools := Assign(functions, []v1alpha1.DevicePool{
			devicePool("fast", v1alpha1.FunctionSelector{Drivers: []string{driver}}),
		}, nil, nil)
		if got := names(pools[0].Functions); got != want {
			t.Errorf("driver %s has Functions %q, want %q", driver, got, want)
		}
	}
}

// TestAltNames checks that pfNames takes altnames, and that a pool is refused if one of its names
// fits two PFs.
func TestAltNames(t *testing.T) {
	functions := oneCard()
	for i := range functions {
		functions[i].PFAltNames = []string{"rail0", "enp59s0f0np0"}
	}

	other := function.Function{
		ID: function.ID{Address: "0000:5e:00.0"}, Kind: function.PF, PF: "0000:5e:00.0",
		PFName: "ens4f0", PFAltNames: []string{"Rail0"}, Index: -1,
	}

	select0 := v1alpha1.FunctionSelector{PFNames: []string{"rail0#0-1"}}
	for name, test := range map[string]struct {
		functions []function.Function
		selectors []v1alpha1.FunctionSelector
		want, err string
	}{
		"an altname":         {functions, []v1alpha1.FunctionSelector{select0}, "0 1", ""},
		"in capital letters": {functions, []v1alpha1.FunctionSelector{{PFNames: []string{"RAIL0#2"}}}, "2", ""},
		"that two PFs have": {
			append(slices.Clone(functions), other),
			[]v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}, select0}, "",
			`spec.selectors[1].pfNames[0]: "rail0": is a name of the netdevs of PFs 0000:3b:00.0 and ` +
				`0000:5e:00.0: name the PF by rootDevices`,
		},
		"that two PFs have, and another name": {
			append(slices.Clone(functions), other),
			[]v1alpha1.FunctionSelector{{PFNames: []string{"enp59s0f0np0#7"}}}, "7", "",
		},
	} {
		p := Assign(test.functions, []v1alpha1.DevicePool{devicePool("fast", test.selectors...)},
			nil, nil)[0]
		if got := names(p.Functions); got != test.want {
			t.Errorf("%s: Functions %q, want %q", name, got, test.want)
		}
		if test.err == "" != (p.Err == nil) || p.Err != nil && !strings.Contains(p.Err.Error(), test.err) {
			t.Errorf("%s: error %v, want %q", name, p.Err, test.err)
		}
	}
}

// TestAttributes has selectors by attributes that only some Functions have, and device types.
func TestAttributes(t *testing.T) {
	functions := oneCard()
	change := func(id string, change func(*function.Function)) {
		t.Helper()
		i := slices.IndexFunc(functions, func(f function.Function) bool {
			return f.ID.String() == id
		})
		change(&functions[i])
	}

	for i := range functions {
		functions[i].Class, functions[i].PFDriver, functions[i].LinkType = function.Network, "mlx5_core", "ether"
	}

	change("0000:3b:00.0", func(f *function.Function) { f.NumVFs = 8 })
	change("0000:3b:00.2", func(f *function.Function) { f.ACPIIndex, f.RDMA = "101", true })
	change("0000:3b:00.3", func(f *function.Function) {
		f.LinkType, f.PKey = "infiniband", "0x8050"
	})
	change("0000:3b:00.4", func(f *function.Function) {
		f.VDPA = function.VDPA{Name: "a", Driver: "vhost_vdpa"}
	})
	change("0000:3b:00.5", func(f *function.Function) {
		f.VDPA = function.VDPA{Name: "b", Driver: "virtio_vdpa"}
	})
	change("0000:3b:00.6", func(f *function.Function) {
		f.DDPProfile, f.VDPA.Name = "ICE COMMS Package", "c"
	})
	change("0000:3b:00.7", func(f *function.Function) { f.Driver = "" })
	change("0000:3b:01.1", func(f *function.Function) { f.DefaultRoute = true })

	nic := function.Function{
		ID: function.ID{Address: "0000:19:00.0"}, Kind: function.PF, Class: function.Network,
		PF: "0000:19:00.0", PFName: "eno1", Index: -1, Driver: "igb", PFDriver: "igb",
	}

	uplink := nic
	uplink.ID.Address, uplink.PF, uplink.DefaultRoute = "0000:19:00.1", "0000:19:00.1", true

	fpga := function.Function{
		ID: function.ID{Address: "0000:65:00.0"}, Kind: function.VF, Class: function.Accelerator,
		PF: "0000:65:00.1", Driver: "vfio-pci", Vendor: "8086",
	}

	functions = append(functions, nic, uplink, fpga)
	const sf = "0000:3b:00.0/sf88"
	for _, test := range []struct {
		name       string
		deviceType v1alpha1.DeviceType
		selector   v1alpha1.FunctionSelector
		want       string
	}{
		{"no device type: VFs and SFs, without the node's own", "", v1alpha1.FunctionSelector{},
			sf + " 0 1 2 3 4 5 6"},
		{"netDevice: also NICs; with a driver", v1alpha1.DeviceTypeNet, v1alpha1.FunctionSelector{},
			"0 1 2 3 4 6 0000:19:00.0"},
		{"auxNetDevice", v1alpha1.DeviceTypeAuxNet, v1alpha1.FunctionSelector{}, sf},
		{"accelerator", v1alpha1.DeviceTypeAccelerator, v1alpha1.FunctionSelector{}, "0"},
		{"a type that is not known", "gpu", v1alpha1.FunctionSelector{}, ""},
		{"acpiIndex", "", v1alpha1.FunctionSelector{ACPIIndexes: []string{"100", "101"}}, "0"},
		{"linkType", "", v1alpha1.FunctionSelector{LinkTypes: []string{"infiniband"}}, "1"},
		{"pKey", "", v1alpha1.FunctionSelector{PKeys: []string{"0x50", "0X8050"}}, "1"},
		{"another pKey", "", v1alpha1.FunctionSelector{PKeys: []string{"0x0"}}, ""},
		{"ddpProfile", "", v1alpha1.FunctionSelector{DDPProfiles: []string{"ICE COMMS Package"}},
			"4"},
		{"no ddpProfile", "", v1alpha1.FunctionSelector{DDPProfiles: []string{""}}, ""},
		{"auxType", "", v1alpha1.FunctionSelector{AuxTypes: []string{"sf"}}, sf},
		{"isRdma", "", v1alpha1.FunctionSelector{IsRdma: true}, "0"},
		{"vhost", "", v1alpha1.FunctionSelector{VDPAType: "vhost"}, "2"},
		{"virtio", "", v1alpha1.FunctionSelector{VDPAType: "virtio"}, "3"},
		{"pfName in another case", "", v1alpha1.FunctionSelector{PFNames: []string{"ENS3F0#2"}},
			"2"},
		{"a PF is not its own child", v1alpha1.DeviceTypeNet,
			v1alpha1.FunctionSelector{PFNames: []string{"eno1"}}, ""},
		{"nor by address", v1alpha1.DeviceTypeNet,
			v1alpha1.FunctionSelector{RootDevices: []string{"0000:19:00.0"}}, ""},
		{"but has an address", v1alpha1.DeviceTypeNet,
			v1alpha1.FunctionSelector{PCIAddresses: []string{"0000:19:00.0"}}, "0000:19:00.0"},
		{"an SF's driver", "", v1alpha1.FunctionSelector{
			Drivers: []string{"mlx5_core"}, AuxTypes: []string{"sf"},
		}, ""},
		{"an auxNetDevice's driver is the PF's too", v1alpha1.DeviceTypeAuxNet,
			v1alpha1.FunctionSelector{Drivers: []string{"mlx5_core"}}, sf},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := devicePool("fast", test.selector)
			p.Spec.DeviceType = test.deviceType
			pools := Assign(functions, []v1alpha1.DevicePool{p}, nil, nil)
			if len(pools) != 1 || pools[0].Err != nil {
				t.Fatalf("Assign = %+v, want one pool", pools)
			}
			if got := names(pools[0].Functions); got != test.want {
				t.Errorf("Functions are %q, want %q", got, test.want)
			}
		})
	}
}

// TestPriority: the pool with the highest priority has the Function, and with equal priorities the
// first one by name.
func TestPriority(t *testing.T) {
	selector := v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#0"}}
	prio := func(name string, priority int32) v1alpha1.DevicePool {
		p := devicePool(name, selector)
		p.Spec.Priority = priority
		return p
	}

	for _, test := range []struct {
		pools []v1alpha1.DevicePool
		want  string
	}{
		{[]v1alpha1.DevicePool{prio("a", 0), prio("b", 1), prio("c", -1)}, "b"},
		{[]v1alpha1.DevicePool{prio("c", 7), prio("b", 7)}, "b"},
		{[]v1alpha1.DevicePool{prio("b", -1), prio("c", 0)}, "c"},
	} {
		for _, p := range Assign(oneCard(), test.pools, nil, nil) {
			if has := len(p.Functions) == 1; has != (p.Name == test.want) {
				t.Errorf("%s has %q, want all in %s", p.Name, names(p.Functions), test.want)
			}
			if p.Name != test.want &&
				(len(p.Overlaps) != 1 || !strings.HasSuffix(p.Overlaps[0], " in "+test.want)) {
				t.Errorf("%s has overlaps %v, want one with %s", p.Name, p.Overlaps, test.want)
			}
		}
	}
}

func TestBadSelectors(t *testing.T) {
	good := v1alpha1.FunctionSelector{PFNames: []string{"ens3f0"}}
	for _, test := range []struct {
		selector v1alpha1.FunctionSelector
		want     []string
	}{
		{v1alpha1.FunctionSelector{PFNames: []string{"ens3f0", "#1"}},
			[]string{"pfNames[1]", `"#1"`, "name"}},
		{v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#"}}, []string{"pfNames[0]", "0-3"}},
		{v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#3-1"}},
			[]string{"pfNames[0]", "from the smaller to the larger"}},
		{v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#-1"}},
			[]string{"pfNames[0]", `"-1"`, "0-3"}},
		{v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#1,,2"}},
			[]string{"pfNames[0]", `""`, "0-3"}},
		{v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#1-99999999999999999999"}},
			[]string{"pfNames[0]", "0-3"}},
		{v1alpha1.FunctionSelector{RootDevices: []string{"ens3f0"}},
			[]string{"rootDevices[0]", "dddd:bb:dd.f"}},
		{v1alpha1.FunctionSelector{RootDevices: []string{"0000:3b:00.0#x"}},
			[]string{"rootDevices[0]", `"x"`, "0-3"}},
		{v1alpha1.FunctionSelector{PKeys: []string{"0x7fff", "7fff"}},
			[]string{"pKeys[1]", `"7fff"`, "0x7fff"}},
		{v1alpha1.FunctionSelector{PKeys: []string{"0x17fff"}}, []string{"pKeys[0]", "16 bits"}},
		{v1alpha1.FunctionSelector{AuxTypes: []string{"eth"}},
			[]string{"auxTypes[0]", `"eth"`, "sf"}},
		{v1alpha1.FunctionSelector{VDPAType: "user"},
			[]string{"vdpaType", `"user"`, "virtio or vhost"}},
		{v1alpha1.FunctionSelector{VDPAType: "vhost", IsRdma: true},
			[]string{"vdpaType", "isRdma"}},
		{v1alpha1.FunctionSelector{PCIAddresses: []string{"3b:00.2"}},
			[]string{"pciAddresses[0]", "dddd:bb:dd.f"}},
	} {
		pools := Assign(oneCard(), []v1alpha1.DevicePool{
			devicePool("bad", good, test.selector), devicePool("good", good),
		}, nil, nil)
		if len(pools) != 2 || pools[0].Err == nil || len(pools[0].Functions) != 0 {
			t.Errorf("Assign with %+v = %+v, want an empty pool with an error",
				test.selector, pools)
			continue
		}

		for _, text := range append(test.want, "DevicePool bad", "spec.selectors[1]") {
			if !strings.Contains(pools[0].Err.Error(), text) {
				t.Errorf("error %q: want %q in it", pools[0].Err, text)
			}
		}

		if len(pools[1].Functions) != 9 {
			t.Errorf("the pool without mistakes has %d Functions, want 9", len(pools[1].Functions))
		}
	}
}

func TestOverlap(t *testing.T) {
	some := devicePool("b-some", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#0-2"}})
	more := devicePool("c-more", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#2-4"}})
	elsewhere := devicePool("a-elsewhere", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0"}})
	elsewhere.Spec.NodeSelector = map[string]string{"rack": "7"}

	// The order of the list does not matter.
	for _, order := range [][]v1alpha1.DevicePool{
		{some, more, elsewhere}, {more, elsewhere, some},
	} {
		pools := Assign(oneCard(), order, map[string]string{"rack": "8"}, nil)
		if len(pools) != 2 || pools[0].Name != "b-some" || pools[1].Name != "c-more" {
			t.Fatalf("Assign = %+v, want b-some and c-more", pools)
		}
		if got := names(pools[0].Functions); got != "0 1 2" || len(pools[0].Overlaps) != 0 {
			t.Errorf("b-some has %q and overlaps %v, want 0 1 2 and none", got, pools[0].Overlaps)
		}
		if got := names(pools[1].Functions); got != "3 4" {
			t.Errorf("c-more has %q, want 3 4", got)
		}

		want := []string{"0000:3b:00.4 in b-some"}
		if diff := cmp.Diff(want, pools[1].Overlaps); diff != "" {
			t.Errorf("overlaps of c-more: -want +got\n%s", diff)
		}
	}

	pools := Assign(oneCard(), []v1alpha1.DevicePool{some, elsewhere},
		map[string]string{"rack": "7", "zone": "a"}, nil)
	if len(pools) != 2 || len(pools[0].Functions) != 9 || len(pools[1].Overlaps) != 3 {
		t.Errorf("Assign on rack 7 = %+v, want all in a-elsewhere and three overlaps in b-some",
			pools)
	}
}

// FuzzParseIndexed: an accepted text has definite indexes, none of which is negative.
func FuzzParseIndexed(f *testing.F) {
	for _, seed := range []string{"", "#", "ens3f0", "ens3f0#", "ens3f0#0-3,7", "ens3f0#3-0",
		"a#b#c", "0000:3b:00.0#0", "x#+1", "x#1--2", "x#99999999999999999999"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		parsed, err := parseIndexed(text)
		if err != nil {
			return
		}

		name, list, limited := strings.Cut(text, "#")
		if parsed.name != name || name == "" || limited != (len(parsed.ranges) > 0) ||
			limited && len(parsed.ranges) != strings.Count(list, ",")+1 {
			t.Fatalf("parseIndexed(%q) = %+v", text, parsed)
		}

		for _, r := range parsed.ranges {
			if r.first < 0 || r.last < r.first {
				t.Errorf("parseIndexed(%q): range %+v", text, r)
			}
			if !parsed.names(name) || !parsed.has(r.first) || !parsed.has(r.last) {
				t.Errorf("parseIndexed(%q) does not match the ends of its own range %+v", text, r)
			}
		}

		if limited && parsed.has(-1) {
			t.Errorf("parseIndexed(%q) matches index -1, which is a PF's", text)
		}
	})
}

// TestOlderPoolComesFirst: a newer DevicePool takes neither Functions nor the resource's name from
// an older one.
func TestOlderPoolComesFirst(t *testing.T) {
	older, newer := devicePool("b",
		v1alpha1.FunctionSelector{Devices: []string{"101e"}}), devicePool("a",
		v1alpha1.FunctionSelector{Devices: []string{"101e"}})
	older.CreationTimestamp, newer.CreationTimestamp = metav1.Unix(1, 0), metav1.Unix(2, 0)
	for _, p := range []*v1alpha1.DevicePool{&older, &newer} {
		p.Spec.Publish = v1alpha1.PublishDevicePlugin
		p.Spec.DevicePlugin = &v1alpha1.DevicePluginSpec{ResourceName: "vf"}
	}

	pools := Assign(oneCard(), []v1alpha1.DevicePool{newer, older}, nil, nil)
	if len(pools) != 2 || pools[0].Err == nil || len(pools[0].Functions) != 0 ||
		pools[1].Err != nil || len(pools[1].Functions) != 8 {
		t.Errorf("pools are %+v, want the older one to have everything", pools)
	}

	newer.Spec.Priority = 1
	if pools := Assign(oneCard(), []v1alpha1.DevicePool{newer, older}, nil,
		nil); pools[0].Err != nil || pools[1].Err == nil {
		t.Errorf("pools are %+v, want the one with priority to have everything", pools)
	}
}
