// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
)

// TestValidation checks that the API server refuses invalid objects with a message that says what
// would be right.
func TestValidation(t *testing.T) {
	cluster, err := kubeapitest.Start("../../deploy")
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := cluster.Stop(); err != nil {
			t.Error(err)
		}
	})

	cluster.Need(t)
	api, err := kubeapitest.Client(cluster.Admin())
	if err != nil {
		t.Fatal(err)
	}

	named := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: "default"}
	}

	pool := func(change func(*v1alpha1.DevicePool)) *v1alpha1.DevicePool {
		p := &v1alpha1.DevicePool{
			ObjectMeta: metav1.ObjectMeta{Name: "p"},
			Spec: v1alpha1.DevicePoolSpec{
				Selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"ens3f0#0-3,7"}}},
			},
		}
		change(p)
		return p
	}

	attribute := func(name, text string, change func(*v1alpha1.DevicePool)) *v1alpha1.DevicePool {
		return pool(func(p *v1alpha1.DevicePool) {
			p.Spec.Attributes = []v1alpha1.PoolAttribute{{Name: name, String: &text}}
			if change != nil {
				change(p)
			}
		})
	}

	plugin := func(change func(*v1alpha1.DevicePool)) *v1alpha1.DevicePool {
		return pool(func(p *v1alpha1.DevicePool) {
			p.Spec.Publish, p.Spec.DevicePlugin = v1alpha1.PublishDevicePlugin, &v1alpha1.DevicePluginSpec{}
			change(p)
		})
	}

	xpu := func(change func(*v1alpha1.XPUSpec)) *v1alpha1.XPU {
		x := &v1alpha1.XPU{
			ObjectMeta: metav1.ObjectMeta{Name: "x"},
			Spec:       v1alpha1.XPUSpec{NodeName: "n", Endpoint: "10.0.0.1:50151", Insecure: true},
		}
		change(&x.Spec)
		return x
	}

	forAll := v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll}
	network := func(change func(*v1alpha1.XPUNetworkSpec)) *v1alpha1.XPUNetwork {
		n := &v1alpha1.XPUNetwork{
			ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: v1alpha1.XPUNetworkSpec{
				VLAN: 10, AllowedNamespaces: forAll, Subnets: []string{"10.1.0.0/24", "fd00::/64"},
			},
		}
		change(&n.Spec)
		return n
	}

	port := func(change func(*v1alpha1.XPUPortSpec)) *v1alpha1.XPUPort {
		p := &v1alpha1.XPUPort{ObjectMeta: named("p"), Spec: v1alpha1.XPUPortSpec{
			NodeName: "n", Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:02.1"}, XPU: "x",
			Network: "blue", MAC: "02:00:00:00:00:01",
			Claim: v1alpha1.ClaimRef{Name: "c", UID: "1", Request: "nic"},
		}}
		change(&p.Spec)
		return p
	}

	trunk := func(name string, networks ...string) *v1alpha1.XPUPort {
		p := port(func(s *v1alpha1.XPUPortSpec) { *s = trunkOf(*s, networks...) })
		p.Name = name
		return p
	}

	t.Run("create", func(t *testing.T) {
		for _, test := range []struct {
			name   string
			object client.Object
			want   string // text of the error; "" means that the object is accepted
		}{
			{"pool", pool(func(*v1alpha1.DevicePool) {}), ""},
			{"pool without selectors", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors = nil
			}), "spec.selectors"},
			{"pool with an empty selector", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors = []v1alpha1.FunctionSelector{{}}
			}), "spec.selectors[0]"},
			{"pool with a bad range", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0].PFNames = []string{"ens3f0#0-"}
			}), "spec.selectors[0].pfNames[0]"},
			{"pool with a bad vendor", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0].Vendors = []string{"0x15b3"}
			}), "spec.selectors[0].vendors[0]"},
			{"pool with a bad mode", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Provision = "Sometime"
			}), `"OnPrepare", "BeforeBind", "Ahead"`},
			{"pool with a long name", pool(func(p *v1alpha1.DevicePool) {
				p.Name = strings.Repeat("a", 64)
			}), "at most 63 characters"},
			{"pool for the device plugin", plugin(func(p *v1alpha1.DevicePool) {
				p.Name = "plugin"
				p.Spec.DeviceType, p.Spec.Priority = v1alpha1.DeviceTypeNet, -3
				p.Spec.Selectors = []v1alpha1.FunctionSelector{{
					ACPIIndexes: []string{"101"}, LinkTypes: []string{"ether"},
					DDPProfiles: []string{"ICE COMMS Package"}, PKeys: []string{"0x7fff"},
					AuxTypes: []string{"sf"}, VDPAType: "vhost",
				}, {IsRdma: true}}

				p.Spec.DevicePlugin.ResourcePrefix, p.Spec.DevicePlugin.ResourceName = "intel.com", "Sriov_net-A"
				p.Spec.DevicePlugin.AdditionalInfo = map[string]map[string]string{
					"*": {"token": "1"},
				}
			}), ""},
			{"pool that selects everything, as xpuctl writes it",
				&unstructured.Unstructured{Object: map[string]any{
					"apiVersion": "xpu.opiproject.org/v1alpha1", "kind": "DevicePool",
					"metadata": map[string]any{"name": "everything"},
					"spec":     map[string]any{"selectors": []any{map[string]any{"isRdma": false}}},
				}}, ""},
			{"pool provisioned at Allocate", plugin(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.Network, p.Spec.DevicePlugin.ProvisionAt = "allocate", "blue", v1alpha1.ProvisionAtAllocate
			}), ""},
			{"pool provisioned at Allocate without network", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.DevicePlugin.ProvisionAt = v1alpha1.ProvisionAtAllocate
			}), "provisionAt: Allocate needs network"},
			{"pool that makes Ports ahead", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.Provision, p.Spec.Network, p.Spec.PortsAhead = "ahead", v1alpha1.ProvisionAhead, "blue", ptr.To(int32(64))
			}), ""},
			{"pool that makes Ports ahead in no network", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Provision = v1alpha1.ProvisionAhead
			}),
				"provision: Ahead needs network and publish: DRA, and no sfs"},
			{"pool that makes Ports ahead for the device plugin",
				plugin(func(p *v1alpha1.DevicePool) {
					p.Spec.Provision, p.Spec.Network = v1alpha1.ProvisionAhead, "blue"
				}), "provision: Ahead needs network and publish: DRA, and no sfs"},
			{"pool that makes Ports ahead for SFs", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Provision, p.Spec.Network, p.Spec.SFs = v1alpha1.ProvisionAhead, "blue", &v1alpha1.SFSpec{Count: 4}
			}), "provision: Ahead needs network and publish: DRA, and no sfs"},
			{"pool that makes too many Ports ahead", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Provision, p.Spec.Network, p.Spec.PortsAhead = v1alpha1.ProvisionAhead, "blue", ptr.To(int32(65))
			}), "spec.portsAhead"},
			{"pool with portsAhead alone", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.PortsAhead = ptr.To(int32(1))
			}), "portsAhead is only for pools with provision: Ahead"},
			{"pool for DRA with devicePlugin", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.Publish = v1alpha1.PublishDRA
			}), "devicePlugin is only for pools with publish: DevicePlugin"},
			{"pool with devicePlugin by default", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.Publish = ""
			}), "devicePlugin is only for pools with publish: DevicePlugin"},
			{"pool with a bad device type", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.DeviceType = "gpu"
			}), "spec.deviceType"},
			{"pool with a bad vDPA type", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0].VDPAType = "user"
			}), "spec.selectors[0].vdpaType"},
			{"pool with a bad auxiliary type", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0].AuxTypes = []string{"eth"}
			}), "spec.selectors[0].auxTypes[0]"},
			{"pool with a bad firmware number", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0].ACPIIndexes = []string{"eno1"}
			}), "spec.selectors[0].acpiIndexes[0]"},
			{"pool with a bad resource", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.DevicePlugin.ResourceName = "fast_"
			}), "spec.devicePlugin.resourceName"},
			{"pool with a bad prefix", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.DevicePlugin.ResourcePrefix = "Intel.com"
			}), "spec.devicePlugin.resourcePrefix"},
			{"pool with a bad preference", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.DevicePlugin.PreferredAllocation = "Any"
			}), "spec.devicePlugin.preferredAllocation"},
			{"pool with VFs", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.NumVFs = "vfs", ptr.To(int32(8))
			}), ""},
			{"pool with VFs of any PF", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.NumVFs, p.Spec.Selectors = ptr.To(int32(8)), []v1alpha1.FunctionSelector{
					{Vendors: []string{"15b3"}},
				}
			}), "numVFs and sfs need selectors that name the PFs, by pfNames or rootDevices"},
			{"pool with a reversed range", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0].PFNames = []string{"ens3f0#1,7-3"}
			}), "from the smaller to the larger one"},
			{"pool with a reversed range of an address", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0] = v1alpha1.FunctionSelector{
					RootDevices: []string{"0000:3b:00.0#7-3"},
				}
			}), "from the smaller to the larger one"},
			{"pool with the last of its VFs", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.NumVFs, p.Spec.Selectors[0].PFNames = "last", ptr.To(
					int32(8),
				), []string{"ens3f0#0,6-7", "ens3f1"}
			}), ""},
			{"pool with a VF beyond its last", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.NumVFs, p.Spec.Selectors[0].PFNames = ptr.To(int32(8)), []string{
					"ens3f1", "ens3f0#0,6-8",
				}
			}), "pfNames has VF indexes that the PF will not have"},
			{"pool with VFs beyond its last", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.NumVFs, p.Spec.Selectors[0] = ptr.To(int32(8)), v1alpha1.FunctionSelector{
					RootDevices: []string{"0000:3b:00.0#14-15"},
				}
			}), "rootDevices has VF indexes that the PF will not have"},
			{"pool with fewer than no VFs", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.NumVFs = ptr.To(int32(-1))
			}), "spec.numVFs"},
			{"pool with too many VFs", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.NumVFs = ptr.To(int32(65536))
			}), "spec.numVFs"},
			{"pool with SFs", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.SFs = "sfs", &v1alpha1.SFSpec{Count: 4}
			}), ""},
			{"pool with too many SFs", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.SFs = &v1alpha1.SFSpec{Count: 1025}
			}), "spec.sfs.count"},
			{"pool with SFs and without", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.SFs, p.Spec.DeviceType = &v1alpha1.SFSpec{Count: 4}, v1alpha1.DeviceTypeNet
			}), "sfs needs a pool that may have SFs: leave deviceType out, or make it " +
				"auxNetDevice"},
			{"pool with SFs of another driver", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.SFs, p.Spec.Driver = &v1alpha1.SFSpec{Count: 4}, v1alpha1.DriverVFIO
			}), "driver is not for pools with sfs"},
			{"pool by an altname", pool(func(p *v1alpha1.DevicePool) {
				p.Name = "altname"
				p.Spec.Selectors[0].PFNames = []string{strings.Repeat("n", 127) + "#0-3,7"}
			}), ""},
			{"pool by a name that no netdev has", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Selectors[0].PFNames = []string{strings.Repeat("n", 128)}
			}), "spec.selectors[0].pfNames[0]"},
			{"pool with attributes", pool(func(p *v1alpha1.DevicePool) {
				p.Name = "attributes"
				p.Spec.Attributes = []v1alpha1.PoolAttribute{
					{Name: "rail", Int: ptr.To(int64(0))}, {Name: "_fabric", String: ptr.To("blue")},
					{Name: "example.com/rail", Bool: ptr.To(false)},
					{Name: strings.Repeat("d", 63) + "/rail", Bool: ptr.To(true)},
					{Name: strings.Repeat("n", 32), String: ptr.To(strings.Repeat("~", 64))},
				}
			}), ""},
			{"pool with too many attributes", pool(func(p *v1alpha1.DevicePool) {
				for i := range v1alpha1.MaxPoolAttributes + 1 {
					p.Spec.Attributes = append(p.Spec.Attributes, v1alpha1.PoolAttribute{
						Name: fmt.Sprint("a", i), Bool: ptr.To(true),
					})
				}
			}), "spec.attributes: Too many"},
			{"pool with an attribute twice", attribute("rail", "a", func(p *v1alpha1.DevicePool) {
				p.Spec.Attributes = append(p.Spec.Attributes, p.Spec.Attributes[0])
			}), "spec.attributes[1]"},
			{"attribute whose name is no C identifier", attribute("rail-0", "a", nil),
				"spec.attributes[0]"},
			{"attribute with a long name", attribute(strings.Repeat("n", 33), "a", nil),
				"spec.attributes[0]"},
			{"attribute of a domain with an empty label", attribute("a..b/rail", "a", nil),
				"spec.attributes[0]"},
			{"attribute of a domain with a hyphen before a label", attribute("a.-b/rail", "a", nil),
				"spec.attributes[0]"},
			{"attribute of a long domain", attribute(strings.Repeat("a.", 32)+"a/rail", "a", nil),
				"the domain of name has at most 63 characters"},
			{"attribute with a long text", attribute("rail", strings.Repeat("n", 65), nil),
				"spec.attributes[0]"},
			{"attribute with a text that is no ASCII", attribute("rail", "ä", nil),
				"spec.attributes[0]"},
			{"attribute with an empty text", attribute("rail", "", nil), "spec.attributes[0]"},
			{"attribute without a value", attribute("rail", "a", func(p *v1alpha1.DevicePool) {
				p.Spec.Attributes[0].String = nil
			}), "must have one of string, int and bool"},
			{"attribute with two values", attribute("rail", "a", func(p *v1alpha1.DevicePool) {
				p.Spec.Attributes[0].Int = ptr.To(int64(1))
			}), "must have one of string, int and bool"},
			{"attribute of the agent", attribute("linkSpeed", "a", nil),
				"name is an attribute that the agent finds out itself: use another name"},
			{"attribute of Kubernetes", attribute("resource.kubernetes.io/numaNode", "a", nil),
				"name has a domain of Kubernetes, of Multus or of this project"},
			{"attribute of Multus", attribute("k8s.cni.cncf.io/deviceID", "a", nil),
				"name has a domain of Kubernetes, of Multus or of this project"},
			{"attribute of the project", attribute("xpu.opiproject.org/rail", "a", nil),
				"name has a domain of Kubernetes, of Multus or of this project"},
			{"attribute for the kubelet", attribute("rail", "a", func(p *v1alpha1.DevicePool) {
				p.Spec.Publish = v1alpha1.PublishDevicePlugin
			}), "attributes is only for pools with publish: DRA"},
			{"pool with Data Direct", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.DataDirect = "data-direct", true
			}), ""},
			{"Data Direct for the kubelet", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.DataDirect, p.Spec.Publish = true, v1alpha1.PublishDevicePlugin
			}), "dataDirect is only for pools with publish: DRA"},
			{"pool that evicts", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.EvictLostAfter = "evicts", &metav1.Duration{Duration: time.Minute}
			}), ""},
			{"pool that evicts at once", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.EvictLostAfter = &metav1.Duration{Duration: 59 * time.Second}
			}), "must be at least 1m, as a card may reset"},
			{"pool that evicts from a shared PF", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.EvictLostAfter = &metav1.Duration{Duration: time.Minute}
				p.Spec.Model = v1alpha1.ModelPorts
			}), "evictLostAfter is only for pools with publish: DRA"},
			{"pool for the kubelet that evicts", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.EvictLostAfter = &metav1.Duration{Duration: time.Minute}
			}), "evictLostAfter is only for pools with publish: DRA"},
			{"pool whose link only informs", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.LinkDown = "informs", v1alpha1.LinkDownNone
			}), ""},
			{"pool whose link evicts", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.LinkDown = "NoExecute"
			}), "spec.linkDown"},
			{"pool for the kubelet whose link only informs", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.LinkDown = v1alpha1.LinkDownNone
			}), "linkDown is only for pools with publish: DRA"},
			{"pool with lists of NUMA nodes", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.ListNUMANodes = "numa-nodes", true
			}), ""},
			{"lists of NUMA nodes for the kubelet", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.ListNUMANodes, p.Spec.Publish = true, v1alpha1.PublishDevicePlugin
			}), "listNUMANodes is only for pools with publish: DRA"},
			{"pool of a variant of vfio-pci", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.Driver = "variant", "nvgrace_gpu_vfio_pci"
			}), ""},
			{"pool of a driver outside its directory", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Driver = "../x_vfio_pci"
			}), "spec.driver"},
			{"pool of an unknown driver", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Driver = "uio"
			}), "spec.driver"},
			{"pool with few at once", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.MaxAllocated = "few", ptr.To(int32(2))
			}), ""},
			{"pool whose PFs or VFs are devices", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.Model = "counters", v1alpha1.ModelCounters
			}), ""},
			{"pool whose PFs claims share", pool(func(p *v1alpha1.DevicePool) {
				p.Name, p.Spec.Model = "ports", v1alpha1.ModelPorts
			}), ""},
			{"pool of an unknown model", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Model = "Slices"
			}), "spec.model"},
			{"pool whose PFs claims share before they are bound",
				pool(func(p *v1alpha1.DevicePool) {
					p.Spec.Model, p.Spec.Provision = v1alpha1.ModelPorts, v1alpha1.ProvisionBeforeBind
				}), "model: Ports needs provision: OnPrepare"},
			{"pool whose PFs claims share, of SFs", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Model, p.Spec.SFs = v1alpha1.ModelPorts, &v1alpha1.SFSpec{Count: 4}
			}), "model: Ports needs provision: OnPrepare"},
			{"pool whose PFs claims share, of the kubelet's", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.Model = v1alpha1.ModelPorts
			}), "model is only for pools with publish: DRA"},
			{"pool with none at once", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.MaxAllocated = ptr.To(int32(0))
			}), "spec.maxAllocated"},
			{"pool with few at once of the kubelet's", plugin(func(p *v1alpha1.DevicePool) {
				p.Spec.MaxAllocated = ptr.To(int32(2))
			}), "maxAllocated is only for pools with publish: DRA"},
			{"xpu", xpu(func(s *v1alpha1.XPUSpec) { s.VTEP = "2001:db8::1" }), ""},
			{"xpu neither TLS nor insecure", xpu(func(s *v1alpha1.XPUSpec) {
				s.Insecure = false
			}), "set tls, or insecure: true"},
			{"xpu both TLS and insecure", xpu(func(s *v1alpha1.XPUSpec) {
				s.TLS = &v1alpha1.XPUTLS{SecretName: "s"}
			}), "set tls, or insecure: true"},
			{"xpu without port", xpu(func(s *v1alpha1.XPUSpec) { s.Endpoint = "10.0.0.1" }),
				"spec.endpoint"},
			{"xpu with a prefix as VTEP", xpu(func(s *v1alpha1.XPUSpec) {
				s.VTEP = "198.51.100.1/24"
			}), "vtep must be an address"},
			{"xpu with a bad PF", xpu(func(s *v1alpha1.XPUSpec) { s.PFs = []string{"3b:00.0"} }),
				"spec.pfs[0]"},
			{"xpu of another dialect", xpu(func(s *v1alpha1.XPUSpec) { s.Dialect = "klingon" }),
				`"evpn-gw"`},
			{"network", network(func(*v1alpha1.XPUNetworkSpec) {}), ""},
			{"network with VLAN 4095", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.VLAN = 4095
			}), "spec.vlan"},
			{"network with VNI 0", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.VNI = ptr.To(int32(0))
			}), "spec.vni"},
			{"network with host bits", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Subnets = []string{"10.1.0.1/24"}
			}), "without host bits, such as 10.1.0.0/24"},
			{"network with a word for a subnet", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Subnets = []string{"blue"}
			}), "CIDR notation"},
			{"network with two IPv4 subnets", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Subnets = []string{"10.1.0.0/24", "10.2.0.0/24"}
			}), "at most one IPv4 and one IPv6"},
			{"network with gateways and reserved addresses",
				&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "gated"},
					Spec: v1alpha1.XPUNetworkSpec{
						VLAN: 12, AllowedNamespaces: forAll,
						Gateways: []string{"10.1.0.254", "fd00::1"},
						Reserved: []string{"10.1.0.0/28", "10.1.0.32-10.1.0.40"},
					}}, ""},
			{"network with a prefix for a gateway", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Gateways = []string{"10.1.0.1/24"}
			}), "each gateway must be an address"},
			{"network that is routed", &v1alpha1.XPUNetwork{
				ObjectMeta: metav1.ObjectMeta{Name: "routed"}, Spec: v1alpha1.XPUNetworkSpec{
					VLAN: 13, AllowedNamespaces: forAll, Subnets: []string{"10.1.0.0/24"},
					Gateways: []string{"10.1.0.254"},
					Routed:   &v1alpha1.RoutedNetwork{VRF: "tenant-a.blue"},
				}}, ""},
			{"network that is routed without a subnet", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Subnets, s.Routed = nil, &v1alpha1.RoutedNetwork{VRF: "blue"}
			}), "routed needs at least one subnet in spec.subnets"},
			{"network that is routed by a gateway elsewhere",
				network(func(s *v1alpha1.XPUNetworkSpec) {
					s.Subnets, s.Gateways = []string{"10.1.0.0/24"}, []string{"10.2.0.1"}
					s.Routed = &v1alpha1.RoutedNetwork{VRF: "blue"}
				}), "must be addresses of the subnets"},
			{"gateway outside the subnets, without routed",
				network(func(s *v1alpha1.XPUNetworkSpec) {
					s.Subnets, s.Gateways = []string{"10.1.0.0/24"}, []string{"10.2.0.1"}
				}), "must be addresses of the subnets"},
			{"network with an odd VRF", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Subnets = []string{"10.1.0.0/24"}
				s.Routed = &v1alpha1.RoutedNetwork{VRF: "Blue/"}
			}), "vrf must have lower-case letters"},
			{"network with a long VRF", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Subnets = []string{"10.1.0.0/24"}
				s.Routed = &v1alpha1.RoutedNetwork{VRF: strings.Repeat("a", 64)}
			}), "spec.routed.vrf"},
			{"network without a VRF's name", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Subnets, s.Routed = []string{"10.1.0.0/24"}, &v1alpha1.RoutedNetwork{}
			}), "spec.routed.vrf"},
			{"network with a word for reserved", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.Reserved = []string{"10.1.0.1-ten"}
			}), "each entry must be a prefix"},
			{"network with an odd source filter", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.SourceFilter = "Some"
			}), "spec.sourceFilter"},
			{"network with a small MTU", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.MTU = ptr.To(int32(500))
			}), "spec.mtu"},
			{"network that says nothing of namespaces", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.AllowedNamespaces.From = ""
			}), "spec.allowedNamespaces.from"},
			{"network for the same namespace", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.AllowedNamespaces.From = "Same"
			}), `"All", "Selector", "None"`},
			{"network without the selector", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.AllowedNamespaces.From = v1alpha1.NamespacesFromSelector
			}), "selector is for from: Selector"},
			{"network for all and some", network(func(s *v1alpha1.XPUNetworkSpec) {
				s.AllowedNamespaces.Selector = &metav1.LabelSelector{}
			}), "selector is for from: Selector"},
			{"pool that allows an odd field", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Allow = []v1alpha1.PrivilegedField{"mtu"}
			}), "spec.allow[0]"},
			{"pool that allows a field twice", pool(func(p *v1alpha1.DevicePool) {
				p.Spec.Allow = []v1alpha1.PrivilegedField{"mac", "mac"}
			}), "spec.allow[1]: Duplicate value"},
			{"port", port(func(*v1alpha1.XPUPortSpec) {}), ""},
			{"port made ahead for a claim", port(func(s *v1alpha1.XPUPortSpec) {
				s.Ahead = true
			}), "made ahead is for no claim and for no pod"},
			{"trunk", trunk("trunk", "blue", "red"), ""},
			{"trunk with 64 networks", trunk("large", numbered(64)...), ""},
			{"trunk with 65 networks", port(func(s *v1alpha1.XPUPortSpec) {
				*s = trunkOf(*s, numbered(65)...)
			}), "must have at most 64 items"},
			{"trunk with a network twice", port(func(s *v1alpha1.XPUPortSpec) {
				*s = trunkOf(*s, "blue", "blue")
			}), "Duplicate value"},
			{"trunk with a network without a tag", port(func(s *v1alpha1.XPUPortSpec) {
				*s = trunkOf(*s, "blue")
				s.Network = "red"
			}), "set network or networks"},
			{"port without a network", port(func(s *v1alpha1.XPUPortSpec) { s.Network = "" }),
				"set network or networks"},
			{"trunk with addresses of no network", port(func(s *v1alpha1.XPUPortSpec) {
				*s = trunkOf(*s, "blue")
				s.Addresses = []string{"10.1.0.2/24"}
			}), "leave addresses and assignAddresses out"},
			{"trunk that wants addresses", port(func(s *v1alpha1.XPUPortSpec) {
				*s = trunkOf(*s, "blue")
				s.AssignAddresses = true
			}), "leave addresses and assignAddresses out"},
			{"trunk without a claim", port(func(s *v1alpha1.XPUPortSpec) {
				*s = trunkOf(*s, "blue")
				s.Claim = v1alpha1.ClaimRef{}
			}), "networks are for the port of a claim"},
			{"port with a group MAC", port(func(s *v1alpha1.XPUPortSpec) {
				s.MAC = "01:00:00:00:00:01"
			}), "spec.mac"},
			{"port with a long address", port(func(s *v1alpha1.XPUPortSpec) {
				s.Addresses = []string{strings.Repeat("1", 65)}
			}), "spec.addresses[0]: Too long"},
			{"port with a long XPU", port(func(s *v1alpha1.XPUPortSpec) {
				s.XPU = strings.Repeat("x", 254)
			}), "spec.xpu: Too long"},
			{"port with a long network", port(func(s *v1alpha1.XPUPortSpec) {
				s.Network = strings.Repeat("x", 254)
			}), "spec.network: Too long"},
			{"port with a long claim", port(func(s *v1alpha1.XPUPortSpec) {
				long := strings.Repeat("x", 254)
				s.Claim = v1alpha1.ClaimRef{Name: long, UID: types.UID(long), Request: long}
			}), "spec.claim.name: Too long"},
			{"port with a number that no SF has", port(func(s *v1alpha1.XPUPortSpec) {
				s.Function.Subfunction = new(int64(1 << 32))
			}), "spec.function.subfunction"},
			{"port with a short address", port(func(s *v1alpha1.XPUPortSpec) {
				s.Function.PCIAddress = "3b:02.1"
			}), "spec.function.pciAddress"},
		} {
			wantAnswer(t, test.name, api.Create(t.Context(), test.object), test.want)
			devicePool, is := test.object.(*v1alpha1.DevicePool)
			if !is {
				continue
			}

			want := test.want
			if want == "" && devicePool.Spec.Provision == v1alpha1.ProvisionAhead {
				want = "Ahead is only for DevicePools of the API server"
			}
			wantAnswer(t, test.name+", in a file", parseFile(t, devicePool), want)
		}
	})

	t.Run("update", func(t *testing.T) {
		for _, test := range []struct {
			name   string
			object client.Object
			change func(client.Object)
			want   string
		}{
			{"network's VLAN", &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "n"}},
				func(o client.Object) {
					o.(*v1alpha1.XPUNetwork).Spec.VLAN = 11
				}, "vlan cannot be changed"},
			{"network gets a VNI", &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "n"}},
				func(o client.Object) {
					o.(*v1alpha1.XPUNetwork).Spec.VNI = ptr.To(int32(5))
				}, "vni cannot be added or removed"},
			{"network gets routed", &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "n"}},
				func(o client.Object) {
					spec := &o.(*v1alpha1.XPUNetwork).Spec
					spec.Subnets = []string{"10.1.0.0/24"}
					spec.Routed = &v1alpha1.RoutedNetwork{VRF: "blue"}
				}, "routed cannot be added, changed or removed: make another XPUNetwork"},
			{"network gets another VRF",
				&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "routed"}},
				func(o client.Object) { o.(*v1alpha1.XPUNetwork).Spec.Routed.VRF = "red" },
				"routed cannot be added, changed or removed"},
			{"network is not routed any more",
				&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "routed"}},
				func(o client.Object) { o.(*v1alpha1.XPUNetwork).Spec.Routed = nil },
				"routed cannot be added, changed or removed"},
			{"routed network gets another gateway",
				&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "routed"}},
				func(o client.Object) {
					o.(*v1alpha1.XPUNetwork).Spec.Gateways = []string{"10.1.0.1"}
				}, ""},
			{"network's MTU", &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "n"}},
				func(o client.Object) {
					o.(*v1alpha1.XPUNetwork).Spec.MTU = ptr.To(int32(9000))
				}, ""},
			{"port's network", &v1alpha1.XPUPort{ObjectMeta: named("p")}, func(o client.Object) {
				o.(*v1alpha1.XPUPort).Spec.Network = "red"
			}, "the spec of an XPUPort cannot be changed"},
			{"port's labels", &v1alpha1.XPUPort{ObjectMeta: named("p")}, func(o client.Object) {
				o.SetLabels(map[string]string{"a": "b"})
			}, ""},
		} {
			if err := api.Get(t.Context(), client.ObjectKeyFromObject(test.object),
				test.object); err != nil {
				t.Fatal(err)
			}
			test.change(test.object)
			wantAnswer(t, test.name, api.Update(t.Context(), test.object), test.want)
		}
	})

	t.Run("defaults", func(t *testing.T) {
		var p v1alpha1.DevicePool
		if err := api.Get(t.Context(), client.ObjectKey{Name: "p"}, &p); err != nil {
			t.Fatal(err)
		}
		if p.Spec.Publish != v1alpha1.PublishDRA ||
			p.Spec.Provision != v1alpha1.ProvisionOnPrepare {
			t.Errorf("publish %q, provision %q", p.Spec.Publish, p.Spec.Provision)
		}
		if err := api.Get(t.Context(), client.ObjectKey{Name: "plugin"}, &p); err != nil {
			t.Fatal(err)
		}
		if d := p.Spec.DevicePlugin; d.ProvisionAt != v1alpha1.ProvisionAtAdd ||
			d.PreferredAllocation != v1alpha1.PreferPack {
			t.Errorf("provisionAt %q, preferredAllocation %q", d.ProvisionAt, d.PreferredAllocation)
		}
	})
}

