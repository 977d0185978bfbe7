package claim

import (
	"crypto/sha256"
	"fmt"
	"net"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// PoolID identifies a pool of ResourceSlices: the Functions of one PF that one DevicePool selects. One DRA pool
// for each keeps a change of one PF, or of one DevicePool, from touching the slices of the others.
type PoolID struct {
	// Node is the node's name.
	Node string
	// PF is the PCI address of the PF.
	PF pci.Address
	// DevicePool is the name of the DevicePool.
	DevicePool string
}

// String is the pool's name in ResourceSlices and allocation results, "node1/0000-3b-00-0/fast".
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

// PortName is the name of the XPUPort of a Function, "node1-0000-3b-00-2": a pure function of what it names, so
// that a Function cannot get two Ports in one namespace.
func PortName(node string, f function.ID) string {
	return node + "-" + f.DeviceName()
}

// DerivedMAC is a locally administered unicast address (IEEE 802 8.4.2) that is the same each time for the same Function
// of a claim. The claim is empty where the device plugin handed the Function out.
func DerivedMAC(claim types.UID, node string, f function.ID) function.MAC {
	sum := sha256.Sum256([]byte(string(claim) + "/" + node + "/" + f.String()))
	return function.MAC(append(net.HardwareAddr{0x02}, sum[:5]...).String())
}

// FunctionRef is how an XPUPort names a Function.
func FunctionRef(f function.ID) v1alpha1.FunctionRef {
	ref := v1alpha1.FunctionRef{PCIAddress: string(f.Address)}
	if sfnum, isSF := f.SFNum(); isSF {
		ref.Subfunction = ptr.To(int64(sfnum))
	}
	return ref
}

// FunctionOf reverses [FunctionRef]. The API server has checked the fields.
func FunctionOf(ref v1alpha1.FunctionRef) function.ID {
	if ref.Subfunction != nil {
		return function.SubfunctionID(pci.Address(ref.PCIAddress), uint32(*ref.Subfunction))
	}
	return function.ID{Address: pci.Address(ref.PCIAddress)}
}
