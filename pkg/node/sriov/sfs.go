// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// sfTimeout bounds the time in which a card makes or deletes an SF. ConnectX cards take some tenths
// of a second.
const sfTimeout = 10 * time.Second

// Devlink changes the ports of PFs. [devlink.Conn] implements it.
type Devlink interface {
	EswitchMode(devlink.Device) (devlink.EswitchMode, error)
	// PortsOf lists the ports of a device. It returns no ports if the device does not exist.
	PortsOf(devlink.Device) ([]devlink.Port, error)
	// AddSF makes an SF, inactive.
	AddSF(d devlink.Device, pf uint16, sfnum uint32) (devlink.Port, error)
	SetFunction(d devlink.Device, index uint32, to devlink.FunctionChange) error
	DeletePort(d devlink.Device, index uint32) error
}

// SFMaker makes subfunctions and deletes them. Its methods may be called concurrently, but for one
// SF only one at a time.
type SFMaker struct {
	Devlink Devlink
	// Functions returns the Functions of the node.
	Functions interface {
		Get(function.ID) (function.Function, bool)
	}
	// Fault returns the error that a health reporter shows for a PF, or "". No SF is made on a card
	// in error. A nil Fault means that no error is ever shown.
	Fault func(pf function.Function) string
	// Changes returns a channel that gets a value after every change of Functions, until ctx ends.
	Changes func(ctx context.Context) <-chan struct{}
	// Changed is called when the result of [SFMaker.NoSFs] may have changed. It must not block.
	Changed func()
	Log     logr.Logger

	mutex sync.Mutex
	// PFs for which the kernel does not report whether they can have SFs
	unsure map[pci.Address]nextLook
}

// nextLook is when a PF is asked about again, and the pause before that.
type nextLook struct {
	at    time.Time
	pause time.Duration
}

// NoSFs returns what keeps a PF from having SFs made, or nil if nothing does. It is cheap, but
// waits while the card changes its eswitch. If the kernel does not answer the question, NoSFs has
// [SFMaker.Changed] called after pauses that grow.
func (m *SFMaker) NoSFs(pf pci.Address) *v1alpha1.Shortage {
	problem := m.noSFs(pf)
	m.lookAgain(pf, problem != nil && problem.reason == v1alpha1.ReasonRefused)
	if problem == nil {
		return nil
	}
	return new(problem.shortage(pf))
}

// lookAgain has [SFMaker.Changed] called after a pause if it is unsure whether the PF can have SFs,
// unless a call is pending.
func (m *SFMaker) lookAgain(pf pci.Address, unsure bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()

	next := m.unsure[pf]
	switch {
	case !unsure:
		delete(m.unsure, pf)
		return
	case time.Now().Before(next.at):
		return
	case m.unsure == nil:
		m.unsure = map[pci.Address]nextLook{}
	}

	next.pause = min(max(2*next.pause, firstRetry), slowestRetry)
	next.at = time.Now().Add(next.pause)
	m.unsure[pf] = next
	time.AfterFunc(next.pause, m.Changed)
}

func (m *SFMaker) noSFs(pf pci.Address) *problem {
	mode, err := m.Devlink.EswitchMode(devlink.OfPCI(pf))
	switch {
	case err == nil && mode == devlink.Switchdev:
		return nil
	case err == nil:
		return problemf(v1alpha1.ReasonNotSupported,
			"has its eswitch in mode %s, and SFs need mode switchdev: "+
				"drain the node and run devlink dev eswitch set pci/%s mode switchdev", mode, pf)
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV):
		return problemf(v1alpha1.ReasonNotSupported,
			"shows no eswitch to this host, which SFs need: %v", err)
	}

	return problemf(v1alpha1.ReasonRefused, "does not tell the mode of its eswitch: %v", err)
}

// isOfDPU reports whether SFs that exist on a PF with this problem are made by a DPU for its host. It
// is not known if the kernel did not say whether SFs can be made.
func (p *problem) isOfDPU() bool { return p.reason == v1alpha1.ReasonNotSupported }

// Make makes sure that the SF exists and is active with this MAC, and returns when the inventory
// has the SF with its netdev. An empty MAC leaves the choice to the driver. Make continues the work
// of an earlier Make that was interrupted.
func (m *SFMaker) Make(ctx context.Context, sf function.ID, mac function.MAC) (err error) {
	defer wrap(&err, sf)
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, sfTimeout, fmt.Errorf("waited %s", sfTimeout))
	defer cancel()

	port, others, err := m.port(sf)
	if err != nil {
		return err
	}

	made := port == nil
	if made {
		if problem := m.noSFs(sf.Address); problem != nil {
			if _, exists := m.Functions.Get(sf); exists && problem.isOfDPU() {
				return nil // a DPU makes SFs for its host, which are used unchanged
			}
			return fmt.Errorf("cannot be made: PF %s %s", sf.Address, problem.message)
		}

		if fault := m.fault(sf.Address); fault != "" {
			return fmt.Errorf("is not made: PF %s: %s", sf.Address, fault)
		}

		sfnum, _ := sf.SFNum()
		added, err := m.Devlink.AddSF(devlink.OfPCI(sf.Address),
			pfNumber(sf.Address, others), sfnum)
		if errors.Is(err, unix.ENOSPC) {
			err = fmt.Errorf("PF %s can have no more SFs; its pools' spec.sfs or "+
				"spec.maxAllocated must be less: %w", sf.Address, err)
		}
		if err != nil {
			return err
		}

		port = &added
	}

	if err := m.activate(ctx, sf, *port, mac); err != nil {
		return err
	}

	if err := loop.Until(ctx, m.Changes, func() bool {
		f, _ := m.Functions.Get(sf)
		return f.Netdev != ""
	}); err != nil {
		return fmt.Errorf("has no netdev on the host although it is active: %s (%w)",
			m.diagnose(sf), err)
	}

	if made {
		m.Log.Info("SF made", "function", sf.String(), "mac", mac, "took", time.Since(begin))
	}

	return nil
}

