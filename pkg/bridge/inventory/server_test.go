// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

func get(t *testing.T, s *Server) (*inventory.Inventory, error) {
	t.Helper()
	return s.GetInventory(t.Context(), &inventory.GetInventoryRequest{})
}

func TestInventory(t *testing.T) {
	t.Run("nothing there", func(t *testing.T) {
		inv, err := get(t, &Server{root: t.TempDir(), ports: noPorts})
		if err != nil || len(inv.Pci) != 0 {
			t.Errorf("got %v, %v", inv, err)
		}
	})

	t.Run("this machine", func(t *testing.T) {
		inv, err := get(t, NewServer(nil))
		if err != nil || inv.Processor.TotalThreads < 1 || inv.Memory.TotalUsableBytes < 1<<20 {
			t.Errorf("got %v, %v", inv, err)
		}
	})

	t.Run("an xPU", func(t *testing.T) {
		root := t.TempDir()
		files := map[string]string{
			"sys/class/dmi/id/product_name":                "BlueField SoC\n",
			"sys/firmware/devicetree/base/serial-number":   "MT0001\x00",
			"sys/devices/system/cpu/cpu0/topology/core_id": "0\n",
			"sys/devices/system/cpu/cpu1/topology/core_id": "0\n",
			"sys/class/dmi/id/chassis_type":                "17\n",
			"sys/devices/system/memory/block_size_bytes":   "8000000\n",
			"sys/devices/system/memory/memory0/online":     "1\n",
			"sys/devices/system/memory/memory32/online":    "1\n",
			"sys/bus/pci/devices/0000:03:00.0/vendor":      "0x15b3\n",
			"sys/bus/pci/devices/0000:03:00.0/device":      "0xa2d6\n",
			"sys/bus/pci/devices/0000:03:00.0/class":       "0x020000\n",
			"proc/meminfo": "MemTotal:       1024 " +
				"kB\nMemFree: 1 kB\n",
			"sys/bus/pci/drivers/mlx5_core/module_is_not_needed": "",
		}

		for name, data := range files {
			path := filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}

		if err := os.Symlink("../../drivers/mlx5_core",
			filepath.Join(root, "sys/bus/pci/devices/0000:03:00.0/driver")); err != nil {
			t.Fatal(err)
		}

		inv, err := get(t, &Server{root: root, ports: noPorts})
		if err != nil {
			t.Fatal(err)
		}

		want := &inventory.Inventory{
			Bios: &inventory.BIOSInfo{}, Baseboard: &inventory.BaseboardInfo{},
			Chassis: &inventory.ChassisInfo{
				Type: "17", TypeDescription: "Main Server Chassis",
			},
			System:    &inventory.SystemInfo{Name: "BlueField SoC", SerialNumber: "MT0001"},
			Processor: &inventory.CPUInfo{TotalCores: 1, TotalThreads: 2},
			Memory: &inventory.MemoryInfo{
				TotalPhysicalBytes: 256 << 20, TotalUsableBytes: 1 << 20,
			},
			Pci: []*inventory.PCIeDeviceInfo{
				{Address: "0000:03:00.0", Vendor: "0x15b3", Product: "0xa2d6", Class: "0x02",
					Subclass: "0x00", Driver: "mlx5_core"},
			},
		}

		if diff := cmp.Diff(want, inv, protocmp.Transform()); diff != "" {
			t.Errorf("inventory (-want +got):\n%s", diff)
		}
	})
}

func noPorts() ([]devlink.Port, error) { return nil, devlink.ErrNoDevlink }

// TestHostPFs checks how the inventory of a DPU describes the PFs of its host.
func TestHostPFs(t *testing.T) {
	eswitch := func(address string, ports ...devlink.Port) []devlink.Port {
		for i := range ports {
			ports[i].Device = devlink.OfPCI(pci.Address(address))
		}
		return ports
	}

	pf := func(number uint16, mac function.MAC) devlink.Port {
		return devlink.Port{Flavour: devlink.PCIPF, External: true, Controller: 1, PF: number,
			Function: devlink.Function{MAC: mac}}
	}

	ports := append(
		eswitch("0000:03:00.1", pf(1, "02:00:00:00:00:02")),
		eswitch("0000:03:00.0", pf(0, "02:00:00:00:00:01"), devlink.Port{Flavour: devlink.Physical},
			devlink.Port{Flavour: devlink.PCIPF, PF: 7}, // belongs to the DPU
			devlink.Port{Flavour: devlink.PCIVF, External: true, Controller: 1})...,
	)

	const one, two = "host-pf c1pf0 hw_addr 02:00:00:00:00:01 serial MT0001", "host-pf c1pf1 " +
		"hw_addr 02:00:00:00:00:02 serial MT0001"
	for what, test := range map[string]struct {
		configured []string
		want       []string
	}{
		"devlink only": {want: []string{one, two}},
		"another serial": {
			[]string{"c1pf1,serial=MT 9"},
			[]string{one, "host-pf c1pf1 hw_addr 02:00:00:00:00:02 serial MT 9"},
		},
		"one more": {
			[]string{"pf3,mac=02:00:00:00:00:03"},
			[]string{one, two, "host-pf pf3 hw_addr 02:00:00:00:00:03"},
		},
		"its address is known": {[]string{"0000:3b:00.0=c1pf0,offset=2,stride=1"}, []string{two}},
	} {
		server := &Server{
			root: t.TempDir(), ports: func() ([]devlink.Port, error) { return ports, nil },
			card: func(string, pci.Address) (function.Card, error) {
				return function.Card{Serial: "MT0001"}, nil
			},
		}

		for _, text := range test.configured {
			pf, err := representor.ParseHostPF(text)
			if err != nil {
				t.Fatal(err)
			}
			server.hostPFs = append(server.hostPFs, pf)
		}

		inv, err := get(t, server)
		var got []string
		for _, device := range inv.GetPci() {
			got = append(got, device.Subsystem)
		}
		if diff := cmp.Diff(test.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", what, err, diff)
		}
	}

	for _, server := range []*Server{
		{
			ports: func() ([]devlink.Port, error) { return ports, nil },
			card: func(string, pci.Address) (function.Card, error) {
				return function.Card{},
					errors.New("busy")
			},
		},
		{ports: func() ([]devlink.Port, error) { return nil, errors.New("busy") }},
	} {
		_, err := get(t, server)
		if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "busy") {
			t.Errorf("got %v, want Internal with the reason", err)
		}
	}
}
