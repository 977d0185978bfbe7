// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// makingPool returns a DevicePool whose SFs are made on PFs with these names.
func makingPool(name string, first, count int32, pfNames ...string) v1alpha1.DevicePool {
	p := devicePool(name, v1alpha1.FunctionSelector{PFNames: pfNames})
	p.Spec.SFs = &v1alpha1.SFSpec{FirstNumber: first, Count: count}
	return p
}

// twoCards returns [card], whose SF 88 exists, and a second PF without VFs and SFs.
func twoCards() []function.Function {
	const second = pci.Address("0000:5e:00.0")
	return append(oneCard(), function.Function{
		ID: function.ID{Address: second}, Kind: function.PF, PF: second, PFName: "ens5f0",
		Index: -1, Vendor: "15b3",
		Device: "a2dc", Driver: "mlx5_core", PFDriver: "mlx5_core", NUMANode: 1, LinkUp: true,
		LinkType: "ether",
	})
}

func TestMadeSFs(t *testing.T) {
	const vfs = " 0 1 2 3 4 5 6 7"
	const sf = "0000:3b:00.0/sf"
	general := devicePool("general", v1alpha1.FunctionSelector{Vendors: []string{"15b3"}})
	general.Spec.Priority = 1
	rdma := makingPool("fast", 1, 2)
	rdma.Spec.Selectors = []v1alpha1.FunctionSelector{{
		RootDevices: []string{"0000:3b:00.0"}, Drivers: []string{"mlx5_core.sf"}, IsRdma: true,
	}}
	auxiliary := makingPool("fast", 1, 2, "ens3f0")
	auxiliary.Spec.DeviceType = v1alpha1.DeviceTypeAuxNet
	for _, test := range []struct {
		name  string
		pools []v1alpha1.DevicePool
		// want has the Functions of pool fast.
		want string
	}{
		{"whether they exist or not, and what selectors select besides",
			[]v1alpha1.DevicePool{makingPool("fast", 87, 3, "ens3f0")}, sf + "87 " + sf + "88 " +
				sf + "89" + vfs},
		{"indexes are those of VFs", []v1alpha1.DevicePool{makingPool("fast", 1, 1, "ens3f0#0-1")},
			sf + "1 0 1"},
		{"at each PF that is named",
			[]v1alpha1.DevicePool{makingPool("fast", 1, 1, "ens3f0#0", "ens5f0")},
			sf + "1 0 0000:5e:00.0/sf1"},
		{"at no other", []v1alpha1.DevicePool{makingPool("fast", 1, 2, "ens5f0")},
			"0000:5e:00.0/sf1 0000:5e:00.0/sf2"},
		{"what a driver makes of them does not count", []v1alpha1.DevicePool{rdma}, sf +
			"1 " + sf + "2"},
		{"auxNetDevice", []v1alpha1.DevicePool{auxiliary}, sf + "1 " + sf + "2"},
		{"another pool has the same numbers", []v1alpha1.DevicePool{
			makingPool("fast", 1, 3, "ens5f0"), makingPool("early", 2, 3, "ens5f0"),
		}, "0000:5e:00.0/sf1"},
		{"no pool that has none made takes one that exists", []v1alpha1.DevicePool{
			makingPool("fast", 88, 1, "ens3f0"), general,
		}, sf + "88"},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, p := range Assign(twoCards(), test.pools, nil, nil) {
				if got := names(p.Functions); p.Name == "fast" &&
					(p.Err != nil || got != test.want) {
					t.Errorf("Functions are %q (%v), want %q", got, p.Err, test.want)
				}
				if p.Name == "general" && len(p.Overlaps) > 0 {
					t.Errorf("pool general tells of overlaps that come and go: %v", p.Overlaps)
				}
			}
		})
	}
}

func TestMadeSFsOverlap(t *testing.T) {
	pools := Assign(twoCards(), []v1alpha1.DevicePool{
		makingPool("fast", 1, 3, "ens5f0"), makingPool("early", 2, 3, "ens5f0"),
	}, nil, nil)

	want := []string{
		function.SubfunctionID("0000:5e:00.0", 2).String() + " in early",
		function.SubfunctionID("0000:5e:00.0", 3).String() + " in early",
	}
	if diff := cmp.Diff(want, pools[1].Overlaps); diff != "" {
		t.Errorf("overlaps of pool fast: -want +got\n%s", diff)
	}
}

// TestPFWithoutSFs: of a PF that cannot have SFs, only existing ones are offered, and the pool says
// why.
func TestPFWithoutSFs(t *testing.T) {
	noSFs := func(pf pci.Address) *v1alpha1.Shortage {
		if pf == "0000:5e:00.0" {
			return nil
		}
		return &v1alpha1.Shortage{
			PF: string(pf), Reason: v1alpha1.ReasonNotSupported, Message: "legacy",
		}
	}

	pools := Assign(twoCards(),
		[]v1alpha1.DevicePool{makingPool("fast", 88, 2, "ens3f0#7", "ens5f0")}, nil, noSFs)
	if got := names(pools[0].Functions); got != "0000:3b:00.0/sf88 7 0000:5e:00.0/sf88 "+
		"0000:5e:00.0/sf89" {
		t.Errorf("Functions are %q", got)
	}

	want := []v1alpha1.Shortage{
		{PF: "0000:3b:00.0", Reason: v1alpha1.ReasonNotSupported, Message: "legacy"},
	}
	if diff := cmp.Diff(want, pools[0].Shortages); diff != "" {
		t.Errorf("shortages: -want +got\n%s", diff)
	}

	unbound := twoCards()
	unbound[len(unbound)-1].Driver = ""
	pools = Assign(unbound, []v1alpha1.DevicePool{makingPool("fast", 88, 2, "ens5f0")}, nil, nil)
	p := pools[0]
	if len(p.Functions) > 0 || len(p.Shortages) != 1 ||
		!strings.Contains(p.Shortages[0].Message, "no driver") {
		t.Errorf("a PF without driver: Functions %v, shortages %+v", p.Functions, p.Shortages)
	}
}