// fault returns the error that a health reporter shows for a PF, or "". It does not prevent the
// deletion of an SF, because the release of the SF needs that.
func (m *SFMaker) fault(address pci.Address) string {
	if m.Fault == nil {
		return ""
	}
	return m.Fault(function.OfPF(address))
}

func wrap(err *error, sf function.ID) {
	if *err != nil {
		*err = fmt.Errorf("SF %s: %w", sf, *err)
	}
}

// port returns the SF's port at the eswitch of its own PF, or nil if it does not exist. all has all
// ports of that eswitch.
func (m *SFMaker) port(sf function.ID) (port *devlink.Port, all []devlink.Port, err error) {
	sfnum, isSF := sf.SFNum()
	if !isSF {
		return nil, nil, errors.New("must be an SF, such as 0000:3b:00.0/sf88")
	}

	all, err = m.Devlink.PortsOf(devlink.OfPCI(sf.Address))
	if err != nil {
		return nil, nil, fmt.Errorf("ports of its PF: %w", err)
	}

	for _, p := range all {
		// External ports belong to another host, whose SFs have their own numbers.
		if p.Flavour == devlink.PCISF && !p.External && p.SF == sfnum {
			return &p, all, nil
		}
	}

	return nil, all, nil
}

// pfNumber returns the number by which devlink knows a PF. It is the PF number in the ports of the
// PF's Functions. Without such a port it is the number of the PF's physical port, and without a
// physical port it is the PCI function number. See quirk "number of a PF".
func pfNumber(pf pci.Address, ports []devlink.Port) uint16 {
	number := uint16(pf[len(pf)-1] - '0')
	for _, p := range ports {
		switch p.Flavour {
		case devlink.PCIPF, devlink.PCIVF, devlink.PCISF:
			if !p.External {
				return p.PF
			}
		case devlink.Physical:
			number = uint16(p.Number)
		}
	}

	return number
}

// activate gives the SF its MAC and its device. Drivers accept a MAC only while there is no device,
// so the device of an SF with another MAC is removed and made again.
func (m *SFMaker) activate(
	ctx context.Context, sf function.ID, port devlink.Port, mac function.MAC,
) error {
	change := func(to devlink.FunctionChange) error {
		return m.Devlink.SetFunction(port.Device, port.Index, to)
	}
	hasMAC := mac == "" || port.Function.MAC == mac
	if port.Function.Active && hasMAC {
		return nil
	}

	if port.Function.Active {
		if err := change(devlink.FunctionChange{Active: new(false)}); err != nil {
			return err
		}
		if err := m.awaitGone(ctx, sf); err != nil {
			return fmt.Errorf("its device is still there although it is not active: %w", err)
		}
	}

	if !hasMAC {
		if err := change(devlink.FunctionChange{MAC: mac}); err != nil {
			return err
		}
	}

	return change(devlink.FunctionChange{Active: new(true)})
}

func (m *SFMaker) awaitGone(ctx context.Context, sf function.ID) error {
	return loop.Until(ctx, m.Changes, func() bool {
		_, exists := m.Functions.Get(sf)
		return !exists
	})
}

// diagnose returns why an active SF may have no netdev.
func (m *SFMaker) diagnose(sf function.ID) string {
	port, _, err := m.port(sf)
	f, exists := m.Functions.Get(sf)
	switch {
	case err == nil && port == nil:
		return "somebody deleted it meanwhile"
	case !exists && (err != nil || !port.Function.Attached):
		return "no driver has its device, see the kernel's log"
	case !exists:
		return "there is no auxiliary device that has its sfnum"
	case f.Driver == "":
		return fmt.Sprintf("no driver is bound to its auxiliary device %s", f.AuxDevice)
	}

	return fmt.Sprintf("driver %s of its auxiliary device %s made none, or it is in another "+
		"network namespace",
		f.Driver, f.AuxDevice)
}

// Delete deletes the SF, and returns when the inventory has lost it. A missing SF is no error. An
// SF on a PF that cannot have SFs made stays, because Make did not make it.
func (m *SFMaker) Delete(ctx context.Context, sf function.ID) (err error) {
	defer wrap(&err, sf)
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, sfTimeout, fmt.Errorf("waited %s", sfTimeout))
	defer cancel()

	port, _, err := m.port(sf)
	if err != nil {
		return err
	}

	var unknown *problem
	if port == nil {
		if unknown = m.noSFs(sf.Address); unknown != nil && unknown.isOfDPU() {
			return nil
		}
	}

	if port != nil {
		// The device is removed first, because some drivers refuse to delete the port of an active
		// SF.
		err := m.Devlink.SetFunction(port.Device, port.Index,
			devlink.FunctionChange{Active: new(false)})
		if err == nil {
			err = m.Devlink.DeletePort(port.Device, port.Index)
		}
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}

	switch err := m.awaitGone(ctx, sf); {
	case err != nil && unknown != nil:
		return fmt.Errorf("its device is still there, and whether a DPU made it is not known: PF %s "+
			"%s (%w)", sf.Address, unknown.message, err)
	case err != nil:
		return fmt.Errorf("its device is still there although its port is deleted: %w", err)
	}

	if port != nil {
		m.Log.Info("SF deleted", "function", sf.String(), "took", time.Since(begin))
	}

	return nil
}

// Watch listens until ctx ends for changes that may enable or prevent SFs on a PF.
func (m *SFMaker) Watch(ctx context.Context) error {
	devlink.Follow(ctx, "", m.Changed, m.Log)
	return nil
}
