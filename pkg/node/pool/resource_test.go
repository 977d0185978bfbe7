// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func plugin(name, prefix, resource string, priority int32) v1alpha1.DevicePool {
	p := devicePool(name, v1alpha1.FunctionSelector{PFNames: []string{"ens3f0"}})
	p.Spec.Publish, p.Spec.Priority = v1alpha1.PublishDevicePlugin, priority
	if prefix+resource != "" {
		p.Spec.DevicePlugin = &v1alpha1.DevicePluginSpec{
			ResourcePrefix: prefix, ResourceName: resource,
		}
	}
	return p
}

func TestResourceName(t *testing.T) {
	for _, test := range []struct {
		pool v1alpha1.DevicePool
		want string
	}{
		{plugin("fast", "", "", 0), "xpu.opiproject.org/fast"},
		{devicePool("fast"), ""},
		{plugin("fast", "intel.com", "", 0), "intel.com/fast"},
		{plugin("fast", "", "Fast_NICs", 0), "xpu.opiproject.org/Fast_NICs"},
		{plugin("fast", "intel.com", "Fast_NICs", 0), "intel.com/Fast_NICs"},
	} {
		if got := (Pool{
			Name: test.pool.Name, Spec: test.pool.Spec,
		}).ResourceName(); got != test.want {
			t.Errorf("resource is %s, want %s", got, test.want)
		}
	}
}

func TestCheckResourceName(t *testing.T) {
	for name, good := range map[string]bool{
		"intel.com/sriov_net_A":                true,
		"xpu.opiproject.org/a-b.c":             true,
		"x/y":                                  true,
		"cpu":                                  false,
		"":                                     false,
		"kubernetes.io/a":                      false,
		"x.kubernetes.io/a":                    false,
		"requests.example.com/a":               false,
		"Intel.com/a":                          false,
		"intel.com/_a":                         false,
		"intel.com/a-":                         false,
		"intel.com/a/b":                        false,
		"intel.com/":                           false,
		"intel.com/" + strings.Repeat("a", 64): false,
		strings.Repeat("a.", 122) + "aa/a":     false, // "requests." does not fit
		strings.Repeat("a.", 121) + "aa/a":     true,
	} {
		if err := CheckResourceName(name); (err == nil) != good {
			t.Errorf("CheckResourceName(%q) = %v, want good: %t", name, err, good)
		}
	}
}

