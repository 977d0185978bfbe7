package claim

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
)

func TestPoolID(t *testing.T) {
	for _, test := range []struct {
		name string
		want PoolID
	}{
		{"node1/0000-3b-00-0/fast", PoolID{Node: "node1", PF: "0000:3b:00.0", DevicePool: "fast"}},
		{"node1.example.com/10000-3b-1f-7/a.b", PoolID{Node: "node1.example.com", PF: "10000:3b:1f.7", DevicePool: "a.b"}},
	} {
		got, err := ParsePoolID(test.name)
		if err != nil || got != test.want {
			t.Errorf("ParsePoolID(%q) = %+v, %v; want %+v", test.name, got, err, test.want)
		}
		if back := got.String(); back != test.name {
			t.Errorf("%+v.String() = %q, want %q", got, back, test.name)
		}
	}
	for _, bad := range []string{"", "node1", "node1/0000-3b-00-0", "/0000-3b-00-0/fast", "node1/0000-3b-00-0/", "node1//fast",
		"node1/0000:3b:00.0/fast", "node1/0000-3b-20-0/fast", "node1/0000-3b-00-0/fast/more"} {
		if got, err := ParsePoolID(bad); err == nil {
			t.Errorf("ParsePoolID(%q) = %+v, want an error", bad, got)
		}
	}
}

func TestNamesOfAFunction(t *testing.T) {
	for _, test := range []struct {
		function inventory.ID
		port     string
		ref      v1alpha1.FunctionRef
	}{
		{inventory.ID{Address: "0000:3b:02.1"}, "node1-0000-3b-02-1", v1alpha1.FunctionRef{PCIAddress: "0000:3b:02.1"}},
		{inventory.SubfunctionID("0000:3b:00.0", 88), "node1-0000-3b-00-0-sf88",
			v1alpha1.FunctionRef{PCIAddress: "0000:3b:00.0", Subfunction: ptr.To[int64](88)}},
		{inventory.SubfunctionID("0000:3b:00.0", 0), "node1-0000-3b-00-0-sf0",
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
