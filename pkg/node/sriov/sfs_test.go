// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	sfPF   = pci.Address("0000:3b:00.1")
	sfMAC  = function.MAC("02:00:00:00:00:58")
	pfNum3 = 3 // the PF's number, which is not its PCI function
)

var (
	sf88     = function.SubfunctionID(sfPF, 88)
	sfDevice = devlink.OfPCI(sfPF)
)

// eswitch is a PF with its ports, and an inventory that shows changes of its SFs a moment later.
type eswitch struct {
	mode    devlink.EswitchMode
	modeErr error
	// portsErr is returned with the ports.
	portsErr error
	// dies is the number of changes before the process ends: the next change and all later ones
	// fail. A negative number means that the process never ends.
	dies int
	// driverless means that no driver makes a netdev for the SF's device.
	driverless bool
	full       bool // no further SF can be made
	// devices counts the auxiliary devices made so far. Each gets its own number.
	devices int

	mutex    sync.Mutex
	ports    []devlink.Port
	seen     map[function.ID]function.Function
	changed  notify.Signal
	commands []string
}

var errDead = errors.New("the process is dead")

func newEswitch(ports ...devlink.Port) *eswitch {
	e := &eswitch{mode: devlink.Switchdev, dies: -1, devices: 3, ports: ports,
		seen: map[function.ID]function.Function{}}
	e.show()
	return e
}

// command records a change, and fails if the process is dead.
func (e *eswitch) command(format string, arguments ...any) error {
	if e.dies == 0 {
		return errDead
	}
	e.dies--
	e.commands = append(e.commands, fmt.Sprintf(format, arguments...))
	return nil
}

// show updates the inventory.
func (e *eswitch) show() {
	e.seen = map[function.ID]function.Function{}
	for _, p := range e.ports {
		if p.Flavour != devlink.PCISF || p.External || !p.Function.Active {
			continue
		}

		f := function.Function{
			ID: function.SubfunctionID(sfPF, p.SF), Kind: function.SF, AuxDevice: e.auxDevice(),
		}
		if !e.driverless {
			f.Driver, f.Netdev = "mlx5_core.sf", "eth7"
		}
		e.seen[f.ID] = f
	}

	e.changed.Notify()
}

// auxDevice returns the auxiliary device of the SF that was activated last.
func (e *eswitch) auxDevice() string { return fmt.Sprintf("mlx5_core.sf.%d", e.devices) }

// later updates the inventory when the event of the kernel arrives.
func (e *eswitch) later() {
	time.AfterFunc(100*time.Millisecond, func() {
		e.mutex.Lock()
		defer e.mutex.Unlock()
		e.show()
	})
}

func (e *eswitch) Get(id function.ID) (function.Function, bool) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	f, exists := e.seen[id]
	return f, exists
}

func (e *eswitch) EswitchMode(devlink.Device) (devlink.EswitchMode, error) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	return e.mode, e.modeErr
}

func (e *eswitch) PortsOf(d devlink.Device) ([]devlink.Port, error) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if d != sfDevice {
		return nil, nil
	}
	return slices.Clone(e.ports), e.portsErr
}

// lose deletes all ports, and makes later reads of them fail with err if it is not nil.
func (e *eswitch) lose(err error) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	e.ports, e.portsErr = nil, err
	e.show()
}

func (e *eswitch) AddSF(d devlink.Device, pf uint16, sfnum uint32) (devlink.Port, error) {
	e.mutex.Lock()
	defer e.mutex.Unlock()

	if err := e.command("add pfnum %d sfnum %d", pf, sfnum); err != nil {
		return devlink.Port{}, err
	}
	if e.full {
		return devlink.Port{}, fmt.Errorf("devlink port add: %w", unix.ENOSPC)
	}

	port := devlink.Port{Device: d, Index: 32768 + sfnum, Flavour: devlink.PCISF, PF: pf, SF: sfnum}
	e.ports = append(e.ports, port)

	return port, nil
}

func (e *eswitch) SetFunction(_ devlink.Device, index uint32, to devlink.FunctionChange) error {
	e.mutex.Lock()
	defer e.mutex.Unlock()

	i := e.port(index)
	if i < 0 {
		return fmt.Errorf("devlink port function set: %w", unix.ENODEV)
	}

	function := &e.ports[i].Function
	if to.MAC != "" {
		if function.Active {
			return fmt.Errorf("devlink port function set: %w", unix.EBUSY)
		}
		if err := e.command("hw_addr %s", to.MAC); err != nil {
			return err
		}
		function.MAC = to.MAC
	}

	if to.Active != nil {
		if err := e.command("active %t", *to.Active); err != nil {
			return err
		}
		if *to.Active && !function.Active {
			e.devices++
		}
		function.Active, function.Attached = *to.Active, *to.Active && !e.driverless
		e.later()
	}

	return nil
}

