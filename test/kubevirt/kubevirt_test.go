// SPDX-License-Identifier: Apache-2.0

// Package kubevirt tests what KubeVirt reads of this project, with KubeVirt's own Go types and
// those that it reads by.
package kubevirt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"regexp"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	nad "github.com/k8snetworkplumbingwg/network-attachment-definition-client/pkg/apis/k8s.cni.cncf.io/v1"
	"github.com/k8snetworkplumbingwg/network-attachment-definition-client/pkg/utils"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	kubevirt "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceinfo"
)

const page = "../../docs/how-to/use-with-kubevirt.md"

// vf is a VF that a VM gets.
var vf = function.Function{ID: function.ID{Address: "0000:3b:02.1"}, PF: "0000:3b:00.0",
	Kind: function.VF, Driver: "vfio-pci"}

// pciAddress is what virt-launcher takes for one (pkg/util/hardware/hw_utils.go).
var pciAddress = regexp.MustCompile(`^[\da-fA-F]{4}:[\da-fA-F]{2}:[\da-fA-F]{2}\.[0-7]$`)

// TestNetworkStatus: virt-controller finds the VF in the annotation that Multus makes of the result
// and of the device-info file (pkg/network/multus/status.go, pkg/network/deviceinfo of KubeVirt).
func TestNetworkStatus(t *testing.T) {
	text, err := json.Marshal(deviceinfo.Of(vf, false))
	if err != nil {
		t.Fatal(err)
	}

	var info nad.DeviceInfo
	strict := json.NewDecoder(bytes.NewReader(text))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&info); err != nil {
		t.Fatalf("device-info %s: %v", text, err)
	}

	const name, mac = "pod37a8eec1ce1", "02:00:00:00:00:51"
	result := &types100.Result{
		CNIVersion: "1.1.0",
		Interfaces: []*types100.Interface{{Name: name, Mac: mac, Sandbox: "/run/netns/p"}},
	}

	all, err := utils.CreateNetworkStatuses(result, "default/blue-vms", false, &info)
	if err != nil || len(all) != 1 {
		t.Fatalf("network-status %v, %v, want one", all, err)
	}

	status := all[0]
	if status.Interface != name || status.Mac != mac || status.DeviceInfo == nil ||
		status.DeviceInfo.Type != nad.DeviceInfoTypePCI ||
		status.DeviceInfo.Pci == nil || !pciAddress.MatchString(status.DeviceInfo.Pci.PciAddress) {
		t.Errorf("network-status %+v lacks what KubeVirt reads: the interface, its MAC, and the "+
			"PCI address of the VF", status)
	}

	if _, err := net.ParseMAC(status.Mac); err != nil {
		t.Error(err)
	}
}

// TestMetadataPath: the file of a claim is where virt-launcher looks (pkg/dra/utils.go of KubeVirt,
// from 1.8.3 on).
func TestMetadataPath(t *testing.T) {
	const want = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/nic/vf/xpu.opiproject.org-metadata.json"
	if got := metadata.ResourceClaimTemplateFilePath("xpu.opiproject.org", "nic",
		"vf"); got != want {
		t.Errorf("the metadata file is %s, want %s", got, want)
	}
}

// TestOwnerOfPods: xpu-controller knows the pods of a virtual machine by their controller.
func TestOwnerOfPods(t *testing.T) {
	text, err := os.ReadFile("../../pkg/controller/ports/standby.go")
	if err != nil {
		t.Fatal(err)
	}

	kind := kubevirt.VirtualMachineInstanceGroupVersionKind
	if want := fmt.Sprintf("schema.GroupKind{Group: %q, Kind: %q}", kind.Group,
		kind.Kind); !strings.Contains(string(text), want) {
		t.Errorf("standby.go does not have %s", want)
	}
}

// TestManifests: KubeVirt's types have every field of the page's VMs, and what they name is on the
// page.
func TestManifests(t *testing.T) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}

	vms := 0
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").
		FindAllStringSubmatch(string(text), -1) {
		for _, document := range strings.Split(block[1], "\n---\n") {
			var vm kubevirt.VirtualMachine
			if !strings.Contains(document, "kind: VirtualMachine\n") {
				continue
			}

			vms++
			if err := yaml.Unmarshal([]byte(document), &vm); err != nil {
				t.Fatal(err)
			}

			kept, err := yaml.Marshal(vm)
			if err != nil {
				t.Fatal(err)
			}

			var before, after any
			if err := yaml.Unmarshal([]byte(document), &before); err != nil {
				t.Fatal(err)
			}
			if err := yaml.Unmarshal(kept, &after); err != nil {
				t.Fatal(err)
			}
			if lost := lost("", before, after); len(lost) > 0 {
				t.Errorf("VirtualMachine %s: KubeVirt has no fields %v", vm.Name, lost)
			}

			named(t, string(text), vm)
		}
	}

	if vms < 2 {
		t.Errorf("the page has %d VirtualMachines, want one for each way", vms)
	}
}

// named checks that what a VM names is on the page too.
func named(t *testing.T, page string, vm kubevirt.VirtualMachine) {
	t.Helper()
	spec := vm.Spec.Template.Spec
	networks := map[string]kubevirt.Network{}
	for _, n := range spec.Networks {
		networks[n.Name] = n
	}

	for _, i := range spec.Domain.Devices.Interfaces {
		network, ok := networks[i.Name]
		if !ok {
			t.Errorf("VirtualMachine %s: interface %s has no network of its name", vm.Name, i.Name)
		}
		if network.Multus != nil && !strings.Contains(page, "name: "+network.Multus.NetworkName) {
			t.Errorf("VirtualMachine %s: NetworkAttachmentDefinition %s is not on the page",
				vm.Name, network.Multus.NetworkName)
		}
	}

	for _, c := range spec.ResourceClaims {
		if c.ResourceClaimTemplateName != nil &&
			!strings.Contains(page, "name: "+*c.ResourceClaimTemplateName) {
			t.Errorf("VirtualMachine %s: ResourceClaimTemplate %s is not on the page", vm.Name,
				*c.ResourceClaimTemplateName)
		}
	}
}

// lost are the paths of fields that are in one tree and not in the other.
func lost(path string, before, after any) (paths []string) {
	switch before := before.(type) {
	case map[string]any:
		there, _ := after.(map[string]any)
		for key, value := range before {
			kept, ok := there[key]
			if !ok && fmt.Sprint(value) != "map[]" {
				paths = append(paths, path+"."+key)
				continue
			}
			paths = append(paths, lost(path+"."+key, value, kept)...)
		}
	case []any:
		there, _ := after.([]any)
		if len(there) != len(before) {
			return []string{path}
		}
		for i, value := range before {
			paths = append(paths, lost(fmt.Sprintf("%s[%d]", path, i), value, there[i])...)
		}
	}
	return paths
}