// TestOptionsOfMadeSFs: the options of an SF are known before it exists.
func TestOptionsOfMadeSFs(t *testing.T) {
	p := makingPool("fast", 1, 1, "ens5f0")
	p.Spec.Selectors[0].IsRdma = true
	pools := Assign(twoCards(), []v1alpha1.DevicePool{p}, nil, nil)
	if got := pools[0].Options(pools[0].Functions[0]); got != (Options{RDMA: true}) {
		t.Errorf("Options = %+v, want RDMA", got)
	}
}

// TestTrackerKnowsSFsThatAreNotThere: the tracker finds Functions before, while and after they
// exist.
func TestTrackerKnowsSFsThatAreNotThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{functions: twoCards(),
			devicePools: []v1alpha1.DevicePool{makingPool("fast", 1, 2, "ens5f0")}}
		tracker := NewTracker(n, n, nil, testr.New(t))
		changes := make(chan struct{})
		go tracker.Run(t.Context(), changes, func() {})
		synctest.Wait()
		id := function.SubfunctionID("0000:5e:00.0", 2)
		look := func(what string, want function.Function) {
			t.Helper()
			got, ok := tracker.Get(id)
			if diff := cmp.Diff(want, got); !ok || diff != "" {
				t.Errorf("%s: Get = %t, -want +got\n%s", what, ok, diff)
			}
		}

		potential := function.PotentialSF(n.functions[len(n.functions)-1], 2)
		look("not there", potential)
		made := potential
		made.Potential, made.Driver, made.Netdev = false, "mlx5_core.sf", "eth7"
		n.set(func() { n.functions = append(n.functions, made) })
		look("just made", made)
		changes <- struct{}{}
		synctest.Wait()
		n.set(func() { n.functions = n.functions[:len(n.functions)-1] })
		look("just deleted", potential)

		for _, absent := range []function.ID{
			function.SubfunctionID("0000:5e:00.0", 3), {Address: "0000:5e:00.1"},
			function.SubfunctionID("0000:99:00.0", 1),
		} {
			if f, ok := tracker.Get(absent); ok {
				t.Errorf("Get(%s) = %+v, want none", absent, f)
			}
		}

		if f, ok := tracker.Get(function.ID{Address: "0000:3b:00.2"}); !ok ||
			f.Kind != function.VF {
			t.Errorf("Get of a VF = %+v, %t", f, ok)
		}
	})
}

func TestCheckSupply(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*v1alpha1.DevicePoolSpec)
		want   string
	}{
		{"good", func(*v1alpha1.DevicePoolSpec) {}, ""},
		{"anonymous", func(s *v1alpha1.DevicePoolSpec) {
			s.Selectors[0] = v1alpha1.FunctionSelector{Vendors: []string{"15b3"}}
		},
			"need selectors that name the PFs"},
		{"count", func(s *v1alpha1.DevicePoolSpec) {
			s.SFs.Count = 1025
		}, "spec.sfs.count: Invalid value: 1025: must be 1 to 1024"},
		{"firstNumber", func(s *v1alpha1.DevicePoolSpec) {
			s.SFs.FirstNumber = -1
		}, "spec.sfs.firstNumber"},
		{"deviceType", func(s *v1alpha1.DevicePoolSpec) {
			s.DeviceType = v1alpha1.DeviceTypeNet
		}, "make it auxNetDevice"},
		{"numVFs", func(s *v1alpha1.DevicePoolSpec) {
			s.NumVFs = new(int32(-1))
		}, "spec.numVFs: Invalid value: -1: must be 0 to 65535"},
		{"maxAllocated", func(s *v1alpha1.DevicePoolSpec) { s.MaxAllocated = new(int32(0)) },
			"spec.maxAllocated: Invalid value: 0: must be 1"},
		{"maxAllocated without a scheduler that counts", func(s *v1alpha1.DevicePoolSpec) {
			s.MaxAllocated, s.Publish = new(int32(1)), v1alpha1.PublishDevicePlugin
		}, "spec: Forbidden: maxAllocated is only for pools with publish: DRA"},
		{"driver", func(s *v1alpha1.DevicePoolSpec) {
			s.Driver = "uio"
		}, `spec.driver: Invalid value: "uio": "uio": must be vfio-pci, or one of its variants`},
		{"driver for SFs", func(s *v1alpha1.DevicePoolSpec) { s.Driver = v1alpha1.DriverVFIO },
			"driver is not for pools with sfs"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := makingPool("fast", 1, 2, "ens5f0")
			test.change(&p.Spec)
			if got := fmt.Sprint(Check(p)); (test.want == "") != (got == "<nil>") ||
				!strings.Contains(got, test.want) {
				t.Errorf("Check = %s, want %q", got, test.want)
			}
		})
	}
}
