package source

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

const (
	// quiet is how long the file's directory must have been silent before the file is read: whoever writes it in place
	// may need several writes.
	quiet = 100 * time.Millisecond
	// patience is how long a directory that is never silent may put that off.
	patience = time.Second
	// retry is when it is tried again to watch a directory that cannot be watched.
	retry = 5 * time.Second
)

// FileOptions are those of a [File]. Only Path is needed.
type FileOptions struct {
	// Path of the file. It may be a link within its directory, as in a ConfigMap's volume; changes behind a link to
	// elsewhere go unnoticed.
	Path string
	// ResourcePrefix is that of resources of a configuration of sriov-network-device-plugin that name none.
	ResourcePrefix string
	// Check, where set, says why a DevicePool that is right by itself cannot be used here.
	Check func(v1alpha1.DevicePool) error
	// Changed, where set, is called by [File.Run] after the declarations changed. It must not block.
	Changed func()
	// Registry, where set, gets the metrics.
	Registry prometheus.Registerer
	Log      logr.Logger
}

// File declares what a file says, and what it last said before somebody broke it. Its methods may be called by several
// goroutines at once, but Run only once.
type File struct {
	options FileOptions
	metrics metrics

	mutex       sync.RWMutex
	content     []byte // that was looked at last, good or bad
	devicePools []v1alpha1.DevicePool
	problem     error // why content does not count; nil if it does
}

// OpenFile reads the file. An error says what is wrong in it and where. [File.Run] follows it from there.
func OpenFile(options FileOptions) (*File, error) {
	f := &File{options: options, metrics: newMetrics(options.Registry)}
	content, err := os.ReadFile(options.Path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if _, err := f.load(content); err != nil {
		return nil, err
	}
	return f, nil
}

// DevicePools returns all DevicePools of the file.
func (f *File) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) {
	f.mutex.RLock()
	defer f.mutex.RUnlock()
	return slices.Clone(f.devicePools), nil
}

// NodeLabels returns none: the file is the node's own, and its nodeSelectors are not applied.
func (f *File) NodeLabels(context.Context) (map[string]string, error) { return nil, nil }

// Run reads the file again whenever it changes, until ctx ends. It then returns nil. A file that has become wrong, or
// went, leaves the declarations as they were.
func (f *File) Run(ctx context.Context) error {
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

// reload looks at the file again. An error is told once for each content.
func (f *File) reload() {
	content, err := os.ReadFile(f.options.Path)
	if err != nil {
		f.refuse(nil, fmt.Errorf("read configuration: %w", err))
		return
	}
	changed, err := f.load(content)
	if err != nil {
		f.refuse(content, err)
		return
	}
	if changed && f.options.Changed != nil {
		f.options.Changed()
	}
}

// load takes over a content, if it is another one than the last and nothing is wrong with it.
func (f *File) load(content []byte) (changed bool, err error) {
	f.mutex.RLock()
	same := f.content != nil && bytes.Equal(f.content, content)
	problem := f.problem
	f.mutex.RUnlock()
	if same {
		return false, problem
	}
	devicePools, warnings, err := Parse(content, f.options.ResourcePrefix)
	if err == nil {
		err = f.check(devicePools)
	}
	if err != nil {
		return false, fmt.Errorf("configuration %s: %w", f.options.Path, err)
	}
	for _, warning := range warnings {
		f.options.Log.Info("Configuration is not what it may seem", "file", f.options.Path, "warning", warning)
	}
	f.dropNodeSelectors(devicePools)
	f.mutex.Lock()
	f.content, f.devicePools, f.problem = bytes.Clone(content), devicePools, nil
	f.mutex.Unlock()
	f.metrics.loaded()
	f.options.Log.Info("Configuration read", "file", f.options.Path, "devicePools", len(devicePools))
	return true, nil
}

func (f *File) check(devicePools []v1alpha1.DevicePool) error {
	if f.options.Check == nil {
		return nil
	}
	for _, p := range devicePools {
		if err := f.options.Check(p); err != nil {
			return fmt.Errorf("DevicePool %s: %w", p.Name, err)
		}
	}
	return nil
}

func (f *File) dropNodeSelectors(devicePools []v1alpha1.DevicePool) {
	for i := range devicePools {
		if len(devicePools[i].Spec.NodeSelector) == 0 {
			continue
		}
		f.options.Log.Info("nodeSelector is not applied: the configuration file is this node's own",
			"devicePool", devicePools[i].Name)
		devicePools[i].Spec.NodeSelector = nil
	}
}

// refuse keeps what was good and remembers what is wrong; content is nil where there is none.
func (f *File) refuse(content []byte, err error) {
	f.mutex.Lock()
	known := f.problem != nil && f.problem.Error() == err.Error()
	f.content, f.problem = bytes.Clone(content), err
	f.mutex.Unlock()
	if known {
		return
	}
	f.metrics.refused()
	f.options.Log.Error(err, "Configuration cannot be used, keeping what it was")
}
