package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// Eswitches are the eswitches of PFs, as [devlink.Conn] has them.
type Eswitches interface {
	EswitchMode(devlink.Device) (devlink.EswitchMode, error)
	PortsOf(devlink.Device) ([]devlink.Port, error)
	Rate(d devlink.Device, port uint32) (rate function.Rate, exists bool, err error)
	SetRate(d devlink.Device, port uint32, to function.Rate) error
}

// Rates finds the rate objects of Functions. It is what a [netdev.Engine] has rates set by.
type Rates struct {
	Eswitches Eswitches
}

// Rate is what the eswitch limits the Function to. A VF has no rate object as long as the mode is legacy: its PF limits
// it then.
func (r Rates) Rate(_ context.Context, f function.EswitchPort) (rate function.Rate, ok bool, err error) {
	port, ok, err := r.find(f)
	if err != nil || !ok {
		return function.Rate{}, false, err
	}
	return r.Eswitches.Rate(port.Device, port.Index)
}

// SetRate limits the Function to another one.
func (r Rates) SetRate(_ context.Context, f function.EswitchPort, to function.Rate) error {
	port, ok, err := r.find(f)
	if err == nil && !ok {
		err = fmt.Errorf("it has no port any more: %w", unix.ENODEV)
	}
	if err != nil {
		return err
	}
	return r.Eswitches.SetRate(port.Device, port.Index, to)
}

// find looks for the port of a Function of this host: the eswitch of a DPU has also those of other hosts.
func (r Rates) find(f function.EswitchPort) (port devlink.Port, ok bool, err error) {
	device, flavour := devlink.OfPCI(pci.Address(f.PF)), devlink.PCISF
	if !f.SF {
		flavour = devlink.PCIVF
		mode, err := r.Eswitches.EswitchMode(device)
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) || err == nil && mode != devlink.Switchdev {
			return devlink.Port{}, false, nil
		}
		if err != nil {
			return devlink.Port{}, false, err
		}
	}
	ports, err := r.Eswitches.PortsOf(device)
	i := slices.IndexFunc(ports, func(p devlink.Port) bool {
		return !p.External && p.Flavour == flavour && (f.SF && p.SF == f.Number || !f.SF && uint32(p.VF) == f.Number)
	})
	if err != nil || i < 0 {
		return devlink.Port{}, false, err
	}
	return ports[i], true, nil
}
