// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// location is the node and the PFs of an XPU's card.
type location struct {
	node, serial string
	pfs          []v1alpha1.XPUPF // sorted by address
	// reason and message of the condition Card; "" if there is nothing to say
	reason, message string
}

// cardKeys returns the index keys of an XPUNode's PFs: see keysOf.
func cardKeys(node *v1alpha1.XPUNode) []string {
	keys := sets.New[string]()
	for _, pf := range node.Status.PFs {
		keys.Insert(keyOfMAC(pf.MAC), keyOfSerial(pf.Serial))
	}
	return keys.Delete("").UnsortedList()
}

// keysOf returns the index keys of a PF that an agent reports.
func keysOf(pf opi.HostPF) []string {
	return sets.New(keyOfMAC(string(pf.MAC)), keyOfSerial(pf.Serial)).Delete("").UnsortedList()
}

func keyOfMAC(mac string) string       { return keyOf("mac ", mac) }
func keyOfSerial(serial string) string { return keyOf("serial ", serial) }

func keyOf(kind, value string) string {
	if value == "" {
		return ""
	}
	return kind + value
}

// locate joins the PFs that an agent reports with the nodes that have PFs with the same keys.
func locate(xpu *v1alpha1.XPU, reported []opi.HostPF, nodes []v1alpha1.XPUNode) location {
	if len(reported) == 0 {
		return unreported(xpu)
	}

	byNode := map[string][]v1alpha1.XPUPF{}
	for i := range nodes {
		if pfs := join(reported, nodes[i].Status.PFs); len(pfs) > 0 {
			byNode[nodes[i].Name] = pfs
		}
	}

	at := location{node: xpu.Spec.NodeName, serial: reported[0].Serial}
	names := slices.Sorted(maps.Keys(byNode))
	keeper := keeperOf(xpu, byNode)

	switch {
	case len(names) == 0 && at.node == "":
		return at.because(v1alpha1.ReasonCardNotFound,
			"no node has reported %s yet; see whether xpu-agent runs on the "+
				"node that has the card, or set spec.nodeName", describe(reported))
	case len(names) == 0:
		return at.because(v1alpha1.ReasonCardNotFound,
			"node %s does not have %s; correct spec.nodeName, or wait for "+
				"its xpu-agent", at.node, describe(reported))
	case at.node != "" && byNode[at.node] == nil:
		return at.because(v1alpha1.ReasonContradiction,
			"spec.nodeName is %s, but %s has %s; correct it, or leave it out",
			at.node, strings.Join(names, ", "), describe(reported))
	case at.node == "" && len(names) > 1 && keeper == "":
		return at.because(v1alpha1.ReasonContradiction, "nodes %s all have %s; set spec.nodeName",
			strings.Join(names, ", "), describe(reported))
	}

	at.node = cmp.Or(at.node, keeper, names[0])
	at.pfs = byNode[at.node]
	if xpu.Spec.NodeName == "" && len(names) > 1 {
		return at.because(v1alpha1.ReasonContradiction,
			"nodes %s all have %s; node %s keeps the card, because it had it "+
				"first; see which agent is wrong, and set spec.nodeName", strings.Join(names, ", "),
			describe(reported), at.node)
	}

	return at.found(xpu.Spec.PFs)
}

// unreported returns the location of a card whose agent does not report its PFs. What the agent
// reported before still holds, unless the spec changed since.
func unreported(xpu *v1alpha1.XPU) location {
	at := location{node: xpu.Spec.NodeName}
	if at.node != "" {
		return at
	}

	said := meta.FindStatusCondition(xpu.Status.Conditions, v1alpha1.ConditionCard)
	if len(xpu.Status.PFs) > 0 && said != nil && said.ObservedGeneration == xpu.Generation {
		at = location{node: xpu.Status.NodeName, serial: xpu.Status.Serial, pfs: xpu.Status.PFs}
		return at.because(v1alpha1.ReasonNotTold,
			"the OPI agent does not tell any more which PFs it serves; node %s keeps the "+
				"card, as the agent reported before; set spec.nodeName if that is wrong", at.node)
	}

	return at.because(v1alpha1.ReasonNotTold,
		"the OPI agent does not tell which PFs it serves: set spec.nodeName, or have it tell; "+
			"opi-bridge does where devlink shows ports of flavour pcipf, or by --host-pf")
}

