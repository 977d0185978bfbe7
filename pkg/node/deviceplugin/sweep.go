package deviceplugin

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

const (
	// sweepEvery is how often the manager looks for files of Functions that no pod has any more. The kubelet does not
	// say when a pod is gone.
	sweepEvery = 5 * time.Minute
	// askTimeout is how long the kubelet may take to say what pods have.
	askTimeout = 10 * time.Second
	// young is how old a device-info file must be before it can count as left over: the kubelet says that a pod has a
	// Function only after the Allocate that wrote the file.
	young = 10 * time.Minute
)

// ask asks the kubelet what pods have. Servers do not wait for the answer, which goes to assigned.
func (f *servers) ask(ctx context.Context) {
	m := f.manager
	if m.Assignments == nil {
		return
	}
	f.group.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		assigned, err := m.Assignments.Assigned(ctx)
		if err != nil {
			m.Log.Error(err, "Cannot tell which files nobody needs any more, keeping all",
				"retry", sweepEvery.String())
			return
		}
		f.assigned <- assigned
	})
}

// sweep removes the files of Functions that no pod has any more.
func (f *servers) sweep(assigned map[string]podresources.Assignment) {
	m := f.manager
	resources := slices.AppendSeq(slices.Collect(maps.Keys(f.servers)), maps.Keys(f.retired))
	if err := m.DeviceInfo.removeUnassigned(resources, assigned); err != nil {
		m.Log.Error(err, "Some device-info files that nobody needs any more remain")
	}
	if err := m.CDI.prune(f.needed(assigned)); err != nil {
		m.Log.Error(err, "Some CDI devices that nobody needs any more remain")
	}
}

// needed are the names of CDI devices of what is offered, and of what pods have.
func (f *servers) needed(assigned map[string]podresources.Assignment) map[string]bool {
	needed := map[string]bool{}
	for resource, r := range f.servers {
		o, _ := r.current()
		for _, function := range o.functions {
			needed[cdiDeviceName(resource, function.ID)] = true
		}
	}
	for text, a := range assigned {
		if id, err := function.ParseID(text); err == nil {
			needed[cdiDeviceName(a.Resource, id)] = true
		}
	}
	return needed
}
