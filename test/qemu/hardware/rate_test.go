// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// limited attaches and releases Functions as the agent does, and has the eswitch to compare with.
type limited struct {
	*follower
	lifecycle *lifecycle.Manager
	eswitch   *devlink.Conn
	pf        pci.Address
}

func newLimited(t *testing.T, pf pci.Address) limited {
	t.Helper()
	eswitch, err := devlink.Dial("")
	must.Succeed(t, err)
	t.Cleanup(eswitch.Close)

	engine, err := netdev.New(netdev.Options{
		Eswitches: eswitch, Trace: func(step string) { t.Log(step) },
	})
	must.Succeed(t, err)
	t.Cleanup(func() { engine.Close() })

	records, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	must.Succeed(t, err)
	t.Cleanup(func() { records.Close() })

	f, log := follow(t), testr.New(t)
	manager := lifecycle.New(records, engine, f, lifecycle.Options{BootID: "this"}, log)
	return limited{
		follower: f, eswitch: eswitch, pf: pf, lifecycle: manager,
	}
}

// attach reserves a Function and takes it to a pod that asks for the limit.
func (l limited) attach(t *testing.T, id function.ID, config *function.VFConfig) error {
	t.Helper()
	f, ok := l.Get(id)
	if !ok {
		t.Fatalf("no Function %s", id)
	}

	err := l.lifecycle.Reserve(t.Context(), journal.Attachment{
		Function: id, PF: f.PF, PFName: f.PFName, VFIndex: f.Index,
		Claim:     journal.Claim{Namespace: "default", Name: "limited", UID: "claim"},
		Interface: function.Interface{Name: "net1", VF: config},
	})

	must.Succeed(t, err)
	sandbox := lifecycle.Sandbox{
		ID: "sandbox", NetNS: netns.New(t).Path(),
		Pod: journal.Pod{Namespace: "default", Name: "limited", UID: "pod"},
	}

	_, err = l.lifecycle.Attach(t.Context(), id, sandbox)
	return err
}

// release releases the Function and waits until its netdev is known on the host.
func (l limited) release(t *testing.T, id function.ID) {
	t.Helper()
	must.Succeed(t, l.lifecycle.Unprepare(t.Context(), "claim"))
	l.await(t, time.Now(), id, "back", func(f function.Function) bool { return f.Netdev != "" })
}

// rate returns the eswitch's rate of a port.
func (l limited) rate(t *testing.T, flavour devlink.Flavour, number uint32) function.Rate {
	t.Helper()
	port := portOf(t, l.eswitch, l.pf, flavour, number)
	rate, exists, err := l.eswitch.Rate(port.Device, port.Index)
	must.Succeed(t, err)
	if !exists {
		t.Fatalf("port %d has no rate object", port.Index)
	}
	return rate
}

// portOf finds the port of a VF or SF at the eswitch of its PF.
func portOf(
	t *testing.T, eswitch *devlink.Conn, pf pci.Address, flavour devlink.Flavour, number uint32,
) devlink.Port {
	t.Helper()
	ports, err := eswitch.PortsOf(devlink.OfPCI(pf))
	must.Succeed(t, err)

	for _, p := range ports {
		its := uint32(p.VF)
		if flavour == devlink.PCISF {
			its = p.SF
		}
		if p.Flavour == flavour && its == number {
			return p
		}
	}

	t.Fatalf("PF %s has no port of flavour %s with number %d, only %+v", pf, flavour, number, ports)
	return devlink.Port{}
}