func (e *eswitch) DeletePort(_ devlink.Device, index uint32) error {
	e.mutex.Lock()
	defer e.mutex.Unlock()

	i := e.port(index)
	if i < 0 {
		return fmt.Errorf("devlink port del: %w", unix.ENODEV)
	}
	if err := e.command("del"); err != nil {
		return err
	}

	e.ports = slices.Delete(e.ports, i, i+1)
	e.later()

	return nil
}

func (e *eswitch) port(index uint32) int {
	return slices.IndexFunc(e.ports, func(p devlink.Port) bool { return p.Index == index })
}

func (e *eswitch) maker(t *testing.T) *SFMaker {
	return &SFMaker{Devlink: e, Functions: e, Changes: e.changed.Subscribe, Changed: func() {},
		Log: testr.New(t)}
}

// whole returns how the SF differs from the requested one.
func (e *eswitch) whole() error {
	f, exists := e.Get(sf88)
	i := slices.IndexFunc(e.ports, func(p devlink.Port) bool {
		return p.Flavour == devlink.PCISF && !p.External && p.SF == 88
	})
	switch {
	case i < 0:
		return errors.New("has no port")
	case e.ports[i].Function.MAC != sfMAC || !e.ports[i].Function.Active:
		return fmt.Errorf("its function is %+v", e.ports[i].Function)
	case !exists || f.Netdev == "" || f.AuxDevice != e.auxDevice():
		return fmt.Errorf("the inventory has %+v, %t", f, exists)
	}

	return nil
}

func uplink() devlink.Port {
	return devlink.Port{Device: sfDevice, Index: 65535, Flavour: devlink.Physical, Number: pfNum3}
}

// sfPort returns the port of SF 88.
func sfPort(function devlink.Function) devlink.Port {
	return devlink.Port{Device: sfDevice, Index: 32856, Flavour: devlink.PCISF, PF: pfNum3,
		SF: 88, Function: function}
}

// TestMakeSF checks that Make completes the SF from every state of an earlier attempt.
func TestMakeSF(t *testing.T) {
	external := sfPort(devlink.Function{Active: true})
	external.External, external.Controller, external.Index, external.PF = true, 1, 7, 0
	for _, test := range []struct {
		name  string
		ports []devlink.Port
		want  string
	}{
		{"nothing is there", []devlink.Port{uplink()},
			"add pfnum 3 sfnum 88, hw_addr 02:00:00:00:00:58, active true"},
		{"another host has an SF of this number", []devlink.Port{external, uplink()},
			"add pfnum 3 sfnum 88, hw_addr 02:00:00:00:00:58, active true"},
		{"a VF tells the PF's number", []devlink.Port{{Flavour: devlink.PCIVF, PF: 4}},
			"add pfnum 4 sfnum 88, hw_addr 02:00:00:00:00:58, active true"},
		{"no port tells the PF's number", nil,
			"add pfnum 1 sfnum 88, hw_addr 02:00:00:00:00:58, active true"},
		{"a port", []devlink.Port{uplink(), sfPort(devlink.Function{})},
			"hw_addr 02:00:00:00:00:58, active true"},
		{"a port with the MAC", []devlink.Port{uplink(), sfPort(devlink.Function{MAC: sfMAC})},
			"active true"},
		{"all of it", []devlink.Port{uplink(), sfPort(devlink.Function{MAC: sfMAC, Active: true})},
			""},
		{"active with another MAC",
			[]devlink.Port{
				uplink(), sfPort(devlink.Function{MAC: "02:00:00:00:00:01", Active: true}),
			},
			"active false, hw_addr 02:00:00:00:00:58, active true"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEswitch(test.ports...)
				if err := e.maker(t).Make(t.Context(), sf88, sfMAC); err != nil {
					t.Fatal(err)
				}
				if got := strings.Join(e.commands, ", "); got != test.want {
					t.Errorf("commands are %q, want %q", got, test.want)
				}
				if err := e.whole(); err != nil {
					t.Errorf("SF %v", err)
				}
			})
		})
	}
}

