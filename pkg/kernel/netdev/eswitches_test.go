// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

const ratedPF pci.Address = "0000:3b:00.0"

// eswitches has one card. Its rate objects are stored by port index.
type eswitches struct {
	mode   devlink.EswitchMode
	failed error // error of requests about the mode
	rates  map[uint32]function.Rate
}

func (e *eswitches) EswitchMode(devlink.Device) (devlink.EswitchMode, error) {
	return e.mode, e.failed
}

func (e *eswitches) PortsOf(d devlink.Device) ([]devlink.Port, error) {
	if d != devlink.OfPCI(ratedPF) {
		return nil, nil
	}
	return []devlink.Port{
		{Device: d, Index: 0, Flavour: devlink.Physical},
		{Device: d, Index: 7, Flavour: devlink.PCIVF, VF: 1, Controller: 1, External: true},
		{Device: d, Index: 1, Flavour: devlink.PCIVF, VF: 0},
		{Device: d, Index: 2, Flavour: devlink.PCIVF, VF: 1},
		{Device: d, Index: 3, Flavour: devlink.PCISF, SF: 1},
	}, nil
}

func (e *eswitches) Rate(_ devlink.Device, port uint32) (function.Rate, bool, error) {
	rate, exists := e.rates[port]
	return rate, exists, nil
}

func (e *eswitches) SetRate(_ devlink.Device, port uint32, to function.Rate) error {
	e.rates[port] = to
	return nil
}

// TestRates checks that the rate of a Function is read at its own port, and that a VF has no rate
// object in mode legacy.
func TestRates(t *testing.T) {
	vf1, sf1 := function.EswitchPort{PF: ratedPF, Number: 1}, function.EswitchPort{
		PF: ratedPF, SF: true, Number: 1,
	}
	refused := errors.New("refused")
	for name, test := range map[string]struct {
		function function.EswitchPort
		mode     devlink.EswitchMode
		failed   error
		want     uint32 // index of the port, or 0 for no port
		err      error
	}{
		"VF in mode switchdev":   {function: vf1, mode: devlink.Switchdev, want: 2},
		"VF in mode legacy":      {function: vf1, mode: devlink.Legacy},
		"VF without an eswitch":  {function: vf1, failed: unix.EOPNOTSUPP},
		"VF without devlink":     {function: vf1, failed: unix.ENODEV},
		"VF of which none tells": {function: vf1, failed: refused, err: refused},
		"SF in any mode":         {function: sf1, failed: refused, want: 3},
		"VF that has no port": {
			function: function.EswitchPort{PF: ratedPF, Number: 5}, mode: devlink.Switchdev,
		},
		"VF of another PF": {
			function: function.EswitchPort{PF: "0000:81:00.0", Number: 1}, mode: devlink.Switchdev,
		},
		"VF without a rate object": {
			function: function.EswitchPort{PF: ratedPF}, mode: devlink.Switchdev,
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := &eswitches{
				mode: test.mode, failed: test.failed, rates: map[uint32]function.Rate{
					2: {}, 3: {}, 7: {Max: 7},
				},
			}

			engine := &Engine{eswitches: e, trace: func(string) {}}
			rate, ok, err := engine.rate(test.function)
			if ok != (test.want != 0) || rate != (function.Rate{}) || !errors.Is(err, test.err) {
				t.Fatalf("rate %v, %v, error %v", rate, ok, err)
			}
			if test.want == 0 {
				return
			}

			to := function.Rate{Min: 10, Max: 100}
			err = engine.changeRate(Device{Port: &test.function}, &rate, &to)
			if err != nil || e.rates[test.want] != (function.Rate{Min: 10, Max: 100}) {
				t.Errorf("error %v, rates %v", err, e.rates)
			}
			if rate, ok, err := engine.rate(test.function); rate != to || !ok || err != nil {
				t.Errorf("rate %v, %v, error %v", rate, ok, err)
			}
		})
	}

	gone := function.EswitchPort{PF: "0000:81:00.0", SF: true, Number: 1}
	engine := &Engine{eswitches: &eswitches{}, trace: func(string) {}}
	err := engine.changeRate(Device{Port: &gone}, &function.Rate{}, &function.Rate{Max: 1})
	if !errors.Is(err, unix.ENODEV) {
		t.Errorf("rate of an SF that is gone: %v", err)
	}
}
