// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	// pause is the minimum time between two reads. It is necessary because devlink also reports
	// changes of ports, and because there may be thousands of reporters.
	pause    = 100 * time.Millisecond
	lookTime = 5 * time.Second // how long Synced waits for the first read

	firstRetry, slowestRetry = 100 * time.Millisecond, 30 * time.Second // after a read that failed
)

// Devlink lists the current objects of devlink. [devlink.Conn] implements it.
type Devlink interface {
	Reporters() ([]devlink.Reporter, error)
	Ports() ([]devlink.Port, error)
}

// ReportersOptions configures [Reporters]. All fields except Registry are required.
type ReportersOptions struct {
	SysRoot string // path where the host's sysfs is mounted, "/sys"
	Devlink Devlink
	// Follow calls changed whenever reporters may have changed, until ctx ends. [devlink.Follow]
	// does this.
	Follow func(ctx context.Context, changed func())
	// Changed is called by [Reporters.Run] when the faults change. It must not block.
	Changed  func()
	Registry prometheus.Registerer
	Log      logr.Logger
}

// Reporters watches the health reporters of devlink, by which drivers report errors
// (Documentation/networking/devlink/devlink-health.rst). A Function has a fault until its driver
// has recovered. Several goroutines may call its methods at once, but Run may be called only once.
type Reporters struct {
	options ReportersOptions
	failed  prometheus.Gauge
	looked  chan struct{}
	faults  atomic.Pointer[[]fault]
}

// NewReporters returns Reporters that know no fault until [Reporters.Run] is called.
func NewReporters(options ReportersOptions) *Reporters {
	r := &Reporters{
		options: options,
		failed: promauto.With(options.Registry).NewGauge(prometheus.GaugeOpts{
			Name: "xpu_health_failed_reporters",
			Help: "Health reporters of devlink that tell an error that was not recovered from.",
		}),
		looked: make(chan struct{}),
	}

	r.faults.Store(&[]fault{})
	return r
}

// fault is an error of a reporter, and identifies the Functions that it affects.
type fault struct {
	reporter string      // as devlink(8) expects it: "pci/0000:3b:00.0 reporter fw_fatal"
	address  pci.Address // of the PCI device of the devlink instance
	whole    bool        // affects the whole device, which for a PF includes all its Functions
	// kind and index identify a VF or SF of the PF at address, if the fault affects only this
	// Function. Otherwise they are "" and 0.
	kind  function.Kind
	index int
	// auxDevice is the device of the SF that has the devlink instance, if the fault affects only
	// this SF. Otherwise it is "".
	auxDevice string
}

func (e fault) isAbout(f function.Function) bool {
	switch {
	case e.auxDevice != "":
		return f.AuxDevice == e.auxDevice
	case e.kind != "":
		return f.PF == e.address && f.Kind == e.kind && f.Index == e.index
	}
	return f.ID == function.ID{Address: e.address} || e.whole && f.PF == e.address
}

// Fault returns the errors of the Function's PF, of its own device and of its port at the eswitch,
// or "" if there are no errors. It does not block.
func (r *Reporters) Fault(f function.Function) (message string) {
	var messages []string
	for _, fault := range *r.faults.Load() {
		if fault.isAbout(f) {
			messages = append(messages,
				fmt.Sprintf(`its driver tells an error that it did not recover from: `+
					`see "devlink health show %s", then try "devlink health recover %[1]s"`,
					fault.reporter))
		}
	}

	return strings.Join(messages, "; ")
}

// Synced waits until the reporters were read once, but no longer than 5 s, because a card that
// hangs, or that fails to answer, must not keep the agent from serving others. Until then, Functions
// have no fault. Synced returns false if ctx ends first.
func (r *Reporters) Synced(ctx context.Context) bool {
	select {
	case <-r.looked:
		return true
	case <-time.After(lookTime):
		r.options.Log.Info("Health reporters could not be read yet, so that faults are not known: a "+
			"card may hang, or the log says what else is wrong",
			"waited", lookTime.String())
		return true
	case <-ctx.Done():
		return false
	}
}