// TestNoSFOnASickCard checks that no SF is made on a card in error, and that existing SFs are used
// and deleted.
func TestNoSFOnASickCard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEswitch(uplink())
		maker := e.maker(t)
		sick := "reporter fw"
		maker.Fault = func(f function.Function) string {
			if f.ID.Address != sf88.Address || f.Kind != function.PF {
				t.Errorf("asked about %+v", f)
			}
			return sick
		}

		err := maker.Make(t.Context(), sf88, sfMAC)
		if err == nil ||
			!strings.Contains(err.Error(), "is not made: PF "+string(sf88.Address)+
				": reporter fw") || len(e.commands) > 0 {
			t.Errorf("error %v after %q, want that the card is in error", err, e.commands)
		}

		sick = ""
		if err := maker.Make(t.Context(), sf88, sfMAC); err != nil {
			t.Error(err)
		}

		sick = "reporter fw"
		if err := errors.Join(maker.Make(t.Context(), sf88, sfMAC),
			maker.Delete(t.Context(), sf88)); err != nil {
			t.Error(err)
		}
	})
}

// TestSFSurvivesDeath checks that after a death at any change the next process makes the SF, or
// deletes it.
func TestSFSurvivesDeath(t *testing.T) {
	for _, test := range []struct {
		name  string
		start func() *eswitch
		do    func(*SFMaker) error
		steps int
		done  func(*eswitch) error
	}{
		{"make", func() *eswitch { return newEswitch(uplink()) },
			func(m *SFMaker) error {
				return m.Make(context.Background(),
					sf88, sfMAC)
			}, 3, (*eswitch).whole},
		{"delete", func() *eswitch {
			return newEswitch(uplink(),
				sfPort(devlink.Function{MAC: sfMAC, Active: true}))
		},
			func(m *SFMaker) error {
				return m.Delete(context.Background(),
					sf88)
			}, 2, (*eswitch).gone},
	} {
		for dies := range test.steps + 1 {
			t.Run(fmt.Sprintf("%s after %d changes", test.name, dies), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					e := test.start()
					e.dies = dies
					if err := test.do(e.maker(t)); (dies < test.steps) != errors.Is(err, errDead) {
						t.Fatalf("%s = %v", test.name, err)
					}

					e.dies = -1
					if err := test.do(e.maker(t)); err != nil {
						t.Fatal(err)
					}
					if err := test.done(e); err != nil {
						t.Errorf("SF %v", err)
					}
				})
			})
		}
	}
}

// gone returns what is left of the SF.
func (e *eswitch) gone() error {
	if f, exists := e.Get(sf88); exists {
		return fmt.Errorf("is in the inventory: %+v", f)
	}
	if len(e.ports) != 1 {
		return fmt.Errorf("ports are %+v, want the uplink", e.ports)
	}
	return nil
}

// TestNoSF checks that the error for an SF that cannot be made says why.
func TestNoSF(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*eswitch)
		sf     function.ID
		want   []string
	}{
		{"legacy", func(e *eswitch) { e.mode = devlink.Legacy }, sf88,
			[]string{"SF 0000:3b:00.1/sf88", "mode legacy",
				"devlink dev eswitch set pci/0000:3b:00.1 mode switchdev"}},
		{"no eswitch", func(e *eswitch) {
			e.modeErr = unix.EOPNOTSUPP
		}, sf88, []string{"shows no eswitch to this host"}},
		{"no more", func(e *eswitch) {
			e.full = true
		}, sf88, []string{"can have no more SFs", "no space left"}},
		{"no driver", func(e *eswitch) {
			e.driverless = true
		}, sf88, []string{"mlx5_core.sf.4", "waited 10s"}},
		{"its port deleted", func(e *eswitch) {
			e.driverless = true
			time.AfterFunc(sfTimeout/2, func() { e.lose(nil) })
		}, sf88, []string{"somebody deleted it meanwhile", "waited 10s"}},
		{"its ports unreadable", func(e *eswitch) {
			e.driverless = true
			time.AfterFunc(sfTimeout/2, func() { e.lose(unix.EIO) })
		}, sf88, []string{"no driver has its device, see the kernel's log", "waited 10s"}},
		{"no SF", func(*eswitch) {}, function.ID{Address: sfPF}, []string{"must be an SF"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEswitch(uplink())
				test.change(e)
				err := e.maker(t).Make(t.Context(), test.sf, sfMAC)
				for _, words := range test.want {
					if err == nil || !strings.Contains(err.Error(), words) {
						t.Errorf("Make = %v, want %q", err, words)
					}
				}
			})
		})
	}
}

