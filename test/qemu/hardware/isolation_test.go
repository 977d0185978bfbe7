// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/isolation"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// TestIsolation runs two tenants after one another on real Functions, the first of which is
// hostile. Every Function must become free for the second tenant, because the driver of hardware
// can be bound again.
func TestIsolation(t *testing.T) {
	guest := os.Getenv(plan.GuestVariable)
	if guest != "igb" && guest != "simnic" {
		t.Skip("changes the machine's PCI devices: make test-qemu runs it in guests igb and simnic")
	}

	pf := card.PFs(t)[0]
	t.Run("VF", func(t *testing.T) {
		s := newStages(t)
		peer := attached(t, s.engine, pf, 1, 2, nil)
		isolation.Run(t, func(*testing.T) isolation.Stage {
			return s.of(peer.Namespace, "net1", func() netdev.Device { return deviceOf(t, pf, 0) })
		})
	})

	if guest == "simnic" {
		t.Run("SF", func(t *testing.T) { isolatedSF(t, pf) })
	}
}

// isolatedSF runs the tenants on an SF, whose wire ends at its representor.
func isolatedSF(t *testing.T, pf pci.Address) {
	switchdev(t, pf)
	eswitch, err := devlink.Dial("")
	must.Succeed(t, err)
	t.Cleanup(eswitch.Close)

	const number = 5
	port, err := eswitch.AddSF(devlink.OfPCI(pf), portOf(t, eswitch, pf, devlink.PCIVF, 0).PF,
		number)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, eswitch.DeletePort(port.Device, port.Index)) })

	must.Succeed(t,
		eswitch.SetFunction(port.Device, port.Index, devlink.FunctionChange{Active: new(true)}))

	s := newStages(t)
	representor := portOf(t, eswitch, pf, devlink.PCISF, number).Netdev
	l, err := s.host.Handle().LinkByName(representor)
	must.Succeed(t, err)
	must.Succeed(t, s.host.Handle().LinkSetUp(l))
	id := function.SubfunctionID(pf, number)
	functions := follow(t)
	functions.await(t, time.Now(), id, "netdev", func(f function.Function) bool {
		return f.Netdev != ""
	})

	isolation.Run(t, func(*testing.T) isolation.Stage {
		return s.of(s.host, representor, func() netdev.Device {
			name, _ := functions.Netdev(id)
			return netdev.Device{Name: name}
		})
	})
}

// stages makes the stages for tenants on the machine's own Functions.
type stages struct {
	host   *netns.Namespace
	engine *netdev.Engine
}

func newStages(t *testing.T) stages {
	t.Helper()
	engine, err := netdev.New(netdev.Options{Trace: func(step string) { t.Log(step) }})
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, engine.Close()) })
	return stages{host: netns.Current(t), engine: engine}
}

// of returns the stage of a Function, which may get another netdev while the test runs.
func (s stages) of(
	far *netns.Namespace, farNetdev string, device func() netdev.Device,
) isolation.Stage {
	var held taken
	return isolation.Stage{
		Host: s.host, Far: far, FarNetdev: farNetdev,
		Attach: func(t *testing.T, pod *netns.Namespace) {
			var err error
			held, err = take(t, s.engine, device(), pod.Path(), function.Interface{Name: "net1"})
			must.Succeed(t, err)
			wired(t, pod, far, farNetdev)
		},
		Release: func(t *testing.T, _ *netns.Namespace) error {
			begin := time.Now()
			defer func() { t.Logf("released in %s", time.Since(begin)) }()

			for {
				d := device()
				d.Rebinding = &netdev.Rebinding{Intend: func(string) error { return nil }}
				r, err := s.engine.Restore(t.Context(), d, held.before, held.place)
				if errors.Is(err, netdev.ErrGone) && time.Since(begin) < patience {
					time.Sleep(10 * time.Millisecond) // the driver is making the netdev
					continue
				}

				if err == nil && len(r.Notes) > 0 {
					err = fmt.Errorf("%s is not as it was: %q", r.Name, r.Notes)
				}

				return err
			}
		},
		MayKeep: func(error) bool { return false },
	}
}

// wired waits for the carriers, until frames arrive in both directions.
func wired(t *testing.T, pod, far *netns.Namespace, farNetdev string) {
	t.Helper()
	near, other := frames(t, pod, "net1"), frames(t, far, farNetdev)
	own, peer := macOf(t, pod, "net1"), macOf(t, far, farNetdev)
	if !passes(t, near, other, peer, own, patience) ||
		!passes(t, other, near, own, peer, patience) {
		t.Fatal("frames do not come through")
	}
}

func macOf(t *testing.T, ns *netns.Namespace, netdev string) []byte {
	t.Helper()
	l, err := ns.Handle().LinkByName(netdev)
	must.Succeed(t, err)
	return l.Attrs().HardwareAddr
}
