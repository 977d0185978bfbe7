// SPDX-License-Identifier: Apache-2.0

package health

import (
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

func pools(selector v1alpha1.FunctionSelector) pool.Pool {
	return pool.Pool{
		Name: "fast",
		Spec: v1alpha1.DevicePoolSpec{Selectors: []v1alpha1.FunctionSelector{selector}},
	}
}

// TestUnusable covers the states on the host in which a Function cannot be attached, and similar
// states in which it can.
func TestUnusable(t *testing.T) {
	vf := function.Function{
		ID: function.ID{Address: "0000:3b:02.0"}, Kind: function.VF, Class: function.Network,
		PF: "0000:3b:00.0", PFName: "ens1f0",
		Driver: "igbvf", Netdev: "eth5", LinkUp: true,
	}

	netdevs := pools(v1alpha1.FunctionSelector{PFNames: []string{"ens1f0"}})
	programs := pools(v1alpha1.FunctionSelector{Drivers: []string{"vfio-pci", "mlx5_vfio_pci"}})
	rdma := pools(v1alpha1.FunctionSelector{IsRdma: true})

	with := func(change func(*function.Function)) function.Function {
		f := vf
		change(&f)
		return f
	}

	infiniBand := with(func(f *function.Function) { f.LinkType = function.InfiniBand })
	joined := pools(v1alpha1.FunctionSelector{PFNames: []string{"ens1f0"}})
	joined.Spec.Network = "blue"

	bound := func(driver string) function.Function {
		return with(func(f *function.Function) {
			f.Driver, f.Netdev, f.NoNetdev = driver, "", true
		})
	}

	for name, test := range map[string]struct {
		f      function.Function
		p      pool.Pool
		driver string
		taint  string
		text   string
	}{
		"healthy": {f: vf, p: netdevs},
		"netdev in another namespace": {
			f: with(func(f *function.Function) { f.Netdev = "" }), p: netdevs,
		},
		"no driver": {
			bound(""), netdevs, "", v1alpha1.TaintFault, "has no driver",
		},
		"InfiniBand": {f: infiniBand, p: netdevs},
		"InfiniBand in a pool with a network": {
			infiniBand, joined, "", v1alpha1.TaintFault,
			`DevicePool fast: spec.network "blue": must be absent: Function 0000:3b:02.0 is InfiniBand`,
		},
		"InfiniBand in a pool with a network, for a program": {
			infiniBand, joined, "vfio-pci", v1alpha1.TaintFault, "is InfiniBand",
		},
		"no driver, in no pool": {
			bound(""), pool.Pool{}, "", v1alpha1.TaintFault, "has no driver",
		},
		"no driver, one will be bound": {f: bound(""), p: netdevs, driver: "vfio-pci"},
		"port of a bridge": {
			with(func(f *function.Function) { f.HostUse = "is a port of bridge br0" }), netdevs,
			"", v1alpha1.TaintInUse, "netdev eth5 is a port of bridge br0",
		},
		"port of a bridge, for program": {
			with(func(f *function.Function) { f.HostUse = "is a port of bridge br0" }), netdevs,
			"vfio-pci", v1alpha1.TaintInUse, "bridge br0",
		},
		"left with vfio-pci": {
			bound("vfio-pci"), netdevs, "", v1alpha1.TaintFault,
			"driver is vfio-pci, which makes no netdev, and its pool has netdevs",
		},
		"left with a variant of vfio": {
			bound("mlx5_vfio_pci"), netdevs, "", v1alpha1.TaintFault, "driver is mlx5_vfio_pci",
		},
		"driver that the pool names":  {f: bound("vfio-pci"), p: programs},
		"variant that the pool names": {f: bound("mlx5_vfio_pci"), p: programs},
		"variant, and the pool names vfio-pci": {
			f: with(func(f *function.Function) {
				f.Driver, f.Netdev, f.NoNetdev, f.Passthrough = "vendors_own", "", true, function.VFIO
			}), p: pools(v1alpha1.FunctionSelector{Drivers: []string{"vfio-pci"}}),
		},
		"vfio-pci, and the pool names a variant": {
			bound("vfio-pci"), pools(v1alpha1.FunctionSelector{Drivers: []string{"mlx5_vfio_pci"}}), "",
			v1alpha1.TaintFault, "driver is vfio-pci, which makes no netdev",
		},
		"driver that the owner names": {f: bound("vfio-pci"), p: netdevs, driver: "vfio-pci"},
		"no netdev": {
			bound("iavf"), netdevs, "", v1alpha1.TaintFault, "driver iavf has made no netdev yet",
		},
		"no netdev, but RDMA": {
			f: with(func(f *function.Function) {
				f.Netdev, f.NoNetdev, f.RDMA, f.RDMAMode = "", true, true, function.RDMAShared
			}), p: rdma,
		},
		"no netdev, but vDPA": {
			f: with(func(f *function.Function) {
				f.Netdev, f.NoNetdev, f.VDPA.Name = "", true, "vdpa0"
			}), p: netdevs,
		},
		"accelerator": {
			f: with(func(f *function.Function) {
				f.Class, f.Netdev, f.NoNetdev = function.Accelerator, "", true
			}), p: netdevs,
		},
		"SF that will be made": {
			f: function.PotentialSF(function.Function{Class: function.Network}, 5), p: netdevs,
		},
	} {
		t.Run(name, func(t *testing.T) {
			problem, ok := Unusable(test.f, test.p, test.driver)
			if ok != (test.taint == "") || problem.Taint != test.taint ||
				!strings.Contains(problem.Message, test.text) {
				t.Errorf("usable %t, %+v; want taint %q and %q", ok, problem, test.taint, test.text)
			}
		})
	}
}

// TestRDMAModes checks that a pod does not get an RDMA device for which it is unknown whether the pod
// can open it, or one whose netdev would not survive the way to the pod. A pool that does not ask for
// the device is not affected.
func TestRDMAModes(t *testing.T) {
	pf := function.OfPF("0000:3b:00.0")
	pf.PFName = "ens1f0"
	vf := function.Function{
		ID: function.ID{Address: "0000:3b:02.0"}, Kind: function.VF, Class: function.Network,
		PF: pf.PF, PFName: pf.PFName,
		Driver: "mlx5_core", Netdev: "eth5", LinkUp: true, RDMA: true,
		RDMADevices: []string{"mlx5_2"},
	}

	rdma := pools(v1alpha1.FunctionSelector{IsRdma: true})
	plain := pools(v1alpha1.FunctionSelector{Drivers: []string{"mlx5_core"}})
	sfs := pools(v1alpha1.FunctionSelector{PFNames: []string{"ens1f0"}, IsRdma: true})
	sfs.Spec.SFs = &v1alpha1.SFSpec{Count: 4, FirstNumber: 1}

	potential := func(mode function.RDMAMode) function.Function {
		pf.RDMAMode = mode
		return function.PotentialSF(pf, 1)
	}

	in := func(mode function.RDMAMode) function.Function {
		f := vf
		f.RDMAMode = mode
		return f
	}

	ipoib := func(mode function.RDMAMode) function.Function {
		f := in(mode)
		f.LinkType = "infiniband"
		return f
	}

	const refused, unknown = "rdma system set netns shared", "is not known"
	for name, test := range map[string]struct {
		f      function.Function
		p      pool.Pool
		driver string
		text   string // "" if the Function can be attached
	}{
		"shared":                   {f: in(function.RDMAShared), p: rdma},
		"exclusive":                {f: in(function.RDMAExclusive), p: rdma},
		"exclusive, InfiniBand":    {f: ipoib(function.RDMAExclusive), p: rdma, text: refused},
		"shared, InfiniBand":       {f: ipoib(function.RDMAShared), p: rdma},
		"not known":                {f: in(""), p: rdma, text: unknown},
		"exclusive, not asked for": {f: in(function.RDMAExclusive), p: plain},
		"not known, not asked for": {f: in(""), p: plain},
		"exclusive, in no pool":    {f: in(function.RDMAExclusive)},
		"exclusive, for a program": {
			f: in(function.RDMAExclusive), p: rdma, driver: "vfio-pci",
		},
		"SF that will be made, shared":       {f: potential(function.RDMAShared), p: sfs},
		"SF that will be made, exclusive":    {f: potential(function.RDMAExclusive), p: sfs},
		"SF that will be made, PF without":   {f: potential(""), p: sfs},
		"SF that will be made, not asked of": {f: potential(function.RDMAExclusive), p: plain},
	} {
		t.Run(name, func(t *testing.T) {
			problem, ok := Unusable(test.f, test.p, test.driver)
			if ok != (test.text == "") || !strings.Contains(problem.Message, test.text) {
				t.Errorf("usable %t, %+v; want %q", ok, problem, test.text)
			}
			if !ok && problem.Taint != v1alpha1.TaintFault {
				t.Errorf("taint %q, want %q", problem.Taint, v1alpha1.TaintFault)
			}
		})
	}
}

// TestOnlyFreeFunctionsAreJudged checks that the state on the host is ignored for a Function that a
// pod has.
func TestOnlyFreeFunctionsAreJudged(t *testing.T) {
	f := function.Function{ID: function.ID{Address: "0000:3b:02.0"}, Class: function.Network,
		NoNetdev: true, LinkUp: true}
	held := true
	c := &Checker{
		Pool: func(function.ID) (pool.Pool, bool) {
			return pools(v1alpha1.FunctionSelector{}), true
		},
		Held: func(function.ID) bool { return held },
	}

	if got := c.Problems(f); len(got) > 0 {
		t.Errorf("a Function of a pod has %+v", got)
	}

	held = false
	if got := c.Problems(f); len(got) != 1 || got[0].Taint != v1alpha1.TaintFault {
		t.Errorf("a free Function without driver has %+v", got)
	}
}

// TestLinkDownAndAdministrativelyDown checks that both states have their own message with their own
// remedy.
func TestLinkDownAndAdministrativelyDown(t *testing.T) {
	f := function.Function{PF: "0000:3b:00.0", PFName: "ens1f0"}
	for _, test := range []struct {
		admin bool
		want  string
	}{
		{false, "PF ens1f0 (0000:3b:00.0) has no link: check its cable and the xPU"},
		{
			true,
			`PF ens1f0 (0000:3b:00.0) is administratively down: set it up by "ip link set ens1f0 up"`,
		},
	} {
		f.AdminDown = test.admin
		got := (&Checker{}).Problems(f)
		if len(got) != 1 || got[0].Taint != v1alpha1.TaintLinkDown ||
			!strings.HasPrefix(got[0].Message, test.want) {
			t.Errorf("problems %+v, want %q", got, test.want)
		}
	}
}
