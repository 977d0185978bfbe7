package source

import (
	"context"
	"slices"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Merged declares what a file and the API server declare together. Where both have a DevicePool of one name, the one of
// the file counts: it is nearer to the node. Node labels are those of the API server. DevicePools may be called by one
// goroutine at a time.
type Merged struct {
	pool.Declarations // the API server's
	file              *File
	log               logr.Logger

	hidden []string // names of the API server's DevicePools that did not count at the last call
}

// Merge puts both together. file may be nil.
func Merge(file *File, api pool.Declarations, log logr.Logger) *Merged {
	return &Merged{Declarations: api, file: file, log: log}
}

// DevicePools returns those of the file, and those of the API server with other names. It logs each DevicePool that does
// not count once.
func (m *Merged) DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error) {
	declared, err := m.Declarations.DevicePools(ctx)
	if err != nil {
		return nil, err
	}
	out, err := m.file.DevicePools(ctx)
	if err != nil {
		return nil, err
	}
	ofFile := out
	var hidden []string
	for _, devicePool := range declared {
		name := devicePool.Name
		if !slices.ContainsFunc(ofFile, func(p v1alpha1.DevicePool) bool { return p.Name == name }) {
			out = append(out, devicePool)
			continue
		}
		hidden = append(hidden, name)
		if !slices.Contains(m.hidden, name) {
			m.log.Info("The configuration file has a DevicePool of this name, which counts instead of the API server's",
				"devicePool", name)
		}
	}
	m.hidden = hidden
	return out, nil
}
