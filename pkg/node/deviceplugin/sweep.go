package deviceplugin

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
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

// sweepRegularly sweeps until ctx ends.
func (m *Manager) sweepRegularly(ctx context.Context) {
	_ = wait.PollUntilContextCancel(ctx, sweepEvery, false, func(ctx context.Context) (done bool, err error) {
		m.sweep(ctx)
		return false, nil
	})
}

// sweep asks the kubelet what pods have, and removes the files of Functions that no pod has any more. Servers do not
// wait for the kubelet's answer.
func (m *Manager) sweep(ctx context.Context) {
	if m.Assigned == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	assigned, err := m.Assigned(ctx)
	if err != nil {
		m.Log.Error(err, "Cannot tell which files nobody needs any more, keeping all", "retry", sweepEvery.String())
		return
	}
	m.mutex.Lock()
	defer m.mutex.Unlock()
	infoFiles, cdiDevices := map[string]bool{}, map[string]bool{} // those that are needed
	for text, a := range assigned {
		if id, err := function.ParseID(text); err == nil {
			infoFiles[deviceInfoName(a.Resource, id)] = true
			cdiDevices[cdiDeviceName(a.Resource, id)] = true
		}
	}
	for resource, s := range m.servers {
		for _, f := range s.offer.Load().functions {
			cdiDevices[cdiDeviceName(resource, f.ID)] = true
		}
	}
	if err := removeDeviceInfo(m.DeviceInfoDir, m.resources.UnsortedList(), infoFiles); err != nil {
		m.Log.Error(err, "Some device-info files that nobody needs any more remain")
	}
	if err := m.CDI.prune(cdiDevices); err != nil {
		m.Log.Error(err, "Some CDI devices that nobody needs any more remain")
	}
}
