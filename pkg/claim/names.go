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

// PoolID identifies a pool of ResourceSlices: the Functions of one PF that one DevicePool selects. A change of one PF or one
// DevicePool does not touch the slices of the others.
type PoolID struct {
	Node       string      // name
	PF         pci.Address // of the PF
	DevicePool string      // name
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

// PortName is the name of a Function's XPUPort, "node1-0000-3b-00-2". As it depends on the Function alone, a Function cannot
// get two Ports in one namespace.
func PortName(node string, f function.ID) string {
	return node + "-" + f.DeviceName()
}

// DerivedMAC is a locally administered unicast address (IEEE 802 8.4.2) that depends on its arguments alone. The claim is
// empty for a Function that the device plugin handed out.
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