// Run follows the reporters until ctx ends. A kernel without devlink has no reporters.
func (r *Reporters) Run(ctx context.Context) error {
	var changed notify.Signal
	changes := changed.Subscribe(ctx)
	var following sync.WaitGroup
	defer following.Wait()

	following.Go(func() { r.options.Follow(ctx, changed.Notify) })
	changed.Notify() // read once even if Follow cannot listen
	looked := sync.OnceFunc(func() { close(r.looked) })
	for loop.Wait(ctx, changes, 0) {
		loop.Retry(ctx, firstRetry, slowestRetry, func(context.Context) error {
			err := r.look()
			if err == nil {
				looked()
			}
			return err
		}, func(err error, retry time.Duration) {
			r.options.Log.Error(err, "Cannot read health reporters for now", "retry",
				retry.String())
		})
		loop.Sleep(ctx, pause)
	}

	return nil
}

// look reads the reporters. If the faults differ from the previous ones, it logs the differences
// and calls Changed. If a read fails, the previous faults stay.
func (r *Reporters) look() error {
	reporters, err := r.options.Devlink.Reporters()
	if err != nil {
		return err
	}

	failed := slices.DeleteFunc(reporters, func(reporter devlink.Reporter) bool {
		return !reporter.Failed
	})
	var ports []devlink.Port
	if slices.ContainsFunc(failed, func(reporter devlink.Reporter) bool {
		return reporter.Port >= 0
	}) {
		if ports, err = r.options.Devlink.Ports(); err != nil {
			return err
		}
	}

	var faults []fault
	for _, reporter := range failed {
		if fault, here := r.fault(reporter, ports); here {
			faults = append(faults, fault)
		}
	}

	r.failed.Set(float64(len(failed)))
	before := *r.faults.Swap(&faults)
	if slices.Equal(before, faults) {
		return nil
	}

	for _, f := range faults {
		if !slices.Contains(before, f) {
			r.options.Log.Info("A driver tells of an error that it did not recover from", "devlink",
				f.reporter)
		}
	}

	for _, f := range before {
		if !slices.Contains(faults, f) {
			r.options.Log.Info("A driver has recovered from its error", "devlink", f.reporter)
		}
	}

	r.options.Changed()
	return nil
}

// fault returns the fault of a reporter. here is false if the affected Functions are not on this
// node.
func (r *Reporters) fault(reporter devlink.Reporter, ports []devlink.Port) (f fault, here bool) {
	f, here = r.instance(reporter.Device)
	f.reporter = reporter.Handle() + " reporter " + reporter.Name
	if !here || reporter.Port < 0 {
		return f, here
	}

	f.whole = false // the reporter of a port concerns only the netdev of this port
	for _, port := range ports {
		if port.Device != reporter.Device || int64(port.Index) != int64(reporter.Port) {
			continue
		}

		switch port.Flavour {
		case devlink.PCIVF:
			f.kind, f.index = function.VF, int(port.VF)
		case devlink.PCISF:
			f.kind, f.index = function.SF, int(port.SF)
		}

		return f, !port.External // only ports of Functions are external
	}

	return f, false // the port is gone, and the reporter with it
}

// instance returns a fault with the device of a devlink instance. mlx5 also has instances for
// auxiliary devices: one for each SF, and one for the netdev of each PF, VF and SF, such as
// "auxiliary/mlx5_core.eth.2". The auxiliary device is below the device of the Function.
func (r *Reporters) instance(d devlink.Device) (f fault, here bool) {
	if d.Bus == "pci" {
		return fault{address: pci.Address(d.Name), whole: true}, true
	}

	dir, err := filepath.EvalSymlinks(filepath.Join(r.options.SysRoot, "bus", d.Bus,
		"devices", d.Name))
	if err != nil {
		return fault{}, false
	}

	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		name := filepath.Base(dir)
		if d.Bus == "auxiliary" && strings.Contains(name, ".sf.") {
			return fault{auxDevice: name}, true
		}
		if address, err := pci.Parse(name); err == nil {
			return fault{address: address}, true
		}
	}

	return fault{}, false
}
