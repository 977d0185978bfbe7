// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate/view"
)

// unknown is the condition of a Function of which objects of the cluster do not say who has it.
// Only the node's agent knows. The other conditions are those of package view.
const unknown = "unknown"

// legend returns the symbols of Functions.
func legend() []view.Symbol {
	return append(view.Legend(), view.Symbol{Condition: unknown, Text: "only the agent knows",
		Shape: "m1 4a3 3 0 1 0 6 0a3 3 0 1 0-6 0z"})
}

// onNode is what objects of the cluster say about a Function.
type onNode struct {
	condition string
	pf        pci.Address // "" if they do not say it
}

// known has the Functions that objects of the cluster name, by node.
type known map[string]map[function.ID]onNode

func (k known) set(node string, id function.ID, f onNode) {
	if k[node] == nil {
		k[node] = map[function.ID]onNode{}
	}
	k[node][id] = onNode{f.condition, cmp.Or(f.pf, k[node][id].pf)}
}

// knownFunctions combines devices of ResourceSlices, allocated devices of claims, and XPUPorts.
// What a pod has is shown as such even if something is wrong with it, as in pictures.
func knownFunctions(
	slices []resourceapi.ResourceSlice, claims []resourceapi.ResourceClaim, ports []v1alpha1.XPUPort,
) known {
	k := known{}
	for i := range slices {
		k.addSlice(&slices[i])
	}

	for i := range claims {
		devices, err := claim.Devices(&claims[i])
		if err != nil {
			continue // the claim's pod says so
		}
		for _, d := range devices {
			if !d.Admin && d.Function != (function.ID{}) {
				k.set(d.ID.Node, d.Function, onNode{"used", d.ID.PF})
			}
		}
	}

	for i := range ports {
		port := &ports[i]
		f := onNode{condition: "used"}
		switch {
		case port.Spec.Ahead:
			continue
		case port.DeletionTimestamp != nil:
			f.condition = "releasing"
		}
		k.set(port.Spec.NodeName, claim.FunctionOf(port.Spec.Function), f)
	}
	return k
}

// addSlice adds devices.
func (k known) addSlice(slice *resourceapi.ResourceSlice) {
	pool, err := claim.ParsePoolID(slice.Spec.Pool.Name)
	if err != nil {
		return
	}

	for i := range slice.Spec.Devices {
		device := &slice.Spec.Devices[i]
		if id, err := function.ParseDeviceName(device.Name); err == nil {
			k.set(pool.Node, id, onNode{conditionOf(device), pool.PF})
		}
	}
}

// conditionOf returns the condition of a device that no claim has.
func conditionOf(device *resourceapi.Device) string {
	condition := "free"
	for _, taint := range device.Taints {
		switch {
		case taint.Key == v1alpha1.TaintReleasePending:
			return "releasing"
		case taint.Effect == resourceapi.DeviceTaintEffectNoSchedule,
			taint.Effect == resourceapi.DeviceTaintEffectNoExecute:
			condition = "troubled"
		}
	}
	return condition
}

// PF is a PF of a node, with the conditions of its Functions.
type PF struct {
	Title  string `json:"title"`
	Detail string `json:"detail,omitempty"`
	// Functions are runs of Functions with the same condition, such as "free 12" and "used 1": the
	// VFs by index, and then the PF itself and its SFs if a pool has them.
	Functions []string `json:"functions"`
}

// pfsOf returns the PFs of a node. Functions whose PF the node does not report come last.
func (k known) pfsOf(node *v1alpha1.XPUNode) []PF {
	rest := map[function.ID]onNode{}
	for id, f := range k[node.Name] {
		rest[id] = f
	}

	var pfs []PF
	for i := range node.Status.PFs {
		pf := &node.Status.PFs[i]
		detail := fmt.Sprintf("%d VFs", pf.VFs)
		if pf.TotalVFs > 0 {
			detail = fmt.Sprintf("%d of %d VFs", pf.VFs, pf.TotalVFs)
		}

		pfs = append(pfs, PF{Functions: runs(takeFunctions(pf, rest)), Detail: detail,
			Title: strings.Join(withoutEmpty(pf.Address+" PF", pf.Name,
				cmp.Or(pf.Driver, "no driver")), ", ")})
	}

	return append(pfs, byPF(rest)...)
}

// byPF returns PFs of which only Functions are known.
func byPF(functions map[function.ID]onNode) (pfs []PF) {
	grouped := map[pci.Address]map[function.ID]onNode{}
	for id, f := range functions {
		if grouped[f.pf] == nil {
			grouped[f.pf] = map[function.ID]onNode{}
		}
		grouped[f.pf][id] = f
	}

	for _, pf := range slices.Sorted(maps.Keys(grouped)) {
		title := string(pf) + " PF"
		if pf == "" {
			title = "PF not known"
		}
		pfs = append(pfs, PF{Title: title, Functions: runs(sortedConditions(grouped[pf]))})
	}
	return pfs
}

// takeFunctions takes the PF's Functions from those of the node, and returns their conditions.
func takeFunctions(pf *v1alpha1.XPUNodePF, from map[function.ID]onNode) []string {
	address := pci.Address(pf.Address)
	vfs := slices.Repeat([]string{unknown}, int(min(max(pf.VFs, 0), mostVFs)))
	others := map[function.ID]onNode{}
	for id, f := range from {
		index, _, isVF := pci.VFIndex(address, id.Address, int(pf.VFOffset), int(pf.VFStride))
		switch {
		case id.Address == address:
			others[id] = f
		case isVF && index < len(vfs):
			vfs[index] = f.condition
		case f.pf == address && len(vfs) == 0:
			others[id] = f
		default:
			continue
		}
		delete(from, id)
	}
	return append(vfs, sortedConditions(others)...)
}

// mostVFs is how many VFs a PF can have: TotalVFs has 16 bits (PCI Express 6.0, section 9.3.3.5).
const mostVFs = 1<<16 - 1

// sortedConditions returns the conditions of Functions in the order of their addresses.
func sortedConditions(functions map[function.ID]onNode) []string {
	ids := slices.SortedFunc(maps.Keys(functions), func(a, b function.ID) int {
		return strings.Compare(a.String(), b.String())
	})

	var out []string
	for _, id := range ids {
		out = append(out, functions[id].condition)
	}
	return out
}

// runs shortens a list of conditions, because a cluster has tens of thousands of Functions.
func runs(conditions []string) []string {
	out := []string{}
	for i := 0; i < len(conditions); {
		n := i
		for n < len(conditions) && conditions[n] == conditions[i] {
			n++
		}
		out = append(out, fmt.Sprintf("%s %d", conditions[i], n-i))
		i = n
	}
	return out
}

// count returns how many Functions have a condition.
func count(pfs []PF, condition string) (n int) {
	for _, pf := range pfs {
		for _, run := range pf.Functions {
			if digits, is := strings.CutPrefix(run, condition+" "); is {
				length, _ := strconv.Atoi(digits)
				n += length
			}
		}
	}
	return n
}

func withoutEmpty(parts ...string) []string {
	return slices.DeleteFunc(parts, func(s string) bool { return s == "" })
}
