// SPDX-License-Identifier: Apache-2.0

// Package source reads what the administrator declared: DevicePools from a file, from the API
// server, or from both.
package source

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// quiet is how long the file's directory must not change before the file is read, as a file may
	// be written in parts.
	quiet    = 100 * time.Millisecond
	patience = time.Second     // how long changes of the directory can put that off
	retry    = 5 * time.Second // before another attempt to watch a directory that cannot be watched
)

// FileOptions are those of a [File]. Path is needed, and Changed by [File.Run].
type FileOptions struct {
	// Path of the file. It may be a link within its directory, as in a ConfigMap's volume; changes
	// behind a link to elsewhere go unnoticed.
	Path string
	// of resources that name none, in a configuration of sriov-network-device-plugin
	ResourcePrefix string
	// Adapt, where set, completes a valid DevicePool, or says why it cannot be used here.
	Adapt func(*v1alpha1.DevicePool) error
	// Changed is called by [File.Run] after the declarations changed. It must not block.
	Changed  func()
	Registry prometheus.Registerer // for the metrics; nil for none
	Log      logr.Logger
}

// File declares the DevicePools of a file. While something is wrong with the file, it keeps the
// DevicePools that it had before. Its methods may be called by several goroutines at once, but Run
// only once. A nil File declares nothing.
type File struct {
	options FileOptions
	good    prometheus.Gauge
	errors  prometheus.Counter
	last    atomic.Pointer[reading]
}

// reading is the result of reading the file. It does not change.
type reading struct {
	content     []byte // that devicePools are from; nil until the file has been read once
	devicePools []v1alpha1.DevicePool
	problem     error // what is wrong with the file now; nil if its content is in use
}

// OpenFile reads the file. An error says what is wrong in it and where. [File.Run] follows it from
// there.
func OpenFile(options FileOptions) (*File, error) {
	factory := promauto.With(options.Registry)
	f := &File{
		options: options,
		good: factory.NewGauge(prometheus.GaugeOpts{
			Name: "xpu_config_last_load_successful",
			Help: "Whether the file of --config-file counts as it is now (1), or only as it was " +
				"before (0).",
		}),
		errors: factory.NewCounter(prometheus.CounterOpts{
			Name: "xpu_config_errors_total",
			Help: "Changes of the file of --config-file that were not taken over because " +
				"something was wrong with them.",
		}),
	}

	f.last.Store(&reading{})
	if err := f.load(); err != nil {
		return nil, err
	}

	return f, nil
}

// DevicePools returns all DevicePools of the file.
func (f *File) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) {
	if f == nil {
		return nil, nil
	}
	return slices.Clone(f.last.Load().devicePools), nil
}

// NodeLabels returns none: the file is the node's own, and its nodeSelectors are not applied.
func (f *File) NodeLabels(context.Context) (map[string]string, error) { return nil, nil }

// Run reads the file again whenever it changes, until ctx ends, and returns nil. The declarations
// stay as they were if the file becomes wrong or is removed.
func (f *File) Run(ctx context.Context) error {
	if f == nil {
		return nil
	}
	loop.Retry(ctx, retry, retry, f.follow, func(err error, pause time.Duration) {
		f.options.Log.Error(err, "Not told of changes of the configuration for now",
			"file", f.options.Path, "retry", pause.String())
	})
	return nil
}

// follow works until ctx ends or the directory cannot be watched any more.
func (f *File) follow(ctx context.Context) error {
	watch, err := watchdir.Open(filepath.Dir(f.options.Path), nil)
	if err != nil {
		return err
	}
	defer watch.Close()

	for {
		if err := watch.Watch(); err != nil {
			return err
		}
		f.reload() // also what changed while there was no watch
		if !loop.Wait(ctx, watch.Changes(), 0) {
			return nil
		}
		loop.Debounce(ctx, watch.Changes(), quiet, patience)
	}
}

// reload loads the file again. If something is wrong with it, reload keeps the declarations and
// logs the error once.
func (f *File) reload() {
	err := f.load()
	if err == nil {
		return
	}

	before := f.last.Load()
	f.last.Store(&reading{before.content, before.devicePools, err})

	if before.problem == nil || before.problem.Error() != err.Error() {
		f.good.Set(0)
		f.errors.Inc()
		f.options.Log.Error(err, "Configuration cannot be used, keeping what it was")
	}
}

// load reads the file, and takes it over if it changed and nothing is wrong with it.
func (f *File) load() error {
	content, err := os.ReadFile(f.options.Path)
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}

	before := f.last.Load()
	first := before.content == nil
	if before.problem == nil && !first && bytes.Equal(before.content, content) {
		return nil
	}

	devicePools, warnings, err := Parse(content, f.options.ResourcePrefix)
	if err == nil {
		err = f.adapt(devicePools)
	}
	if err != nil {
		return fmt.Errorf("configuration %s: %w", f.options.Path, err)
	}

	for _, warning := range warnings {
		f.options.Log.Info("Configuration is not what it may seem", "file", f.options.Path,
			"warning", warning)
	}

	for i, p := range devicePools {
		if len(p.Spec.NodeSelector) > 0 {
			f.options.Log.Info("nodeSelector is not applied: the configuration file is this "+
				"node's own", "devicePool", p.Name)
			devicePools[i].Spec.NodeSelector = nil
		}
	}

	f.last.Store(&reading{content: content, devicePools: devicePools})
	f.good.Set(1)
	f.options.Log.Info("Configuration read", "file", f.options.Path, "devicePools",
		len(devicePools))

	if !first {
		f.options.Changed()
	}

	return nil
}

func (f *File) adapt(devicePools []v1alpha1.DevicePool) error {
	if f.options.Adapt == nil {
		return nil
	}

	for i := range devicePools {
		if err := f.options.Adapt(&devicePools[i]); err != nil {
			return fmt.Errorf("DevicePool %s: %w", devicePools[i].Name, err)
		}
	}

	return nil
}

// Merged has the node labels and the DevicePools of the API server, and the DevicePools of a file.
// Of two with the same name it has the file's, which is nearer to the node. DevicePools may be
// called by one goroutine at a time.
type Merged struct {
	pool.Declarations       // the API server's
	File              *File // may be nil
	Log               logr.Logger

	hidden []string // names of the API server's DevicePools that the last call left out
}

// DevicePools returns those of the file, and those of the API server with other names. It logs once
// each DevicePool that it leaves out.
func (m *Merged) DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error) {
	declared, err := m.Declarations.DevicePools(ctx)
	if err != nil {
		return nil, err
	}

	out, _ := m.File.DevicePools(ctx) // has no errors
	ofFile := len(out)
	var hidden []string
	for _, devicePool := range declared {
		name := devicePool.Name
		if !slices.ContainsFunc(out[:ofFile], func(p v1alpha1.DevicePool) bool {
			return p.Name == name
		}) {
			out = append(out, devicePool)
			continue
		}

		hidden = append(hidden, name)
		if !slices.Contains(m.hidden, name) {
			m.Log.Info("The configuration file has a DevicePool of this name, which counts "+
				"instead of the API server's",
				"devicePool", name)
		}
	}

	m.hidden = hidden
	return out, nil
}
