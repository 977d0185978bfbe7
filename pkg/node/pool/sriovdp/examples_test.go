// SPDX-License-Identifier: Apache-2.0

package sriovdp

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// resources assigns the node's Functions to the pools of a configuration, and returns them by
// resource.
func resources(t *testing.T, all []function.Function, config string) map[string]string {
	t.Helper()
	devicePools, _, err := Convert([]byte(config), DefaultPrefix)
	if err != nil {
		t.Fatal(err)
	}

	got := map[string]string{}
	for _, p := range pool.Assign(all, devicePools, nil, nil) {
		if p.Err != nil {
			t.Error(p.Err)
		}
		var ids []string
		for _, f := range p.Functions {
			ids = append(ids, f.ID.String())
		}
		got[p.ResourceName()] = strings.Join(ids, " ")
	}

	// A pool without devices has no server, and so no resource.
	maps.DeleteFunc(got, func(_, devices string) bool { return devices == "" })
	return got
}

// TestExamples has configurations with the features that sriov-network-device-plugin documents, and
// the resources that it makes of the node. They were derived from its rules, not from this package.
func TestExamples(t *testing.T) {
	all := functions(t)
	for _, tt := range []struct {
		name   string
		config string
		want   map[string]string
	}{
		{
			// Like deployments/configMap.yaml: by vendor, device and driver. Devices of a virtual
			// machine are no VFs, so that they have no PF name. mlx5_ib is never bound to a PCI
			// device.
			"by driver", `{"resourceList": [
				{"resourceName": "kernel_nics", "selectors": {"vendors": ["8086"], "devices": ["154c", "1889"], "drivers": ["iavf", "ixgbevf"]}},
				{"resourceName": "user_nics", "selectors": {"vendors": ["8086"], "devices": ["154c", "1889"], "drivers": ["vfio-pci"],
					"pfNames": ["enp0s0f0", "enp2s2f1"]}},
				{"resourceName": "fast_rdma", "selectors": {"vendors": ["15b3"], "devices": ["1018"], "drivers": ["mlx5_ib"], "isRdma": true}},
				{"resourceName": "bnxt", "selectors": {"vendors": ["14e4"], "devices": ["1750"], "drivers": ["bnxt_en"]}}]}`,
			map[string]string{
				"intel.com/kernel_nics": "0000:00:09.0 0000:18:02.0 0000:3b:01.0 0000:3b:01.1 " +
					"0000:3b:01.3 0000:3b:11.0 0000:3b:11.1",
				"intel.com/user_nics": "0000:18:02.1 0000:18:02.2",
				"intel.com/bnxt":      "0000:86:02.0",
			},
		},
		{
			// Like docs/config-file: for one node, written by a program, with keys in other cases.
			"ranges",
			`{"resourceList":[{"resourceName":"nics","selectors":{"pfNames":["ens785f0#0-1","ENS785F1#1-9"],"IsRdma":false,
				"NeedVhostNet":false},"SelectorObj":null}]}`,
			map[string]string{"intel.com/nics": "0000:3b:01.0 0000:3b:01.1 0000:3b:11.1"},
		},
		{
			// Like docs/ddp/e800.
			"packages of E800", `{"resourceList": [
				{"resourceName": "plain", "resourcePrefix": "example.com",
					"selectors": [{"vendors": ["8086"], "devices": ["1889"], "ddpProfiles": ["ICE OS Default Package"]}]},
				{"resourceName": "comms", "resourcePrefix": "example.com",
					"selectors": [{"vendors": ["8086"], "devices": ["1889"], "ddpProfiles": ["ICE COMMS Package"]}]}]}`,
			map[string]string{
				"example.com/plain": "0000:3b:01.0 0000:3b:01.1 0000:3b:01.2 0000:3b:01.3",
				"example.com/comms": "0000:3b:11.0 0000:3b:11.1",
			},
		},
		{
			// Like docs/ddp/x700, on a node where ddptool, which only X700 cards need, finds no
			// loaded profile.
			"packages of X700", `{"resourceList": [
				{"resourceName": "gtp", "selectors": [{"vendors": ["8086"], "devices": ["154c"], "ddpProfiles": ["GTPv1-C/U IPv4/IPv6 payload"]}]}]}`,
			map[string]string{},
		},
		{
			// Like docs/dpdk/configMap-all-nics.yaml: one resource of several kinds.
			"all NICs",
			`{"resourceList": [{"resourcePrefix": "example.org", "resourceName": "any", "selectors": [
				{"vendors": ["15b3"], "devices": ["1016"], "drivers": ["mlx5_core"], "isRdma": true},
				{"vendors": ["15b3"], "devices": ["1018"], "drivers": ["mlx5_core"], "isRdma": true},
				{"vendors": ["8086"], "devices": ["154c"], "drivers": ["vfio-pci"]}]}]}`,
			map[string]string{"example.org/any": "0000:00:07.0 0000:00:08.0 0000:00:0a.0 " +
				"0000:18:02.1 0000:18:02.2 0000:5e:00.2 0000:5f:00.2 0000:5f:00.3"},
		},
		{
			// Like docs/dpdk/configMap-virt.yaml, without the commas that make it invalid JSON.
			"virtual machine", `{"resourceList": [
				{"resourceName": "radio_down", "selectors": [{"drivers": ["vfio-pci"], "pciAddresses": ["0000:00:09.0", "0000:00:0a.0"]}]},
				{"resourceName": "radio_up", "selectors": [{"drivers": ["vfio-pci"], "pciAddresses": ["0000:00:07.0", "0000:00:08.0"]}]}]}`,
			map[string]string{
				"intel.com/radio_down": "0000:00:0a.0",
				"intel.com/radio_up":   "0000:00:07.0 0000:00:08.0",
			},
		},
		{
			// Like docs/dpdk/configMap.yaml.
			"DPDK",
			`{"resourceList": [{"resourceName": "x710", "selectors": [{"vendors": ["8086"], "devices": ["154c"], "drivers": ["vfio-pci"]}]}]}`,
			map[string]string{"intel.com/x710": "0000:00:07.0 0000:00:08.0 0000:00:0a.0 " +
				"0000:18:02.1 0000:18:02.2"},
		},
		{
			// Like docs/dpdk/mlnx-dpdk and docs/rdma. An RDMA device in a pod counts.
			"RDMA", `{"resourceList": [
				{"resourcePrefix": "example.com", "resourceName": "cx4", "selectors": {"vendors": ["15b3"], "devices": ["1016"], "drivers": ["mlx5_core"], "isRdma": true}},
				{"resourcePrefix": "example.com", "resourceName": "cx45", "selectors": [{"vendors": ["15b3"], "devices": ["1016", "1018"], "drivers": ["mlx5_core"], "isRdma": true}]},
				{"resourceName": "e810", "selectors": {"vendors": ["8086"], "devices": ["1889"], "drivers": ["iavf"], "isRdma": true}}]}`,
			map[string]string{
				"example.com/cx4": "0000:5e:00.2", "example.com/cx45": "0000:5f:00.2 0000:5f:00.3",
				"intel.com/e810": "0000:3b:01.0 0000:3b:01.1",
			},
		},
		{
			// Like docs/vdpa, without the brace that makes it invalid JSON.
			"vDPA", `{"resourceList": [
				{"resourceName": "by_virtio", "selectors": [{"vendors": ["15b3"], "devices": ["101e"], "drivers": ["mlx5_core"], "vdpaType": "virtio"}]},
				{"resourceName": "by_vhost", "selectors": [{"vendors": ["15b3"], "devices": ["101e"], "drivers": ["mlx5_core"], "vdpaType": "vhost"}]}]}`,
			map[string]string{
				"intel.com/by_virtio": "0000:af:00.2", "intel.com/by_vhost": "0000:af:00.3",
			},
		},
		{
			// Like docs/subfunctions. An SF has the ids and the driver of its PF.
			"subfunctions", `{"resourceList": [
				{"resourceName": "bf2_sf", "resourcePrefix": "example.com", "deviceType": "auxNetDevice",
					"selectors": [{"vendors": ["15b3"], "devices": ["a2d6"], "drivers": ["mlx5_core"], "pfNames": ["p0#1-5"], "auxTypes": ["sf"]}]},
				{"resourceName": "cx6_vf", "resourcePrefix": "example.com", "selectors": [{"vendors": ["15b3"], "devices": ["101e"]}]},
				{"resourceName": "cx6_sf", "resourcePrefix": "example.com", "deviceType": "auxNetDevice",
					"selectors": [{"vendors": ["15b3"], "devices": ["101d"], "auxTypes": ["sf"], "isRdma": true}]}]}`,
			map[string]string{
				"example.com/bf2_sf": "0000:03:00.0/sf1 0000:03:00.0/sf5",
				"example.com/cx6_vf": "0000:af:00.2 0000:af:00.3 0000:af:00.4",
				"example.com/cx6_sf": "0000:af:00.0/sf8",
			},
		},
		{
			// Like the README: everything at once, so that a Function of one pool is missing in the
			// pools below it.
			"everything", `{"resourceList": [
				{"resourceName": "nics", "selectors": [{"vendors": ["8086"], "devices": ["154c", "1889"], "drivers": ["iavf"]}]},
				{"resourceName": "dpdk", "selectors": [{"vendors": ["8086"], "devices": ["154c", "1889"], "drivers": ["vfio-pci"],
					"pfNames": ["enp0s0f0#1", "ens785f0"], "needVhostNet": true}]},
				{"resourceName": "infiniband", "selectors": [{"linkTypes": ["infiniband"], "isRdma": true}]},
				{"resourceName": "vhost", "selectors": [{"vendors": ["15b3"], "devices": ["101e"], "vdpaType": "vhost"}]},
				{"resourceName": "fpga", "deviceType": "accelerator", "selectors": [{"vendors": ["8086"], "devices": ["0d90"]}]},
				{"resourceName": "token", "selectors": [{"vendors": ["8086"], "devices": ["154c"]}], "additionalInfo": {"*": {"token": "1"}}},
				{"resourceName": "rest", "selectors": {"linkTypes": ["ether"]}}]}`,
			map[string]string{
				"intel.com/nics": "0000:00:09.0 0000:18:02.0 0000:3b:01.0 0000:3b:01.1 " +
					"0000:3b:01.3 0000:3b:11.0 0000:3b:11.1",
				"intel.com/dpdk":       "0000:18:02.1 0000:3b:01.2",
				"intel.com/infiniband": "0000:d8:00.1 0000:d8:00.2 0000:d8:00.3",
				"intel.com/vhost":      "0000:af:00.3",
				"intel.com/fpga":       "0000:65:00.0",
				"intel.com/token":      "0000:00:07.0 0000:00:08.0 0000:00:0a.0 0000:18:02.2",
				// p0 has SFs but no VFs, and eno1 is used by the node.
				"intel.com/rest": "0000:03:00.0 0000:19:00.1 0000:5e:00.2 0000:5e:00.3 " +
					"0000:5f:00.2 0000:5f:00.3 0000:86:02.0 0000:af:00.2 0000:af:00.4",
			},
		},
		{
			"root devices, firmware numbers and partition keys", `{"resourceList": [
				{"resourceName": "roots", "selectors": [{"rootDevices": ["0000:3B:00.0#0,2-3", "0000:86:00.0"]}]},
				{"resourceName": "firmware", "selectors": [{"acpiIndexes": ["1", "2"]}]},
				{"resourceName": "keys", "selectors": [{"pKeys": ["0x8050", "0x7FFF"]}]}]}`,
			map[string]string{
				"intel.com/roots":    "0000:3b:01.0 0000:3b:01.2 0000:3b:01.3 0000:86:02.0",
				"intel.com/firmware": "0000:19:00.1", "intel.com/keys": "0000:d8:00.2",
			},
		},
		{
			// A PF never matches its own name. Pools without devices are no resources.
			"quirks", `{"resourceList": [
				{"resourceName": "pf", "selectors": [{"pfNames": ["eno2"]}]},
				{"resourceName": "first-entry", "selectors": [{"pfNames": ["ens785f0#3", "ens785f0#0"]}]},
				{"resourceName": "until-wrong", "selectors": [{"pfNames": ["enp94s0f0#1,x,0"]}]},
				{"resourceName": "wrong", "selectors": [{"pfNames": ["enp175s0f0#0-1-2"]}, {"vendors": ["15B3"]}, {"vdpaType": "other"}]}]}`,
			map[string]string{
				"intel.com/first-entry": "0000:3b:01.3", "intel.com/until-wrong": "0000:5e:00.3",
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := resources(t, all, tt.config)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
		})
	}
}

