// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"crypto/sha256"
	"fmt"
	"net"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// PoolID identifies a pool of ResourceSlices: the Functions of one PF that one DevicePool selects.
// A change of one PF or one DevicePool affects no other pool's slices.
type PoolID struct {
	Node       string      // name of the Node
	PF         pci.Address // the PF's address
	DevicePool string      // name of the DevicePool
}

// String returns the pool's name in ResourceSlices and allocation results, such as
// "node1/0000-3b-00-0/fast".
func (p PoolID) String() string {
	return p.Node + "/" + p.PF.DeviceName() + "/" + p.DevicePool
}

// ParsePoolID reverses [PoolID.String].
func ParsePoolID(name string) (PoolID, error) {
	parts := strings.Split(name, "/")
	if len(parts) != 3 || parts[0] == "" || parts[2] == "" {
		return PoolID{}, fmt.Errorf("pool %q: want <node>/<PF>/<DevicePool>", name)
	}

	pf, err := pci.ParseDeviceName(parts[1])
	if err != nil {
		return PoolID{}, fmt.Errorf("pool %q: %w", name, err)
	}
	return PoolID{Node: parts[0], PF: pf, DevicePool: parts[2]}, nil
}

// PortName returns the name of a Function's XPUPort, such as "node1-0000-3b-00-2", unless the Port
// is made ahead. The name depends only on the Function, so a Function cannot have two such Ports in
// one namespace.
func PortName(node string, f function.ID) string {
	return node + "-" + f.DeviceName()
}

// aheadSuffix distinguishes the name of a Port that is made ahead from a claim's Port in the same
// namespace.
const aheadSuffix = "-ahead"

// NewPort returns the Port of a Function that belongs to a DevicePool, with the metadata that every
// Port has. It fills in the spec's Function.
func NewPort(
	namespace string, f function.ID, devicePool string, spec v1alpha1.XPUPortSpec,
) *v1alpha1.XPUPort {
	spec.Function = FunctionRef(f)
	name := PortName(spec.NodeName, f)
	if spec.Ahead {
		name += aheadSuffix
	}

	labels := map[string]string{v1alpha1.LabelPool: devicePool}
	if spec.Network != "" {
		labels[v1alpha1.LabelNetwork] = spec.Network
	}

	return &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:  namespace,
			Name:       name,
			Labels:     labels,
			Finalizers: []string{v1alpha1.FinalizerPort},
		},
		Spec: spec,
	}
}

// RateOf returns the rates that an interface asks for; nil if it asks for none.
func RateOf(vf *function.VFConfig) *v1alpha1.PortRate {
	if !vf.Rated() {
		return nil
	}
	return &v1alpha1.PortRate{
		Guaranteed: int32(ptr.Deref(vf.MinTxRate, 0)), Maximum: int32(ptr.Deref(vf.MaxTxRate, 0)),
	}
}

// DerivedMAC returns a locally administered unicast address (IEEE 802 8.4.2) that depends only on
// its arguments. The claim is empty for a Function allocated by the device plugin.
func DerivedMAC(claim types.UID, node string, f function.ID) function.MAC {
	sum := sha256.Sum256([]byte(string(claim) + "/" + node + "/" + f.String()))
	return function.MAC(append(net.HardwareAddr{0x02}, sum[:5]...).String())
}

// FunctionRef returns the reference to a Function in an XPUPort.
func FunctionRef(f function.ID) v1alpha1.FunctionRef {
	ref := v1alpha1.FunctionRef{PCIAddress: string(f.Address)}
	if sfnum, isSF := f.SFNum(); isSF {
		ref.Subfunction = ptr.To(int64(sfnum))
	}
	return ref
}

// FunctionOf reverses [FunctionRef]. The API server has validated the fields.
func FunctionOf(ref v1alpha1.FunctionRef) function.ID {
	if ref.Subfunction != nil {
		return function.SubfunctionID(pci.Address(ref.PCIAddress), uint32(*ref.Subfunction))
	}
	return function.ID{Address: pci.Address(ref.PCIAddress)}
}