// trunkOf returns the spec of a claim's port with tagged networks.
func trunkOf(spec v1alpha1.XPUPortSpec, networks ...string) v1alpha1.XPUPortSpec {
	spec.Network, spec.Addresses = "", nil
	spec.Claim = v1alpha1.ClaimRef{Name: "c", UID: "u", Request: "r"}
	for _, name := range networks {
		spec.Networks = append(spec.Networks, v1alpha1.XPUPortNetwork{
			Name: name, Addresses: []string{"10.1.0.2/24"},
		})
	}
	return spec
}

// numbered returns n names.
func numbered(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("network-%d", i))
	}
	return names
}

// parseFile returns the error of an agent that reads its pools from a file. It applies the rules of
// the CRD too, without an API server.
func parseFile(t *testing.T, devicePool *v1alpha1.DevicePool) error {
	t.Helper()
	written := devicePool.DeepCopy()
	written.TypeMeta = metav1.TypeMeta{
		APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "DevicePool",
	}
	written.ObjectMeta = metav1.ObjectMeta{Name: devicePool.Name}
	text, err := yaml.Marshal(written)
	if err != nil {
		t.Fatal(err)
	}

	_, _, err = source.Parse(text, "")
	return err
}

func wantAnswer(t *testing.T, name string, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: %v", name, err)
	case want != "" && err == nil:
		t.Errorf("%s: accepted, want an error with %q", name, want)
	case want != "" && !strings.Contains(err.Error(), want):
		t.Errorf("%s: error %q, want %q in it", name, err, want)
	}
}
