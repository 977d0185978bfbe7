// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

const (
	// The kubelet does not report the end of pods, so files are swept at this interval.
	sweepEvery = 5 * time.Minute
	// askTimeout limits a question to the kubelet.
	askTimeout = 10 * time.Second
)

// sweepRegularly sweeps until ctx ends.
func (m *Manager) sweepRegularly(ctx context.Context) {
	_ = wait.PollUntilContextCancel(ctx, sweepEvery,
		false, func(ctx context.Context) (done bool, err error) {
			m.sweep(ctx)
			return false, nil
		})
}

// sweep asks the kubelet what pods have, and removes the files of Functions that no pod has.
func (m *Manager) sweep(ctx context.Context) {
	if m.Assigned == nil || m.relay.Forwards() {
		return
	}

	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()

	assigned, err := m.Assigned(ctx)
	if err != nil {
		m.Log.Error(err, "Cannot tell which files nobody needs any more, keeping all", "retry",
			sweepEvery.String())
		return
	}

	m.mutex.Lock()
	defer m.mutex.Unlock()

	infoFiles, cdiDevices := map[string]bool{}, map[string]bool{} // the names that are needed
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

	served := slices.Collect(maps.Keys(m.servers))
	if err := m.DeviceInfo.prune(m.resources.UnsortedList(), served, infoFiles); err != nil {
		m.Log.Error(err, "Some device-info files that nobody needs any more remain")
	}
	if m.CDI == nil {
		return
	}
	if err := m.CDI.prune(cdiDevices); err != nil {
		m.Log.Error(err, "Some CDI devices that nobody needs any more remain")
	}
}
