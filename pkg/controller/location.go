package controller

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// location is where the card of an XPU is.
type location struct {
	node, serial string
	pfs          []v1alpha1.XPUPF // sorted by address
	// reason and message are those of the condition Card; "" if there is nothing to say.
	reason, message string
}

// cardKeys are the keys by which PFs of XPUNodes are found: see keysOf.
func cardKeys(node *v1alpha1.XPUNode) []string {
	keys := sets.New[string]()
	for _, pf := range node.Status.PFs {
		keys.Insert(keyOfMAC(pf.MAC), keyOfSerial(pf.Serial))
	}
	return keys.Delete("").UnsortedList()
}

// keysOf are the keys of a PF that an agent tells of.
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

// locate joins what an agent tells with the nodes that have PFs with the same keys.
func locate(xpu *v1alpha1.XPU, told []opi.HostPF, nodes []v1alpha1.XPUNode) location {
	at := location{node: xpu.Spec.NodeName}
	if len(told) == 0 {
		if at.node == "" {
			at.reason = v1alpha1.ReasonNotTold
			at.message = "the OPI agent does not tell which PFs it serves: set spec.nodeName, or have it tell; opi-bridge does where " +
				"devlink shows ports of flavour pcipf, or by --host-pf"
		}
		return at
	}
	at.serial = told[0].Serial
	byNode := map[string][]v1alpha1.XPUPF{}
	var names []string
	for i := range nodes {
		if pfs := join(told, nodes[i].Status.PFs); len(pfs) > 0 {
			byNode[nodes[i].Name] = pfs
			names = append(names, nodes[i].Name)
		}
	}
	slices.Sort(names)
	switch {
	case len(names) == 0 && at.node == "":
		at.reason, at.message = v1alpha1.ReasonCardNotFound, fmt.Sprintf("no node has told of %s yet; see whether xpu-agent runs on the "+
			"node that has the card, or set spec.nodeName", describe(told))
		return at
	case len(names) == 0:
		at.reason, at.message = v1alpha1.ReasonCardNotFound, fmt.Sprintf("node %s does not have %s; correct spec.nodeName, or wait for "+
			"its xpu-agent", at.node, describe(told))
		return at
	case at.node != "" && byNode[at.node] == nil:
		at.reason, at.message = v1alpha1.ReasonContradiction, fmt.Sprintf("spec.nodeName is %s, but %s has %s; correct it, or leave it out",
			at.node, strings.Join(names, ", "), describe(told))
		return at
	case at.node == "" && len(names) > 1:
		at.reason, at.message = v1alpha1.ReasonContradiction, fmt.Sprintf("nodes %s all have %s; set spec.nodeName",
			strings.Join(names, ", "), describe(told))
		return at
	}
	if at.node == "" {
		at.node = names[0]
	}
	at.pfs = byNode[at.node]
	found := make([]string, 0, len(at.pfs))
	for _, pf := range at.pfs {
		found = append(found, fmt.Sprintf("PF %s is %s", pf.Address, pf.Name))
	}
	for _, pf := range xpu.Spec.PFs {
		if xpu := (&v1alpha1.XPU{Status: v1alpha1.XPUStatus{PFs: at.pfs}}); xpu.PF(pf) == nil {
			at.reason, at.message = v1alpha1.ReasonContradiction, fmt.Sprintf("spec.pfs has %s, which the OPI agent does not serve: %s; "+
				"correct it, or leave it out", pf, strings.Join(found, ", "))
			return at
		}
	}
	at.reason, at.message = v1alpha1.ReasonFound, fmt.Sprintf("node %s has the card: %s", at.node, strings.Join(found, ", "))
	return at
}

// join returns the PFs of a node that are those that an agent tells of, sorted by address.
func join(told []opi.HostPF, has []v1alpha1.XPUNodePF) (joined []v1alpha1.XPUPF) {
	for _, pf := range has {
		i := slices.IndexFunc(told, func(t opi.HostPF) bool { return isSamePF(t, pf) })
		if i >= 0 {
			joined = append(joined, v1alpha1.XPUPF{
				Address: pf.Address, Name: told[i].Name, VFOffset: pf.VFOffset, VFStride: pf.VFStride, TotalVFs: pf.TotalVFs,
			})
		}
	}
	slices.SortFunc(joined, func(a, b v1alpha1.XPUPF) int { return strings.Compare(a.Address, b.Address) })
	return slices.CompactFunc(joined, func(a, b v1alpha1.XPUPF) bool { return a.Address == b.Address })
}

// isSamePF goes by the MAC address, which a PF alone has, where both sides know it. The PFs of one card are otherwise told apart by
// their number, which is that of the PCI function.
func isSamePF(told opi.HostPF, has v1alpha1.XPUNodePF) bool {
	if told.MAC != "" && has.MAC != "" {
		return string(told.MAC) == has.MAC
	}
	_, number, _ := strings.Cut(told.Name, "pf")
	return told.Serial != "" && told.Serial == has.Serial && strings.HasSuffix(has.Address, "."+number)
}

// describe is a short list of PFs for a message.
func describe(told []opi.HostPF) string {
	const most = 4
	var texts []string
	for _, pf := range told[:min(len(told), most)] {
		texts = append(texts, strings.TrimPrefix(pf.String(), opi.HostPFPrefix))
	}
	if len(told) > most {
		texts = append(texts, fmt.Sprintf("%d more", len(told)-most))
	}
	return "a PF that is " + strings.Join(texts, " or ")
}

// portID is the id of a Port at the OPI agent of its XPU, which may be nil: the one that it has, or else the name of the Function's
// eswitch port where the XPU's status tells that of its PF.
func portID(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) (string, error) {
	if port.Status.BridgePort != "" {
		return port.Status.BridgePort, nil
	}
	f := claim.FunctionOf(port.Spec.Function)
	if xpu != nil && !foreign(port, xpu) {
		if id := eswitchPort(xpu.Status.PFs, f); id != "" {
			return id, nil
		}
	}
	return opi.PortID(f)
}

// eswitchPort is the id of the Port of a Function of one of these PFs, "" for other Functions.
func eswitchPort(pfs []v1alpha1.XPUPF, f function.ID) string {
	// The VFs of several PFs may interleave: a VF belongs to the PF whose first VF is the nearest below.
	id, nearest := "", -1
	for _, pf := range pfs {
		if pf.Address == string(f.Address) {
			id, nearest = opi.PortIDAt(pf.Name, f.Subfunction), 0
			break
		}
		index, distance, ok := pci.VFIndex(pci.Address(pf.Address), f.Address, int(pf.VFOffset), int(pf.VFStride))
		if ok && index < int(pf.TotalVFs) && (nearest < 0 || distance < nearest) {
			id, nearest = opi.PortIDAt(pf.Name, fmt.Sprintf("vf%d", index)), distance
		}
	}
	if len(id) < opi.MinID { // that of a whole PF whose card names no controllers, "pf0"
		return ""
	}
	return id
}