// TestSameResource: if two pools have the same resource, the first one by priority and name gets
// it, and the error of the other one names that pool.
func TestSameResource(t *testing.T) {
	dra := devicePool("c", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0"}})
	dra.Spec.Publish = v1alpha1.PublishDRA
	pools := Assign(oneCard(), []v1alpha1.DevicePool{
		plugin("a", "", "c", 0), plugin("b", "", "c", 1), dra, plugin("d", "", "-", 2),
	}, nil, nil)

	want := map[string][]string{
		"a": {"DevicePool a", "xpu.opiproject.org/c", "DevicePool b",
			"spec.devicePlugin.resourceName"},
		"b": nil,
		"c": nil,
		"d": {"DevicePool d", `"xpu.opiproject.org/-"`},
	}

	for _, p := range pools {
		if (p.Err != nil) != (want[p.Name] != nil) || p.Err != nil && len(p.Functions) != 0 {
			t.Errorf("%s has %d Functions, error %v", p.Name, len(p.Functions), p.Err)
			continue
		}
		for _, text := range want[p.Name] {
			if !strings.Contains(p.Err.Error(), text) {
				t.Errorf("error %q: want %q in it", p.Err, text)
			}
		}
	}

	if got := len(pools[1].Functions); got != 9 {
		t.Errorf("b has %d Functions, want 9", got)
	}
}

func TestOptions(t *testing.T) {
	p := Pool{Spec: v1alpha1.DevicePoolSpec{Selectors: []v1alpha1.FunctionSelector{
		{PFNames: []string{"a"}, IsRdma: true}, {PFNames: []string{"a"}, VDPAType: "vhost"},
		{PFNames: []string{"a"}}, {VDPAType: "virtio"},
	}}}
	for _, test := range []struct {
		f    function.Function
		want Options
	}{
		{
			function.Function{
				Kind: function.VF, PFName: "a", RDMA: true,
				VDPA: function.VDPA{Driver: "vhost_vdpa"},
			}, Options{RDMA: true},
		},
		{
			function.Function{
				Kind: function.VF, PFName: "a", VDPA: function.VDPA{Driver: "vhost_vdpa"},
			}, Options{VDPA: "vhost"},
		},
		{function.Function{
			Kind: function.VF, PFName: "a", VDPA: function.VDPA{Driver: "virtio_vdpa"},
		}, Options{}},
		{
			function.Function{
				Kind: function.VF, PFName: "b", VDPA: function.VDPA{Driver: "virtio_vdpa"},
			}, Options{VDPA: "virtio"},
		},
		{function.Function{Kind: function.VF, PFName: "b"}, Options{}},
	} {
		if got := p.Options(test.f); got != test.want {
			t.Errorf("options of %+v are %+v, want %+v", test.f, got, test.want)
		}
	}
}

func TestCheck(t *testing.T) {
	for _, test := range []struct {
		change func(*v1alpha1.DevicePool)
		want   string
	}{
		{func(*v1alpha1.DevicePool) {}, ""},
		{func(p *v1alpha1.DevicePool) { p.Spec.DevicePlugin = nil }, ""},
		{func(p *v1alpha1.DevicePool) { p.Name = "" }, `metadata.name: ""`},
		{func(p *v1alpha1.DevicePool) {
			p.Name = strings.Repeat("a", 64)
		}, "at most 63 characters"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.Selectors = nil
		}, "spec.selectors: Required value: must have at least one"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.Selectors[0].PFNames[0] = "#1"
		}, "spec.selectors[0].pfNames[0]"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.DeviceType = "nic"
		},
			`spec.deviceType: Unsupported value: "nic": supported values: "netDevice", "accelerator", "auxNetDevice"`},
		{func(p *v1alpha1.DevicePool) { p.Spec.Provision = "Later" }, "spec.provision"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.Publish = ""
		}, "spec: Forbidden: devicePlugin is only for pools with publish: DevicePlugin"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.DevicePlugin.ProvisionAt = "Later"
		}, "spec.devicePlugin.provisionAt"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.DevicePlugin.PreferredAllocation = "Any"
		}, "spec.devicePlugin.preferredAllocation"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.DevicePlugin.ProvisionAt = "Allocate"
		}, "provisionAt: Allocate needs network"},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.DevicePlugin.ProvisionAt, p.Spec.Network = "Allocate", "blue"
		}, ""},
		{func(p *v1alpha1.DevicePool) {
			p.Spec.DevicePlugin.ResourcePrefix = "kubernetes.io"
		}, `resource "kubernetes.io/x"`},
	} {
		p := plugin("fast", "intel.com", "x", 0)
		test.change(&p)
		err := Check(p)
		switch {
		case test.want == "" && err != nil:
			t.Errorf("Check(%+v) = %v, want none", p, err)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
			t.Errorf("Check(%+v) = %v, want %q in it", p, err, test.want)
		}
	}
}

// TestRulesOfCRD: DevicePools of a file and of the API server are refused for the same reasons,
// with the same words.
func TestRulesOfCRD(t *testing.T) {
	text, err := os.ReadFile("../../../deploy/crds/xpu.opiproject.org_devicepools.yaml")
	if err != nil {
		t.Fatal(err)
	}

	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					OpenAPIV3Schema struct {
						Properties map[string]struct {
							Rules []struct{ Message string } `json:"x-kubernetes-validations"`
						}
					}
				}
			}
		}
	}

	if err := yaml.Unmarshal(text, &crd); err != nil {
		t.Fatal(err)
	}

	var want, got []string
	for _, rule := range crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Rules {
		want = append(want, rule.Message)
	}

	for _, rule := range rules(v1alpha1.DevicePoolSpec{}) {
		got = append(got, rule.message)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("messages (-CRD +rules):\n%s", diff)
	}
}
