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
	// pause is the shortest time between two looks: devlink also notifies of ports, and there may
	// be thousands of reporters.
	pause    = 100 * time.Millisecond
	lookTime = 5 * time.Second // how long Synced waits for the first look

	firstRetry, slowestRetry = 100 * time.Millisecond, 30 * time.Second // after a look that failed
)

// Devlink lists what devlink knows now. [devlink.Conn] does.
type Devlink interface {
	Reporters() ([]devlink.Reporter, error)
	Ports() ([]devlink.Port, error)
}

// ReportersOptions are what [Reporters] work with. Registry may be left out.
type ReportersOptions struct {
	SysRoot string // where the host's sysfs is, "/sys"
	Devlink Devlink
	// Follow calls changed whenever reporters may have changed, until ctx ends. [devlink.Follow]
	// does.
	Follow func(ctx context.Context, changed func())
	// Changed is called by [Reporters.Run] when other Functions than before have a fault. It must
	// not block.
	Changed  func()
	Registry prometheus.Registerer
	Log      logr.Logger
}

// Reporters watch the health reporters of devlink, by which drivers report errors
// (devlink-health.rst in the kernel). A Function has a fault until its driver has recovered.
// Methods may be called by several goroutines at once, but Run only once.
type Reporters struct {
	options ReportersOptions
	failed  prometheus.Gauge
	looked  chan struct{}
	faults  atomic.Pointer[[]fault]
}

// NewReporters makes Reporters that know of no fault until [Reporters.Run] is called.
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

// fault is an error that a reporter reports, with what tells the Functions that it is about.
type fault struct {
	reporter string      // as devlink(8) takes it: "pci/0000:3b:00.0 reporter fw_fatal"
	address  pci.Address // of the PCI device that has the devlink instance
	whole    bool        // it is about the whole device: of a PF, about all Functions of the PF
	// kind and index name the only VF or SF, of the PF at address, that it is about; "" and 0
	// otherwise.
	kind  function.Kind
	index int
	// of the only SF that it is about, which has the devlink instance; "" otherwise
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

// Fault returns the errors of the Function's PF, its own device and its port in the eswitch, "" for
// none. It does not block.
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

// Synced waits until the reporters were looked at once, but at most 5 s: a card that hangs must not
// stop the agent from serving others. Functions have no fault until then. It returns false if ctx
// ended before.
func (r *Reporters) Synced(ctx context.Context) bool {
	select {
	case <-r.looked:
		return true
	case <-time.After(lookTime):
		r.options.Log.Info("The kernel does not tell of health reporters, so faults are not "+
			"known yet: a card may hang",
			"waited", lookTime.String())
		return true
	case <-ctx.Done():
		return false
	}
}

// Run follows the reporters until ctx ends. A kernel without devlink has none.
func (r *Reporters) Run(ctx context.Context) error {
	var changed notify.Signal
	changes := changed.Subscribe(ctx)
	var following sync.WaitGroup
	defer following.Wait()

	following.Go(func() { r.options.Follow(ctx, changed.Notify) })
	changed.Notify() // even if Follow cannot listen
	looked := sync.OnceFunc(func() { close(r.looked) })
	for loop.Wait(ctx, changes, 0) {
		loop.Retry(ctx, firstRetry, slowestRetry, func(context.Context) error {
			defer looked()
			return r.look()
		}, func(err error, retry time.Duration) {
			r.options.Log.Error(err, "Cannot read health reporters for now", "retry",
				retry.String())
		})
		loop.Sleep(ctx, pause)
	}

	return nil
}

// look reads the reporters, and logs and notifies of what is different. If reading fails, the known
// faults stay.
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

// fault finds out which Functions a reporter is about; here is false if those are not on this node.
func (r *Reporters) fault(reporter devlink.Reporter, ports []devlink.Port) (f fault, here bool) {
	f, here = r.instance(reporter.Device)
	f.reporter = reporter.Handle() + " reporter " + reporter.Name
	if !here || reporter.Port < 0 {
		return f, here
	}

	f.whole = false // a port's reporter is about the port's netdev
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

// instance finds the device that has a devlink instance. mlx5 has instances also for auxiliary
// devices: for each SF, and for the netdev of each PF, VF and SF, "auxiliary/mlx5_core.eth.2",
// which is below the Function's device.
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