// TestRate checks the bandwidth that a pod asks for. For a VF in eswitch mode legacy the PF
// enforces it. In mode switchdev, and for an SF, it is a rate object of devlink.
func TestRate(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	l := newLimited(t, pf)
	vf, pfName := function.ID{Address: card.VF(t, pf, 1)}, card.Netdev(pf)
	wish := &function.VFConfig{MinTxRate: new(100), MaxTxRate: new(2000)}
	limit := function.Rate{Min: 100, Max: 2000}

	t.Run("VF in mode legacy, by its PF", func(t *testing.T) {
		must.Succeed(t, l.attach(t, vf, wish))
		if got := enforced(t, &netdev.PF{Name: pfName, VF: 1}); got.MinTxRate != 100 ||
			got.MaxTxRate != 2000 {
			t.Errorf("enforced: %+v", got)
		}

		l.release(t, vf)
		if got := enforced(t, &netdev.PF{Name: pfName, VF: 1}); got.MinTxRate != 0 ||
			got.MaxTxRate != 0 {
			t.Errorf("after release: %+v", got)
		}
	})

	must.Succeed(t, l.eswitch.SetEswitchMode(devlink.OfPCI(pf), devlink.Switchdev))
	defer func() { must.Succeed(t, l.eswitch.SetEswitchMode(devlink.OfPCI(pf), devlink.Legacy)) }()

	l.await(t, time.Now(), vf, "there", func(f function.Function) bool { return f.Netdev != "" })

	t.Run("VF in mode switchdev", func(t *testing.T) {
		must.Succeed(t, l.attach(t, vf, wish))
		if got := l.rate(t, devlink.PCIVF, 1); got != limit {
			t.Errorf("attached: %+v", got)
		}
		if differences, err := l.lifecycle.Check(t.Context(), vf, nil); err != nil ||
			len(differences) > 0 {
			t.Errorf("check: %q, %v", differences, err)
		}

		l.release(t, vf)
		if got := l.rate(t, devlink.PCIVF, 1); got != (function.Rate{}) {
			t.Errorf("after release: %+v", got)
		}
	})

	t.Run("VF that the administrator has limited gets that limit back", func(t *testing.T) {
		port := portOf(t, l.eswitch, pf, devlink.PCIVF, 1)
		own := function.Rate{Max: 500}
		must.Succeed(t, l.eswitch.SetRate(port.Device, port.Index, own))
		must.Succeed(t, l.attach(t, vf, &function.VFConfig{MaxTxRate: new(100)}))
		if got := l.rate(t, devlink.PCIVF, 1); got != (function.Rate{Max: 100}) {
			t.Errorf("attached: %+v", got)
		}

		l.release(t, vf)
		if got := l.rate(t, devlink.PCIVF, 1); got != own {
			t.Errorf("after release: %+v", got)
		}

		must.Succeed(t, l.eswitch.SetRate(port.Device, port.Index, function.Rate{}))
	})

	t.Run("SF", func(t *testing.T) { subfunctionRate(t, l, wish, limit) })
}

func subfunctionRate(t *testing.T, l limited, wish *function.VFConfig, limit function.Rate) {
	t.Helper()
	const sfnum = 77
	port, err := l.eswitch.AddSF(devlink.OfPCI(l.pf), 0, sfnum)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, l.eswitch.DeletePort(port.Device, port.Index)) }()

	change := devlink.FunctionChange{MAC: "02:00:00:00:00:77", Active: new(true)}
	must.Succeed(t, l.eswitch.SetFunction(port.Device, port.Index, change))
	sf := function.SubfunctionID(l.pf, sfnum)
	l.await(t, time.Now(), sf, "there, with netdev", func(f function.Function) bool {
		return f.Netdev != ""
	})

	must.Succeed(t, l.attach(t, sf, wish))
	if got := l.rate(t, devlink.PCISF, sfnum); got != limit {
		t.Errorf("attached: %+v", got)
	}

	l.release(t, sf)
	if got := l.rate(t, devlink.PCISF, sfnum); got != (function.Rate{}) {
		t.Errorf("after release: %+v", got)
	}

	err = l.attach(t, sf, &function.VFConfig{VLAN: new(100), MaxTxRate: new(100)})
	says := "vf.vlan: must be absent for SF 77 of PF " + string(l.pf)
	if err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("a VLAN for an SF: error %v, want one with %q", err, says)
	}
	if got := l.rate(t, devlink.PCISF, sfnum); got != (function.Rate{}) {
		t.Errorf("after the refusal: %+v", got)
	}

	l.release(t, sf)
}
