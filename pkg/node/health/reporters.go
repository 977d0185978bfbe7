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
	// pause is the shortest time between two looks at the reporters: devlink also notifies of every change of a port, and a
	// driver with hundreds of VFs has thousands of reporters.
	pause = 100 * time.Millisecond
	// firstRetry and slowestRetry bound the pauses after a look that failed.
	firstRetry, slowestRetry = 100 * time.Millisecond, 30 * time.Second
	// lookTime is how long Synced waits for the first look.
	lookTime = 5 * time.Second
)

// Devlink lists what devlink knows now. [devlink.Conn] does.
type Devlink interface {
	Reporters() ([]devlink.Reporter, error)
	Ports() ([]devlink.Port, error)
}

// ReportersOptions are what [Reporters] work with. Registry may be left out.
type ReportersOptions struct {
	// SysRoot is where the host's sysfs is, "/sys".
	SysRoot string
	Devlink Devlink
	// Follow calls changed whenever reporters may have changed, until ctx ends. [devlink.Follow] does.
	Follow func(ctx context.Context, changed func())
	// Changed is called when other Functions than before have a fault, on the goroutine of [Reporters.Run]: it must not
	// block.
	Changed  func()
	Registry prometheus.Registerer
	Log      logr.Logger
}

// Reporters watch the health reporters of devlink (Documentation/networking/devlink/devlink-health.rst in the kernel), by
// which drivers report errors. A Function has a fault until its driver has recovered from the error. Methods may be called
// by several goroutines at once, but Run only once.
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

// fault is an error that a reporter reports.
type fault struct {
	reporter string // as devlink(8) takes it: "pci/0000:3b:00.0 reporter fw_fatal"
	scope    scope
}

// scope says which Functions a reporter is about.
type scope struct {
	// address is the PCI device of its devlink instance.
	address pci.Address
	// whole says that it is about the device as a whole: if that is a PF, about all Functions of the PF.
	whole bool
	// kind and index name the only VF or SF, of the PF at address, that it is about; "" and 0 otherwise.
	kind  function.Kind
	index int
	// auxDevice names the only SF that it is about, which has the devlink instance; "" otherwise.
	auxDevice string
}

func (s scope) has(f function.Function) bool {
	switch {
	case s.auxDevice != "":
		return f.AuxDevice == s.auxDevice
	case s.kind != "":
		return f.PF == s.address && f.Kind == s.kind && f.Index == s.index
	}
	return f.ID == function.ID{Address: s.address} || s.whole && f.PF == s.address
}

// Fault returns a message if a reporter of the Function's PF, of its own device, or of its port in the eswitch reports an
// error, "" otherwise. It does not block.
func (r *Reporters) Fault(f function.Function) (message string) {
	var messages []string
	for _, fault := range *r.faults.Load() {
		if fault.scope.has(f) {
			messages = append(messages, fmt.Sprintf(`its driver tells an error that it did not recover from: `+
				`see "devlink health show %s", then try "devlink health recover %[1]s"`, fault.reporter))
		}
	}
	return strings.Join(messages, "; ")
}

// Synced waits until the reporters were looked at once, but at most 5 s: a card that hangs must not stop the agent from
// serving others. Functions have no fault until then. It returns false if ctx ended before.
func (r *Reporters) Synced(ctx context.Context) bool {
	select {
	case <-r.looked:
		return true
	case <-time.After(lookTime):
		r.options.Log.Info("The kernel does not tell of health reporters, so faults are not known yet: a card may hang",
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
	retries := loop.Backoff(firstRetry, slowestRetry)
	for first := true; loop.Wait(ctx, changes, 0); first = false {
		delay := pause
		if err := r.look(); err != nil {
			changed.Notify()
			delay = retries.Step()
			r.options.Log.Error(err, "Cannot read health reporters for now", "retry", delay.String())
		} else {
			retries = loop.Backoff(firstRetry, slowestRetry)
		}
		if first {
			close(r.looked)
		}
		loop.Sleep(ctx, delay)
	}
	return nil
}

// look reads the reporters. If that fails, the known faults stay.
func (r *Reporters) look() error {
	reporters, err := r.options.Devlink.Reporters()
	if err != nil {
		return err
	}
	failed := slices.DeleteFunc(reporters, func(reporter devlink.Reporter) bool { return !reporter.Failed })
	var ports []devlink.Port
	if slices.ContainsFunc(failed, func(reporter devlink.Reporter) bool { return reporter.Port >= 0 }) {
		if ports, err = r.options.Devlink.Ports(); err != nil {
			return err
		}
	}
	var faults []fault
	for _, reporter := range failed {
		if scope, here := r.scope(reporter, ports); here {
			faults = append(faults, fault{reporter.Handle() + " reporter " + reporter.Name, scope})
		}
	}
	r.failed.Set(float64(len(failed)))
	r.keep(faults)
	return nil
}

// keep replaces the known faults, and logs and notifies of the difference.
func (r *Reporters) keep(faults []fault) {
	before := *r.faults.Swap(&faults)
	if slices.Equal(before, faults) {
		return
	}
	for _, f := range faults {
		if !slices.Contains(before, f) {
			r.options.Log.Info("A driver tells of an error that it did not recover from", "devlink", f.reporter)
		}
	}
	for _, f := range before {
		if !slices.Contains(faults, f) {
			r.options.Log.Info("A driver has recovered from its error", "devlink", f.reporter)
		}
	}
	r.options.Changed()
}

// scope finds out which Functions a reporter is about; false if those are not on this node.
func (r *Reporters) scope(reporter devlink.Reporter, ports []devlink.Port) (scope, bool) {
	s, ok := r.owner(reporter.Device)
	if !ok || reporter.Port < 0 {
		return s, ok
	}
	s.whole = false // a port's reporter is about the port's netdev
	i := slices.IndexFunc(ports, func(p devlink.Port) bool {
		return p.Device == reporter.Device && int64(p.Index) == int64(reporter.Port)
	})
	if i < 0 { // the port is gone, and the reporter with it
		return scope{}, false
	}
	port := ports[i]
	switch port.Flavour {
	case devlink.PCIVF:
		s.kind, s.index = function.VF, int(port.VF)
	case devlink.PCISF:
		s.kind, s.index = function.SF, int(port.SF)
	case devlink.PCIPF:
	default:
		return s, true
	}
	return s, !port.External
}

// owner finds the Function that has the devlink instance. mlx5 has instances also for auxiliary devices: for each SF, and
// for the netdev of each PF, VF and SF, "auxiliary/mlx5_core.eth.2", which is below the Function's device.
func (r *Reporters) owner(d devlink.Device) (scope, bool) {
	if d.Bus == "pci" {
		return scope{address: pci.Address(d.Name), whole: true}, true
	}
	dir, err := filepath.EvalSymlinks(filepath.Join(r.options.SysRoot, "bus", d.Bus, "devices", d.Name))
	if err != nil {
		return scope{}, false
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		name := filepath.Base(dir)
		if d.Bus == "auxiliary" && strings.Contains(name, ".sf.") {
			return scope{auxDevice: name}, true
		}
		if address, err := pci.Parse(name); err == nil {
			return scope{address: address}, true
		}
	}
	return scope{}, false
}
