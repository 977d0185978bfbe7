// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

func TestPoolID(t *testing.T) {
	for _, test := range []struct {
		name string
		want PoolID
	}{
		{"node1/0000-3b-00-0/fast", PoolID{Node: "node1", PF: "0000:3b:00.0", DevicePool: "fast"}},
		{"node1.example.com/10000-3b-1f-7/a.b",
			PoolID{Node: "node1.example.com", PF: "10000:3b:1f.7", DevicePool: "a.b"}},
	} {
		got, err := ParsePoolID(test.name)
		if err != nil || got != test.want {
			t.Errorf("ParsePoolID(%q) = %+v, %v; want %+v", test.name, got, err, test.want)
		}
		if back := got.String(); back != test.name {
			t.Errorf("%+v.String() = %q, want %q", got, back, test.name)
		}
	}
	for _, bad := range []string{"", "node1", "node1/0000-3b-00-0", "/0000-3b-00-0/fast",
		"node1/0000-3b-00-0/", "node1//fast",
		"node1/0000:3b:00.0/fast", "node1/0000-3b-20-0/fast", "node1/0000-3b-00-0/fast/more"} {
		if got, err := ParsePoolID(bad); err == nil {
			t.Errorf("ParsePoolID(%q) = %+v, want an error", bad, got)
		}
	}
}

func TestNamesOfAFunction(t *testing.T) {
	for _, test := range []struct {
		function function.ID
		port     string
		ref      v1alpha1.FunctionRef
	}{
		{function.ID{Address: "0000:3b:02.1"}, "node1-0000-3b-02-1",
			v1alpha1.FunctionRef{PCIAddress: "0000:3b:02.1"}},
		{function.SubfunctionID("0000:3b:00.0", 88), "node1-0000-3b-00-0-sf88",
			v1alpha1.FunctionRef{PCIAddress: "0000:3b:00.0", Subfunction: ptr.To[int64](88)}},
		{function.SubfunctionID("0000:3b:00.0", 0), "node1-0000-3b-00-0-sf0",
			v1alpha1.FunctionRef{PCIAddress: "0000:3b:00.0", Subfunction: ptr.To[int64](0)}},
	} {
		name := PortName("node1", test.function)
		if name != test.port {
			t.Errorf("PortName(%s) = %q, want %q", test.function, name, test.port)
		}
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			t.Errorf("PortName(%s) = %q is no name of an object: %v", test.function, name, problems)
		}
		if diff := cmp.Diff(test.ref, FunctionRef(test.function)); diff != "" {
			t.Errorf("FunctionRef(%s): -want +got\n%s", test.function, diff)
		}
		if back := FunctionOf(FunctionRef(test.function)); back != test.function {
			t.Errorf("FunctionOf(FunctionRef(%s)) = %s", test.function, back)
		}
	}
}

func TestDerivedMAC(t *testing.T) {
	vf, sf := function.ID{Address: "0000:3b:02.0"}, function.SubfunctionID("0000:3b:02.0", 1)
	mac := DerivedMAC("uid-1", "node", vf)
	if again := DerivedMAC("uid-1", "node", vf); mac != again {
		t.Errorf("%s, then %s", mac, again)
	}
	if bytes := mac.HardwareAddr(); len(bytes) != 6 || bytes[0] != 0x02 {
		t.Errorf("%s is not a locally administered unicast address", mac)
	}

	others := []function.MAC{DerivedMAC("uid-2", "node", vf), DerivedMAC("", "node", vf),
		DerivedMAC("uid-1", "node2", vf), DerivedMAC("uid-1", "node", sf)}
	if slices.Contains(others, mac) {
		t.Errorf("%s is also that of another Function or claim: %s", mac, others)
	}
	// Ports keep their MAC address when a node is upgraded.
	if want := function.MAC("02:5b:ae:79:be:58"); mac != want {
		t.Errorf("%s, want %s as in the releases before", mac, want)
	}
}

func TestXPUOf(t *testing.T) {
	xpu := func(name string, pfs ...string) v1alpha1.XPU {
		return v1alpha1.XPU{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.XPUSpec{PFs: pfs},
		}
	}

	going, second := xpu("aa-going", "0000:3b:00.0"), xpu("aa-second", "0000:3b:00.0")
	going.DeletionTimestamp = new(metav1.Now())
	second.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonConflict,
	}}
	for _, test := range []struct {
		name string
		xpus []v1alpha1.XPU
		want string
	}{
		{"none", nil, ""},
		{"others", []v1alpha1.XPU{xpu("a", "0000:5e:00.0")}, ""},
		{"the only card", []v1alpha1.XPU{xpu("a")}, "a"},
		{"the one that names the PF", []v1alpha1.XPU{
			xpu("a"), xpu("c", "0000:5e:00.0", "0000:3b:00.0"), xpu("b", "0000:5e:00.0"),
		}, "c"},
		{"the first of equals", []v1alpha1.XPU{xpu("b", "0000:3b:00.0"), xpu("a", "0000:3b:00.0")},
			"a"},
		{"not one that is being deleted", []v1alpha1.XPU{going, xpu("b")}, "b"},
		{"one that is being deleted, if there is no other",
			[]v1alpha1.XPU{going, xpu("b", "0000:5e:00.0")}, "aa-going"},
		{"not one whose OPI agent is another's", []v1alpha1.XPU{second, xpu("b")}, "b"},
		{"one whose OPI agent is another's, if there is no other",
			[]v1alpha1.XPU{second, xpu("b", "0000:5e:00.0")}, "aa-second"},
		{"none of two that name no PFs", []v1alpha1.XPU{xpu("a"), xpu("b")}, ""},
		{"none of two that name no PFs, beside one that is being deleted",
			[]v1alpha1.XPU{going, xpu("a"), xpu("b")}, ""},
		{"one that names no PFs, if the other names others",
			[]v1alpha1.XPU{xpu("a"), xpu("b", "0000:5e:00.0")}, "a"},
	} {
		for range 2 { // in both orders
			got := ""
			if chosen := XPUOf(test.xpus, "0000:3b:00.0"); chosen != nil {
				got = chosen.Name
			}
			if got != test.want {
				t.Errorf("%s: %q, want %q", test.name, got, test.want)
			}
			slices.Reverse(test.xpus)
		}
	}
}

// TestServerOf: of several XPUs of a node, one that names no PFs is not known to serve any.
func TestServerOf(t *testing.T) {
	silent, second := v1alpha1.XPU{}, v1alpha1.XPU{}
	silent.Name, second.Name = "silent", "second"
	named, reported := second, second
	named.Spec.PFs = []string{"0000:3b:00.0"}
	reported.Status.PFs = []v1alpha1.XPUPF{{Address: "0000:3b:00.0"}}
	for name, test := range map[string]struct {
		xpus []v1alpha1.XPU
		pf   pci.Address
		want string
	}{
		"the only one":                 {[]v1alpha1.XPU{silent}, "0000:5e:00.0", "silent"},
		"named":                        {[]v1alpha1.XPU{silent, named}, "0000:3b:00.0", "second"},
		"reported":                     {[]v1alpha1.XPU{silent, reported}, "0000:3b:00.0", "second"},
		"named by none":                {[]v1alpha1.XPU{silent, named}, "0000:5e:00.0", ""},
		"two that name none":           {[]v1alpha1.XPU{silent, second}, "0000:5e:00.0", ""},
		"the only one names other PFs": {[]v1alpha1.XPU{named}, "0000:5e:00.0", ""},
	} {
		got := ""
		if server := ServerOf(test.xpus, test.pf); server != nil {
			got = server.Name
		}
		if got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
