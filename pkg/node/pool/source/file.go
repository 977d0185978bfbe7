// SPDX-License-Identifier: Apache-2.0

// Package source reads the administrator's declarations: DevicePools from a file, from the API
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
	// quiet is how long the file's directory must not change before the file is read, because a
	// file may be written in parts.
	quiet = 100 * time.Millisecond
	// patience is how long changes of the directory can delay the reading.
	patience = time.Second
	// retry is the pause before another attempt to watch a directory that cannot be watched.
	retry = 5 * time.Second
)

// FileOptions are the options of a [File]. Path is required. [File.Run] also requires Changed.
type FileOptions struct {
	// Path of the file. It may be a link within its directory, as in a ConfigMap's volume. Changes
	// behind a link to another directory are not noticed.
	Path string
	// ResourcePrefix is the prefix of resources without one, in a configuration of
	// sriov-network-device-plugin.
	ResourcePrefix string
	// Adapt, if set, completes a valid DevicePool, or returns why it cannot be used here.
	Adapt func(*v1alpha1.DevicePool) error
	// Changed is called by [File.Run] after the declarations changed. It must not block.
	Changed  func()
	Registry prometheus.Registerer // for the metrics; nil for none
	Log      logr.Logger
}

// File has the DevicePools of a file. While the file is invalid, it keeps the last valid
// DevicePools. Its methods may be called from several goroutines at once, except for Run, which may
// be called only once. A nil File has no DevicePools.
type File struct {
	options FileOptions
	good    prometheus.Gauge
	errors  prometheus.Counter
	last    atomic.Pointer[reading]
}

// reading is the result of reading the file. It is immutable.
type reading struct {
	// content is the text of devicePools; nil until the file has been read once.
	content     []byte
	devicePools []v1alpha1.DevicePool
	// problem says what is wrong with the file now; nil if its content is in use.
	problem error
}

// OpenFile reads the file. If it is invalid, the error says what is wrong and where. [File.Run]
// follows later changes.
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

// NodeLabels returns no labels, because the file is for this node only, and its nodeSelectors are
// not applied.
func (f *File) NodeLabels(context.Context) (map[string]string, error) { return nil, nil }

// Run reads the file again whenever it changes, until ctx ends, and returns nil. The last
// declarations stay if the file becomes invalid or is removed.
func (f *File) Run(ctx context.Context) error {
	if f == nil {
		return nil
	}
	loop.Retry(ctx, retry, retry, f.follow, func(err error, pause time.Duration) {
		f.options.Log.Error(err, "Changes of the configuration are not noticed for now",
			"file", f.options.Path, "retry", pause.String())
	})
	return nil
}

// follow reads the file after changes, until ctx ends or the directory cannot be watched any more.
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
		f.reload() // includes changes from before the watch
		if !loop.Wait(ctx, watch.Changes(), 0) {
			return nil
		}
		loop.Debounce(ctx, watch.Changes(), quiet, patience)
	}
}

// reload loads the file again. If the file is invalid, reload keeps the declarations and logs the
// error once.
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

// load reads the file, and uses its content if it has changed and is valid.
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
// If both have a DevicePool of the same name, the file's counts, because it is specific to the
// node. DevicePools must not be called from several goroutines at once.
type Merged struct {
	pool.Declarations       // the API server's
	File              *File // may be nil
	Log               logr.Logger

	// hidden has the names of the API server's DevicePools that the last call left out.
	hidden []string
}

// DevicePools returns the DevicePools of the file, and the DevicePools of the API server with other
// names. It logs each DevicePool that it leaves out, once.
func (m *Merged) DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error) {
	declared, err := m.Declarations.DevicePools(ctx)
	if err != nil {
		return nil, err
	}

	out, _ := m.File.DevicePools(ctx) // never returns an error
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