// TestSFOfADPU checks that an SF that only the DPU can make is used as it is and left as it is.
func TestSFOfADPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEswitch()
		e.modeErr = unix.EOPNOTSUPP
		e.seen[sf88] = function.Function{ID: sf88, Netdev: "eth7"}
		m := e.maker(t)
		if err := errors.Join(m.Make(t.Context(), sf88, sfMAC),
			m.Delete(t.Context(), sf88)); err != nil {
			t.Error(err)
		}
		if len(e.commands) > 0 {
			t.Errorf("commands are %q, want none", e.commands)
		}
	})
}

// TestSFOfUnknownOrigin: while the kernel does not say whether the PF can have SFs made, an SF that has
// no port any more, and whose device is still there, is neither used nor taken for deleted.
func TestSFOfUnknownOrigin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEswitch(uplink())
		e.modeErr = unix.EBUSY
		e.seen[sf88] = function.Function{ID: sf88, Netdev: "eth7"}
		m := e.maker(t)
		for name, err := range map[string]error{
			"Make": m.Make(t.Context(), sf88, sfMAC), "Delete": m.Delete(t.Context(), sf88),
		} {
			if err == nil || !strings.Contains(err.Error(), "does not tell the mode of its eswitch") {
				t.Errorf("%s: error %v", name, err)
			}
		}

		delete(e.seen, sf88)
		if err := m.Delete(t.Context(), sf88); err != nil {
			t.Errorf("Delete of an SF whose device is gone: %v", err)
		}
	})
}

// TestDeleteWaits checks that Delete waits until the inventory has lost the SF, because the SF
// could otherwise be allocated again while its device is being removed.
func TestDeleteWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEswitch(uplink(), sfPort(devlink.Function{Active: true}))
		begin := time.Now()
		if err := e.maker(t).Delete(t.Context(), sf88); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != 100*time.Millisecond {
			t.Errorf("Delete took %s, want as long as the inventory needs", took)
		}
		if err := e.gone(); err != nil {
			t.Errorf("SF %v", err)
		}
	})
}

func TestNoSFs(t *testing.T) {
	for _, test := range []struct {
		name string
		mode devlink.EswitchMode
		err  error
		want string // reason
	}{
		{"switchdev", devlink.Switchdev, nil, ""},
		{"legacy", devlink.Legacy, nil, v1alpha1.ReasonNotSupported},
		{"no eswitch", "", unix.EOPNOTSUPP, v1alpha1.ReasonNotSupported},
		{"no devlink", "", devlink.ErrNoDevlink, v1alpha1.ReasonNotSupported},
		{"no such device", "", unix.ENODEV, v1alpha1.ReasonNotSupported},
		{"not allowed", "", unix.EPERM, v1alpha1.ReasonRefused},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEswitch()
			e.mode, e.modeErr = test.mode, test.err
			got := e.maker(t).NoSFs(sfPF)
			switch {
			case test.want == "" && got != nil:
				t.Errorf("NoSFs = %+v, want nil", got)
			case test.want != "" &&
				(got == nil || got.Reason != test.want || got.PF != string(sfPF)):
				t.Errorf("NoSFs = %+v, want reason %s", got, test.want)
			}
		})
	}
}

// TestNoSFsLooksAgain checks that a temporary error takes SFs out of pools for a moment only.
func TestNoSFsLooksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEswitch()
		e.modeErr = unix.EBUSY
		m := e.maker(t)
		begin := time.Now()
		var looks atomic.Int32
		m.Changed = func() {
			looks.Add(1)
			if time.Since(begin) > 5*time.Minute {
				e.mutex.Lock()
				e.modeErr = nil
				e.mutex.Unlock()
			}
			m.NoSFs(sfPF)
		}

		for range 3 { // other changes have the pools read again meanwhile
			if s := m.NoSFs(sfPF); s == nil || s.Reason != v1alpha1.ReasonRefused {
				t.Errorf("NoSFs = %+v, want reason %s", s, v1alpha1.ReasonRefused)
			}
		}

		time.Sleep(1200 * time.Millisecond)
		if n := looks.Load(); n != 1 {
			t.Errorf("%d looks after a second, want 1", n)
		}

		time.Sleep(time.Hour)
		if s := m.NoSFs(sfPF); s != nil {
			t.Errorf("NoSFs = %+v after the error passed, want nil", s)
		}
		if n := looks.Load(); n < 8 || n > 12 {
			t.Errorf("%d looks in 5 min and none after, want some 10", n)
		}
	})
}
