// Package devlink is the part of the kernel's devlink that this project needs: the eswitch of a PF, the ports behind
// its Functions, subfunctions, rate objects and health reporters (Documentation/networking/devlink in the kernel;
// numbers of linux/devlink.h).
//
// Errors begin with the command of devlink(8) that would ask for the same, hold the kernel's own words where it has
// some, and match its number by [errors.Is]: [golang.org/x/sys/unix.EOPNOTSUPP] and others.
package devlink

import (
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Device is a devlink instance by its handle: "pci/0000:3b:00.0". It is comparable.
type Device struct {
	Bus  string // "pci", "auxiliary"
	Name string // on the bus: a PCI address, or "mlx5_core.sf.4"
}

// OfPCI is the instance of the PCI device at this address.
func OfPCI(address pci.Address) Device { return Device{Bus: "pci", Name: string(address)} }

// String is the handle as devlink(8) writes it.
func (d Device) String() string { return d.Bus + "/" + d.Name }

// EswitchMode is how a PF switches what its Functions send.
type EswitchMode string

// The modes of an eswitch.
const (
	Legacy    EswitchMode = "legacy"    // by MAC and VLAN, in the card
	Switchdev EswitchMode = "switchdev" // as its representors say
)

// Flavour is what is behind a port.
type Flavour string

// The flavours of ports that matter here, in the words of devlink(8).
const (
	Physical Flavour = "physical"
	PCIPF    Flavour = "pcipf"
	PCIVF    Flavour = "pcivf"
	PCISF    Flavour = "pcisf"
)

// Port is a devlink port: for the flavours pcivf and pcisf the eswitch's side of a Function.
type Port struct {
	Device  Device
	Index   uint32 // at the Device
	Flavour Flavour
	// Controller is that of the host whose Function it is, 0 for the one that runs the eswitch; External says that it is
	// another one, as it is for all Functions that a DPU gives its host.
	Controller uint32
	External   bool
	// Number is that of a physical port. Drivers number PFs the same way.
	Number uint32
	PF     uint16 // number of the PF, not of its PCI function
	VF     uint16 // with flavour pcivf
	SF     uint32 // sfnum, with flavour pcisf
	// Netdev and NetdevIndex are those of the port's netdev, the representor, in the namespace of the Conn; "" and 0 where
	// it has none there.
	Netdev      string
	NetdevIndex int
	// Function is that of the Function behind the port; the zero value where the driver does not tell.
	Function Function
}

// Function is what devlink knows of the Function behind a port.
type Function struct {
	MAC function.MAC // hw_addr; "" where it has none yet
	// Active says that a subfunction's device shall be there, and Attached that a driver has it.
	Active, Attached bool
}

// Rate limits what a Function sends, in Mbit/s; 0 is no limit. devlink counts bytes per second.
type Rate struct {
	Share int // tx_share, guaranteed
	Max   int // tx_max
}

// Reporter is a health reporter of a device or of one of its ports.
type Reporter struct {
	Device Device
	// Port is the index of the port that it belongs to, -1 for the device's own.
	Port int
	Name string // "fw_fatal", "tx"
	// Failed says that there was an error that it did not recover from.
	Failed bool
	// Errors and Recoveries are how many there were.
	Errors, Recoveries uint64
}
