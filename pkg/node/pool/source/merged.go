package source

import (
	"context"
	"slices"
	"sync"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Merged declares what a file and the API server declare together. Where both have a DevicePool of one name, the one of
// the file counts: it is nearer to the node. Node labels are those of the API server. Its methods may be called by several
// goroutines at once.
type Merged struct {
	pool.Declarations // the API server's
	file              *File
	log               logr.Logger

	mutex  sync.Mutex
	hidden []string // names that were told of
}

// Merge puts both together. file may be nil.
func Merge(file *File, api pool.Declarations, log logr.Logger) *Merged {
	return &Merged{Declarations: api, file: file, log: log}
}

// DevicePools returns those of the file, and those of the API server with other names.
func (m *Merged) DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error) {
	devicePools, err := m.Declarations.DevicePools(ctx)
	if err != nil {
		return nil, err
	}
	out, err := m.file.DevicePools(ctx)
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, devicePool := range out {
		names[devicePool.Name] = true
	}
	var hidden []string
	for _, devicePool := range devicePools {
		if names[devicePool.Name] {
			hidden = append(hidden, devicePool.Name)
			continue
		}
		out = append(out, devicePool)
	}
	m.tell(hidden)
	return out, nil
}

// tell logs each DevicePool once as long as it is hidden.
func (m *Merged) tell(hidden []string) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for _, name := range hidden {
		if !slices.Contains(m.hidden, name) {
			m.log.Info("The configuration file has a DevicePool of this name, which counts instead of the API server's",
				"devicePool", name)
		}
	}
	m.hidden = hidden
}
