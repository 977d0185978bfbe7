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
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	// pause is the shortest time between two looks at the reporters. devlink tells of all that happens to ports, too, and a
	// driver with hundreds of VFs has thousands of reporters.
	pause = 100 * time.Millisecond
	// lookTime is how long the first look is waited for.
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

// Reporters know the health reporters of devlink (Documentation/networking/devlink/devlink-health.rst in the kernel) by
// which drivers tell of errors: one that was not recovered from is a fault of its Functions until it is. Methods may be
// called by several goroutines at once, but Run only once.
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

// fault is what a failed reporter says.
type fault struct {
	reporter string // as devlink(8) takes it: "pci/0000:3b:00.0 reporter fw_fatal"
	scope    scope
}

// scope is whom a reporter speaks for.
type scope struct {
	// address is the PCI device of its devlink instance.
	address pci.Address
	// whole says that it is for the device as a whole. Of a PF all Functions depend on that.
	whole bool
	// kind and index are those of the VF or SF of the PF at address that it is for alone; "" and 0 otherwise.
	kind  function.Kind
	index int
	// auxDevice is that of the SF that it is for alone, whose own devlink instance it belongs to; "" otherwise.
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

// Fault says what the reporters tell of the Function: of its PF, of its own device, and of its port in the eswitch. It
// is "" if that is nothing. It does not block.
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

// Synced waits until the reporters were looked at once, but no longer than 5 s: a card that hangs must not keep those
// waiting who have others to care for. No Function has a fault until it answers. false means that ctx ended before.
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
	changed.Notify() // also if listening fails
	retries := backoff()
	for first := true; loop.Wait(ctx, changes, 0); first = false {
		delay := pause
		if err := r.look(); err != nil {
			changed.Notify()
			delay = retries.Step()
			r.options.Log.Error(err, "Cannot read health reporters for now", "retry", delay.String())
		} else {
			retries = backoff()
		}
		if first {
			close(r.looked)
		}
		loop.Sleep(ctx, delay)
	}
	return nil
}

// backoff is for what the kernel should not refuse.
func backoff() *wait.Backoff { return loop.Backoff(100*time.Millisecond, 30*time.Second) }

// look reads the reporters. If it fails, what was known stays.
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

// keep replaces the faults that are known, and tells of what is different.
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

// scope finds out whom a reporter speaks for; false if that is no Function of this node.
func (r *Reporters) scope(reporter devlink.Reporter, ports []devlink.Port) (scope, bool) {
	s, ok := r.owner(reporter.Device)
	if !ok || reporter.Port < 0 {
		return s, ok
	}
	s.whole = false // a port's reporter tells of its netdev
	i := slices.IndexFunc(ports, func(p devlink.Port) bool {
		return p.Device == reporter.Device && int64(p.Index) == int64(reporter.Port)
	})
	if i < 0 { // it has gone since, and the reporter with it
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

// owner is the Function that has the devlink instance. Drivers have some for auxiliary devices: mlx5 one for each SF,
// and one for the netdev of each PF, VF and SF, "auxiliary/mlx5_core.eth.2", whose device is below theirs.
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