// TestOptions: the first selector that matches determines the options of a device.
func TestOptions(t *testing.T) {
	devicePools, _, err := Convert([]byte(`{"resourceList": [{"resourceName": "r", "selectors": [
		{"devices": ["1016", "1018"], "isRdma": true}, {"devices": ["1016"]}, {"devices": ["101e"], "vdpaType": "vhost"}, {"devices": ["101e"]}]}]}`), DefaultPrefix)
	if err != nil {
		t.Fatal(err)
	}

	p := pool.Assign(functions(t), devicePools, nil, nil)[0]
	got := map[string]pool.Options{}
	for _, f := range p.Functions {
		got[f.ID.String()] = p.Options(f)
	}

	want := map[string]pool.Options{
		"0000:5e:00.2": {RDMA: true}, "0000:5e:00.3": {}, "0000:5f:00.2": {RDMA: true},
		"0000:5f:00.3": {RDMA: true},
		"0000:af:00.2": {}, "0000:af:00.3": {VDPA: "vhost"}, "0000:af:00.4": {},
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("options (-want +got):\n%s", diff)
	}

	if !slices.IsSortedFunc(p.Functions, func(a, b function.Function) int {
		return strings.Compare(a.ID.String(), b.ID.String())
	}) {
		t.Error("Functions are not in the order of the inventory")
	}
}