// XPUOf chooses the XPU that serves a PF from the XPUs of the PF's node. It prefers an XPU that is
// not being deleted, then one whose OPI agent is not known to be another XPU's, then one that names
// the PF over one that serves all PFs, then the one whose name sorts first. Whether the agent answers
// does not count, because another XPU is of another card.
//
// XPUOf returns a pointer into the slice. It returns nil if no XPU serves the PF, and if several do
// that name no PFs, because nothing says which of them has the card.
func XPUOf(xpus []v1alpha1.XPU, pf pci.Address) *v1alpha1.XPU {
	var chosen *v1alpha1.XPU
	unknown := false
	for i := range xpus {
		x := &xpus[i]
		if !x.Serves(string(pf)) {
			continue
		}

		order := 1
		if chosen != nil {
			order = compareStanding(x, chosen)
		}
		unknown = order == 0 && !x.NamesPFs() || order <= 0 && unknown
		if order > 0 || order == 0 && x.Name < chosen.Name {
			chosen = x
		}
	}
	if unknown {
		return nil
	}
	return chosen
}

// compareStanding is positive if XPUOf prefers a to b whatever their names are, and 0 if their names
// decide.
func compareStanding(a, b *v1alpha1.XPU) int {
	standing := func(x *v1alpha1.XPU) (n int) {
		if x.DeletionTimestamp.IsZero() {
			n += 4
		}
		if v1alpha1.ReadyOf(x.Status.Conditions).Reason != v1alpha1.ReasonConflict {
			n += 2
		}
		if x.NamesPFs() {
			n++
		}
		return n
	}
	return standing(a) - standing(b)
}

// ServerOf returns the XPU of [XPUOf] if it is known to serve the PF, because it names the PF or is the
// only XPU of the node. Otherwise it returns nil: an XPU that names no PFs may be of another card
// then. xpus must be all XPUs of the node.
func ServerOf(xpus []v1alpha1.XPU, pf pci.Address) *v1alpha1.XPU {
	chosen := XPUOf(xpus, pf)
	if chosen == nil || !chosen.NamesPFs() && len(xpus) > 1 {
		return nil
	}
	return chosen
}

// NoXPU returns a message for a PF of the node for which [XPUOf] chooses none, which says what an
// administrator should do.
func NoXPU(node string, pf pci.Address) string {
	return fmt.Sprintf("no XPU serves PF %s of node %s, or several that name no PFs; add one, or set "+
		"spec.pfs of the node's XPUs and see their condition Card", pf, node)
}

// CDIKind is the vendor and class of the CDI devices for claims' Functions.
const CDIKind = v1alpha1.GroupName + "/function"

// uidLength is the length of a claim's UID (RFC 9562).
const uidLength = 36

// CDIDeviceName returns the name of the CDI device for a claim's Function: "<UID>-<device name>",
// see [function.ID.DeviceName]. The UID prevents a runtime from using a cached device of another
// claim.
func CDIDeviceName(claim types.UID, device string) string { return string(claim) + "-" + device }

// ParseCDIDevice parses the qualified name of a CDI device,
// "xpu.opiproject.org/function=<UID>-<device>". ok is false for other devices.
func ParseCDIDevice(qualified string) (claim types.UID, id function.ID, ok bool) {
	kind, name, _ := strings.Cut(qualified, "=")
	if kind != CDIKind {
		return "", function.ID{}, false
	}
	return SplitCDIDeviceName(name)
}

// SplitCDIDeviceName reverses [CDIDeviceName]. Multus up to version 4.3 passes this name for a
// claim's device.
func SplitCDIDeviceName(name string) (claim types.UID, id function.ID, ok bool) {
	if len(name) <= uidLength || name[uidLength] != '-' {
		return "", function.ID{}, false
	}
	id, err := function.ParseDeviceName(name[uidLength+1:])
	return types.UID(name[:uidLength]), id, err == nil
}

// Names of the capacities of PFs that claims share (model: Ports), in the driver's domain.
const (
	CapacityPorts     = "ports"     // how many claims can have a VF of the PF
	CapacityBandwidth = "bandwidth" // of the link, in bit/s
)