// keeperOf returns the node that had the XPU's card before and still reports it, "" if there is
// none. A node that reports the same card later does not take it away, because a node's report may
// be wrong or a lie.
func keeperOf(xpu *v1alpha1.XPU, byNode map[string][]v1alpha1.XPUPF) string {
	if len(xpu.Status.PFs) > 0 && byNode[xpu.Status.NodeName] != nil {
		return xpu.Status.NodeName
	}
	return ""
}

// because adds the reason and the message of the condition Card.
func (l location) because(reason, format string, args ...any) location {
	l.reason, l.message = reason, fmt.Sprintf(format, args...)
	return l
}

// found compares a card that was found with the PFs of the spec.
func (l location) found(wanted []string) location {
	texts := make([]string, 0, len(l.pfs))
	for _, pf := range l.pfs {
		texts = append(texts, fmt.Sprintf("PF %s is %s", pf.Address, pf.Name))
	}

	list := strings.Join(texts, ", ")

	for _, pf := range wanted {
		if !slices.ContainsFunc(l.pfs, func(has v1alpha1.XPUPF) bool { return has.Address == pf }) {
			return l.because(v1alpha1.ReasonContradiction,
				"spec.pfs has %s, which the OPI agent does not serve: %s; "+
					"correct it, or leave it out", pf, list)
		}
	}

	return l.because(v1alpha1.ReasonFound, "node %s has the card: %s", l.node, list)
}

// join returns the PFs of a node that an agent reports, sorted by address.
func join(reported []opi.HostPF, has []v1alpha1.XPUNodePF) (joined []v1alpha1.XPUPF) {
	for _, pf := range has {
		card := function.Card{Serial: pf.Serial, MAC: function.MAC(pf.MAC)}
		i := slices.IndexFunc(reported, func(t opi.HostPF) bool {
			return t.Is(pci.Address(pf.Address), card)
		})
		if i >= 0 {
			joined = append(joined, v1alpha1.XPUPF{
				Address: pf.Address, Name: reported[i].Name, VFOffset: pf.VFOffset,
				VFStride: pf.VFStride, TotalVFs: pf.TotalVFs,
			})
		}
	}

	slices.SortFunc(joined, func(a, b v1alpha1.XPUPF) int {
		return strings.Compare(a.Address, b.Address)
	})

	return slices.CompactFunc(joined, func(a, b v1alpha1.XPUPF) bool {
		return a.Address == b.Address
	})
}

// numbered returns the PFs of a node that have VFs, or those that the spec names, sorted by
// address. Their names have the number of the PCI function, which firmware gives to a PF as its
// number.
func numbered(has []v1alpha1.XPUNodePF, wanted []string) (pfs []v1alpha1.XPUPF) {
	for _, pf := range has {
		_, number, _ := strings.Cut(pf.Address, ".")
		if pf.TotalVFs > 0 && (len(wanted) == 0 || slices.Contains(wanted, pf.Address)) {
			pfs = append(pfs, v1alpha1.XPUPF{
				Address: pf.Address, Name: "pf" + number, VFOffset: pf.VFOffset,
				VFStride: pf.VFStride, TotalVFs: pf.TotalVFs,
			})
		}
	}

	slices.SortFunc(pfs, func(a, b v1alpha1.XPUPF) int {
		return strings.Compare(a.Address, b.Address)
	})
	return pfs
}

// describe returns a short list of PFs for a message.
func describe(reported []opi.HostPF) string {
	const most = 4
	var texts []string
	for _, pf := range reported[:min(len(reported), most)] {
		texts = append(texts, strings.TrimPrefix(pf.String(), opi.HostPFPrefix))
	}

	if len(reported) > most {
		texts = append(texts, fmt.Sprintf("%d more", len(reported)-most))
	}
	return "a PF that is " + strings.Join(texts, " or ")
}
