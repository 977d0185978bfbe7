// SPDX-License-Identifier: Apache-2.0

package view

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

var update = flag.Bool("update", false, "rewrite the files that the output is compared with")

// host returns a card of two PFs, one of them with VFs in every condition, and a plain card that
// the node itself uses.
func host() *nodestate.State {
	at := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	pf := func(address pci.Address, name string) nodestate.Function {
		return nodestate.Function{
			ID: function.ID{Address: address}, Kind: function.PF, Class: function.Network,
			PF: address, PFName: name, Index: -1, Vendor: "15b3",
			Device: "a2dc", Driver: "mlx5_core", NUMANode: 1, PCIeRoot: "pci0000:3a", Netdev: name,
			LinkUp: true,
		}
	}

	first := pf("0000:3b:00.0", "enp59s0f0")
	first.Serial, first.Board, first.NumVFs, first.TotalVFs = "MT2334XZ0LTK", "MT_0000000884", 12, 16
	first.AltNames = []string{"enp59s0f0np0", "rail0"}
	first.VendorName = "Mellanox Technologies"
	first.DeviceName = "MT43244 BlueField-3 integrated ConnectX-7 network controller"
	second := pf("0000:3b:00.1", "enp59s0f1")
	second.LinkUp, second.TotalVFs = false, 16
	own := pf("0000:01:00.0", "eno1")
	own.Vendor, own.Device, own.Driver, own.DefaultRoute, own.NUMANode, own.PCIeRoot = "8086", "1521", "igb", true, 0, "pci0000:00"
	state := &nodestate.State{
		Node: "node1", Agent: "v0.9.0", Time: at, Functions: []nodestate.Function{
			own, first, second,
		},
	}

	for i := range 12 {
		state.Functions = append(state.Functions, nodestate.Function{
			ID:   function.ID{Address: pci.Address(fmt.Sprintf("0000:3b:%02x.%d", 1+i/8, i%8))},
			Kind: function.VF, Class: function.Network,
			PF: first.PF, PFName: first.PFName, Index: i, Vendor: "15b3", Device: "101e",
			Driver: "mlx5_core", NUMANode: 1,
			Netdev: fmt.Sprintf("enp59s0f0v%d", i), Pool: "fast", Publish: "DRA",
		})
	}

	vf := state.Functions[3:]
	pod := nodestate.Pod{Namespace: "default", Name: "web"}
	vf[0].Netdev, vf[0].Attachment = "", &nodestate.Attachment{
		State: "Attached", Pod: pod,
		Claim:     nodestate.Claim{Namespace: "default", Name: "web-nic", Request: "nic"},
		Interface: nodestate.Interface{Name: "net1"}, AttachedAt: at,
	}

	vf[1].Attachment = &nodestate.Attachment{
		State: "Releasing", Pod: nodestate.Pod{Namespace: "default", Name: "old"},
		Resource: "xpu.opiproject.org/fast", RestoredAt: at,
		Hook: &nodestate.Hook{Name: "port", Attempts: 3, Error: "XPU xpu-1 is away"},
	}

	vf[2].Problems = []nodestate.Problem{
		{Taint: "xpu.opiproject.org/fault", Message: "reporter fw: error <b>7</b>"},
	}
	vf[11].Pool, vf[11].Driver, vf[11].Netdev = "", "", ""
	sf := vf[11]
	sf.ID, sf.Kind, sf.Index, sf.Potential, sf.Pool = function.SubfunctionID("0000:3b:00.0",
		88), function.SF, 88, true, "sfs"
	gone := vf[0]
	gone.ID, gone.Index, gone.Gone = function.ID{Address: "0000:3b:03.0"}, 16, true
	state.Functions = append(state.Functions, sf, gone)

	return state
}

// connectX8 returns a card with a second way to memory.
func connectX8() *nodestate.State {
	state := host()
	state.Functions = state.Functions[1:2]
	state.Functions[0].DataDirectRoots = []string{"pci0008:00"}
	return state
}

func TestTree(t *testing.T) {
	for name, state := range map[string]*nodestate.State{
		"host": host(), "nothing": {Time: time.Unix(0, 0)}, "data-direct": connectX8(),
	} {
		for _, all := range []bool{false, true} {
			var out bytes.Buffer
			if err := Tree(&out, state, TreeOptions{All: all}); err != nil {
				t.Fatal(err)
			}

			file := name + ".txt"
			if all {
				file = name + "-all.txt"
			}
			compare(t, file, out.Bytes())
		}
	}
}

func TestPaint(t *testing.T) {
	var out bytes.Buffer
	err := Tree(&out, host(), TreeOptions{Paint: func(c, text string) string {
		return "[" + c +
			":" + text + "]"
	}})

	for _, want := range []string{
		"[free:free]", "[used:Attached net1", "[releasing:Releasing", "[troubled:reporter fw",
	} {
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v: the tree lacks %s:\n%s", err, want, &out)
		}
	}
}

// TestPictures checks that pictures are well-formed, show every Function, and escape texts of
// devices.
func TestPictures(t *testing.T) {
	state := host()
	for name, write := range map[string]func(io.Writer, *nodestate.State) error{
		"host.svg": SVG, "host.html": HTML,
	} {
		var out bytes.Buffer
		if err := write(&out, state); err != nil {
			t.Fatal(err)
		}

		compare(t, name, out.Bytes())
		decoder := xml.NewDecoder(bytes.NewReader(out.Bytes()))
		decoder.Entity, decoder.Strict, decoder.AutoClose = xml.HTMLEntity, name == "host.svg", xml.HTMLAutoClose
		for {
			if _, err := decoder.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}

		for _, f := range state.Functions {
			if !strings.Contains(out.String(), f.ID.String()) {
				t.Errorf("%s lacks %s", name, f.ID)
			}
		}

		if strings.Contains(out.String(), "<b>") {
			t.Errorf("%s has markup of a device", name)
		}
	}
}

// TestNode checks that a node for other programs is the one of the pictures.
func TestNode(t *testing.T) {
	text, err := json.MarshalIndent(NewNode(host()), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "host.json", append(text, '\n'))
}

// TestShapes checks that each condition has a shape, and that no two look the same without colours.
func TestShapes(t *testing.T) {
	seen := map[string]string{}
	for _, symbol := range Legend() {
		other := seen[symbol.Shape]
		isFilled := symbol.Condition == string(used) && other == string(free)
		if symbol.Shape == "" || other != "" && !isFilled {
			t.Errorf("%s looks like %q", symbol.Condition, other)
		}
		seen[symbol.Shape] = symbol.Condition
	}
}

func compare(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}

	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}
