// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// Eswitches reads and changes the rate limits of eswitches. [devlink.Conn] implements it. If an
// eswitch has a rate object for a Function, the eswitch limits the Function, and not the PF.
type Eswitches interface {
	EswitchMode(devlink.Device) (devlink.EswitchMode, error)
	PortsOf(devlink.Device) ([]devlink.Port, error)
	Rate(d devlink.Device, port uint32) (rate function.Rate, exists bool, err error)
	SetRate(d devlink.Device, port uint32, to function.Rate) error
}

// rate returns the limits that the eswitch enforces for the Function. ok is false if there is no
// rate object, as for a VF in eswitch mode legacy.
func (e *Engine) rate(f function.EswitchPort) (rate function.Rate, ok bool, err error) {
	port, ok, err := e.port(f)
	if err != nil || !ok {
		return function.Rate{}, false, err
	}
	return e.eswitches.Rate(port.Device, port.Index)
}

func (e *Engine) changeRate(device Device, from, to *function.Rate) error {
	if device.Port == nil || from == nil || to == nil || *from == *to {
		return nil
	}

	e.trace("eswitch: " + to.String() + " for " + device.Port.String())
	port, ok, err := e.port(*device.Port)
	if err == nil && !ok {
		err = fmt.Errorf("it has no port any more: %w", unix.ENODEV)
	}

	if err == nil {
		err = e.eswitches.SetRate(port.Device, port.Index, *to)
	}
	if err != nil {
		return fmt.Errorf("%s: the eswitch refuses %s for %s: %w", rateFields(*from, *to), to,
			device.Port, err)
	}

	return nil
}

// port returns the port of a Function of this host. It ignores the ports of other hosts, which the
// eswitch of a DPU also has.
func (e *Engine) port(f function.EswitchPort) (port devlink.Port, ok bool, err error) {
	device, flavour := devlink.OfPCI(f.PF), devlink.PCISF
	if !f.SF {
		flavour = devlink.PCIVF
		mode, err := e.eswitches.EswitchMode(device)
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) ||
			err == nil && mode != devlink.Switchdev {
			return devlink.Port{}, false, nil
		}
		if err != nil {
			return devlink.Port{}, false, err
		}
	}

	ports, err := e.eswitches.PortsOf(device)
	i := slices.IndexFunc(ports, func(p devlink.Port) bool {
		return !p.External && p.Flavour == flavour &&
			(f.SF && p.SF == f.Number || !f.SF && uint32(p.VF) == f.Number)
	})
	if err != nil || i < 0 {
		return devlink.Port{}, false, err
	}

	return ports[i], true, nil
}
