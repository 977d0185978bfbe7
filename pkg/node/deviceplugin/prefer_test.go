// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// vf returns the VF with the index of the PF "0000:<bus>:00.0". The PFs on the buses 3b and 3c
// share a PCIe root and NUMA node 0. 5e is on NUMA node 0 too. af and b0 share a root and NUMA node
// 1.
func vf(bus string, index int) function.Function {
	f := function.Function{
		ID: function.ID{
			Address: pci.Address(fmt.Sprintf("0000:%s:%02x.%d", bus, (index+2)/8, (index+2)%8)),
		},
		Kind: function.VF, PF: pci.Address("0000:" + bus + ":00.0"), PFName: "pf" +
			bus, Index: index, LinkUp: true,
		PCIeRoot: "pci0000:3a",
	}

	switch bus {
	case "5e":
		f.PCIeRoot = "pci0000:5d"
	case "af", "b0":
		f.PCIeRoot, f.NUMANode = "pci0000:ae", 1
	}

	return f
}

// vfs parses "3b:0-3 5e:0".
func vfs(text string) []function.Function {
	var functions []function.Function
	for _, field := range strings.Fields(text) {
		bus, indexes, _ := strings.Cut(field, ":")
		var low, high int
		if n, _ := fmt.Sscanf(indexes, "%d-%d", &low, &high); n == 1 {
			high = low
		}
		for i := low; i <= high; i++ {
			functions = append(functions, vf(bus, i))
		}
	}

	return functions
}

// deviceIDs returns the Functions' IDs for the kubelet.
func deviceIDs(functions []function.Function) []string {
	var ids []string
	for _, f := range functions {
		ids = append(ids, f.ID.String())
	}
	return ids
}

// words formats device IDs as "3b:0 3b:1 5e:0".
func (o *offer) words(ids []string) string {
	var out []string
	for _, id := range ids {
		f := o.functions[id]
		out = append(out, fmt.Sprintf("%s:%d", strings.Split(string(f.PF), ":")[1], f.Index))
	}
	return strings.Join(out, " ")
}

func TestPrefer(t *testing.T) {
	const pack, spread = v1alpha1.PreferPack, v1alpha1.PreferSpread
	for _, test := range []struct {
		name            string
		policy          v1alpha1.PreferredAllocation
		available, must string
		size            int
		want            string
		taken           string
	}{
		{"one of one PF", pack, "3b:0-3", "", 1, "3b:0", ""},
		{"the policy is pack if none is set", "", "3b:0-3 5e:0-3", "", 2, "3b:0 3b:1", ""},
		{"one comes from the PF with least to spare", pack, "3b:0-3 3c:0-1 5e:0-2",
			"", 1, "3c:0", ""},
		{"the PF with the fewest that are enough", pack, "3b:0-7 5e:0-2 af:0-1", "",
			3, "5e:0 5e:1 5e:2", ""},
		{"as few PFs as can be: the largest first, then one that fits",
			pack, "3b:0-2 5e:0-3 af:0-1", "", 5, "5e:0 5e:1 5e:2 5e:3 3b:0", ""},
		{"after the largest, the PF of the same root, though another fits more tightly", pack,
			"3b:0-4 3c:0-3 af:0-1", "", 7,
			"3b:0 3b:1 3b:2 3b:3 3b:4 3c:0 3c:1", ""},
		{"after the largest, the PF of the same NUMA node", pack, "3b:0-4 5e:0-3 af:0-1", "", 7,
			"3b:0 3b:1 3b:2 3b:3 3b:4 5e:0 5e:1", ""},
		{"the PF of what must be included", pack, "3b:0-3 5e:0-1", "3b:2", 3, "3b:2 3b:0 3b:1", ""},
		{"the root of what must be included", pack, "3c:0-3 5e:0-1", "3b:2",
			3, "3b:2 3c:0 3c:1", ""},
		{"the NUMA node of what must be included", pack, "5e:0-3 af:0-1", "3b:2",
			3, "3b:2 5e:0 5e:1", ""},
		{"a PF in use is emptied before another is begun", pack, "3b:0 5e:0-3", "3b:2",
			3, "3b:2 3b:0 5e:0", ""},
		{"what must be included is available too", pack, "3b:0-3", "3b:0", 2, "3b:0 3b:1", ""},
		{"only what must be included", pack, "3b:0-3", "3b:1 3b:3", 2, "3b:1 3b:3", ""},
		{"too few", pack, "3b:0-1", "5e:0", 5, "5e:0 3b:0 3b:1", ""},
		{"none available", pack, "", "", 2, "", ""},
		{"spread over all PFs", spread, "3b:0-3 5e:0-3 af:0-3", "", 3, "3b:0 5e:0 af:0", ""},
		{"spread: those with most first", spread, "3b:0-1 5e:0-3 af:0-2", "", 2, "5e:0 af:0", ""},
		{"spread: a second round", spread, "3b:0 5e:0-3 af:0-2", "", 5,
			"5e:0 af:0 3b:0 5e:1 af:1", ""},
		{"spread: away from what must be included", spread, "3b:0-3 5e:0", "3b:3",
			2, "3b:3 5e:0", ""},
		{"spread: too few", spread, "3b:0 5e:0", "", 3, "3b:0 5e:0", ""},
		{"not what a pod still has", pack, "3b:0-3", "", 2, "3b:1 3b:3", "3b:0 3b:2"},
		{"another PF before what a pod still has", pack, "3b:0-1 5e:0-3",
			"", 2, "5e:0 5e:1", "3b:0"},
		{"spread: what a pod still has last", spread, "3b:0-1 5e:0", "",
			3, "3b:1 5e:0 3b:0", "3b:0"},
		{"what a pod still has, if there is nothing else", pack, "3b:0-1", "", 2,
			"3b:0 3b:1", "3b:0-1"},
		{"what the container has already", pack, "3b:0-3", "3b:0", 2, "3b:0 3b:1", "3b:0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			available, must := deviceIDs(vfs(test.available)), deviceIDs(vfs(test.must))
			p := poolOf("fast", append(vfs(test.available), vfs(test.must)...)...)
			p.Spec.DevicePlugin.PreferredAllocation = test.policy
			o := newOffer(p, (&node{}).Problems)
			taken := deviceIDs(vfs(test.taken))
			isTaken := func(id function.ID) bool { return slices.Contains(taken, id.String()) }
			for range 5 { // the kubelet's list has no order
				got := o.words(o.prefer(available, must, test.size, isTaken))
				if got != test.want {
					t.Errorf("prefer = %q, want %q", got, test.want)
				}
				rand.Shuffle(len(available), func(i, j int) {
					available[i], available[j] = available[j], available[i]
				})
			}
		})
	}
}
